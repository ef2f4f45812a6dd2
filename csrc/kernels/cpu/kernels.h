// SPDX-License-Identifier: Apache-2.0
// The CPU kernels: raw pointers, sizes and a number of threads. No argument is null unless said.
// Arrays must not overlap. Results do not depend on the number of threads nor on the instruction
// set. All functions are thread-safe and throw Error(kConfig) as chosen_isa() does.
#pragma once

#include <cstdint>

#include "kernels/adam_math.h"
#include "kernels/dtype.h"

namespace peftds::kernels::cpu {

/// One step, in one pass over memory.
void adam_step(const AdamArrays& arrays, const AdamSettings& settings, int threads);

/// Sum of squares in fp64. Finite if and only if every element is finite: squares of finite fp32
/// values cannot overflow fp64, and nothing cancels.
[[nodiscard]] double squared_norm(const void* input, DType dtype, int64_t count, int threads);

/// Copies `grad` into `buffer` (add: adds it to `buffer`), rounding to nearest even once, and returns
/// what squared_norm(buffer) would return afterwards, in the same pass over memory.
[[nodiscard]] double accumulate(const void* grad, DType grad_dtype, void* buffer, DType buffer_dtype,
                                bool add, int64_t count, int threads);

/// Element-wise conversion, rounded to nearest even where it narrows.
void cast(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t count, int threads);

}  // namespace peftds::kernels::cpu
