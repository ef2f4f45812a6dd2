// SPDX-License-Identifier: Apache-2.0
// Shape of a launch, position of a thread in it, and choice of the element types.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/dtype.h"

namespace peftds::kernels::cuda {

inline constexpr int kThreads = 256;  // per block

/// Blocks that give each group of `width` elements a thread, from 1 to `limit`. Threads loop when the
/// limit is reached.
[[nodiscard]] inline unsigned int blocks_for(int64_t count, int64_t width, int64_t limit) {
  const int64_t per_block = kThreads * width;
  const int64_t blocks = count / per_block + (count % per_block != 0 ? 1 : 0);
  return static_cast<unsigned int>(std::clamp<int64_t>(blocks, 1, limit));
}

/// Blocks of an element-wise kernel: enough to fill any device many times over.
inline constexpr int64_t kMaxBlocks = 32768;

/// Number of the calling thread in the whole grid, and the number of threads there.
__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t thread_count() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

/// Calls `function` with a value of the element type that `dtype` names.
template <class Function>
void with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32: return function(0.0f);
    case DType::kBFloat16: return function(BFloat16{});
    case DType::kFloat16: return function(Float16{});
  }
}

}  // namespace peftds::kernels::cuda
