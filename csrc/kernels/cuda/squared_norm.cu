// SPDX-License-Identifier: Apache-2.0
// Two stages without atomics: each block sums its threads, then one block sums the blocks.
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/thread_loops.h"

namespace peftds::kernels::cuda {
namespace {

/// Adds up `value` over the block, in a fixed order; the result is valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double values[kThreads];
  values[threadIdx.x] = value;
  __syncthreads();
  for (unsigned int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) values[threadIdx.x] += values[threadIdx.x + half];
    __syncthreads();
  }
  return values[0];
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads) square_kernel(const T* data, int64_t count, double* partial) {
  const double sum = block_sum(square_thread<T, kAligned>(data, count, thread_number(), thread_count()));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_kernel(const double* partial, unsigned int count, double* result) {
  double mine = 0.0;
  for (unsigned int i = threadIdx.x; i < count; i += kThreads) mine += partial[i];
  const double sum = block_sum(mine);
  if (threadIdx.x == 0) *result = sum;
}

template <class T>
void launch(const void* input, int64_t count, double* scratch, double* result, Stream stream) {
  const T* data = static_cast<const T*>(input);
  const unsigned int blocks = blocks_for(count, kSquareWidth<T>, kSquaredNormScratch);
  double* partial = blocks == 1 ? result : scratch;
  if (is_aligned<T, kSquareWidth<T>>(data)) {
    square_kernel<T, true><<<blocks, kThreads, 0, stream>>>(data, count, partial);
  } else {
    square_kernel<T, false><<<blocks, kThreads, 0, stream>>>(data, count, partial);
  }
  check_launch("launch of square_kernel");
  if (blocks == 1) return;
  sum_kernel<<<1, kThreads, 0, stream>>>(partial, blocks, result);
  check_launch("launch of sum_kernel");
}

}  // namespace

void launch_squared_norm(const void* input, DType dtype, int64_t count, double* scratch, double* result,
                         Stream stream) {
  with_type(dtype, [&](auto type) { launch<decltype(type)>(input, count, scratch, result, stream); });
}

}  // namespace peftds::kernels::cuda
