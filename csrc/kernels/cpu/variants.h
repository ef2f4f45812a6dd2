// SPDX-License-Identifier: Apache-2.0
// The single-threaded loops, once per instruction set, as a table of functions.
#pragma once

#include "base/cpu_features.h"
#include "kernels/cpu/kernels.h"

namespace peftds::kernels::cpu {

/// Elements that squared_norm sums in one go; its result depends on this, so it is a constant.
inline constexpr int64_t kBlock = 32768;

struct Variant {
  /// As adam_step, on elements [begin, end). With int8 moments these are whole blocks of kMomentBlock, except
  /// that the last may end with the array.
  void (*adam)(const AdamArrays& arrays, const AdamCoefficients& coefficients, int64_t begin, int64_t end);
  /// Sum of squares of elements [begin, end), accumulated in 16 interleaved fp64 lanes.
  double (*squared_norm)(const void* input, DType dtype, int64_t begin, int64_t end);
  /// As accumulate, on elements [begin, end); returns their sum of squares as squared_norm would.
  double (*accumulate)(const void* grad, DType grad_dtype, void* buffer, DType buffer_dtype, bool add,
                       int64_t begin, int64_t end);
  /// Converts elements [begin, end).
  void (*cast)(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t begin,
               int64_t end);
};

extern const Variant kScalarVariant;
#if defined(__x86_64__)
extern const Variant kAvx2Variant;
extern const Variant kAvx512Variant;
#endif

/// The loops of `isa`; throws Error(kInvalidArgument) when this build has none.
[[nodiscard]] const Variant& variant(Isa isa);

}  // namespace peftds::kernels::cpu
