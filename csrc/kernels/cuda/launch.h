// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels: device pointers, sizes and a stream. No argument is null unless said. Arrays
// must not overlap and may have any alignment that their element type allows.
//
// Each function queues work on `stream` and returns; it allocates nothing and waits for nothing. The
// device of `stream` must be the current one. Throws Error(kCuda) when the launch is refused.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/adam_math.h"
#include "kernels/dtype.h"

struct CUstream_st;

namespace peftds::kernels::cuda {

/// cudaStream_t, without the runtime's headers.
using Stream = CUstream_st*;

/// One step, on device memory, as kernels::cpu::adam_step. Results have the same bits as on the
/// CPU, except for the payload of NaNs.
void launch_adam_step(const AdamArrays& arrays, const AdamCoefficients& coefficients, Stream stream);

/// Element-wise conversion with the same bits as kernels::cpu::cast.
void launch_cast(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t count,
                 Stream stream);

/// Doubles of scratch memory that launch_squared_norm needs.
inline constexpr int64_t kSquaredNormScratch = 1024;

/// Writes the sum of squares to `*result`. Finite if and only if every element is finite. The order of
/// summation depends on `count` and `dtype` alone, so a repeated call gives the same bits, on any device.
/// `scratch` holds kSquaredNormScratch doubles, which must stay allocated until the work is done.
void launch_squared_norm(const void* input, DType dtype, int64_t count, double* scratch, double* result,
                         Stream stream);

/// Compute capabilities that this build holds kernels for, as 10 * major + minor, ascending.
[[nodiscard]] std::vector<int> architectures();

/// Version of the CUDA runtime that is loaded: 1000 * major + 10 * minor. Throws Error(kCuda).
[[nodiscard]] int runtime_version();

}  // namespace peftds::kernels::cuda
