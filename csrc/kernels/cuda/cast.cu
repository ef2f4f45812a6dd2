// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/thread_loops.h"

namespace peftds::kernels::cuda {
namespace {

template <class From, class To, bool kAligned>
__global__ void __launch_bounds__(kThreads) cast_kernel(const From* from, To* to, int64_t count) {
  cast_thread<From, To, kAligned>(from, to, count, thread_number(), thread_count());
}

template <class From, class To>
void launch(const void* input, void* output, int64_t count, Stream stream) {
  constexpr int kWidth = kCastWidth<From, To>;
  const From* from = static_cast<const From*>(input);
  To* to = static_cast<To*>(output);
  const unsigned int blocks = blocks_for(count, kWidth, kMaxBlocks);
  if (is_aligned<From, kWidth>(from) && is_aligned<To, kWidth>(to)) {
    cast_kernel<From, To, true><<<blocks, kThreads, 0, stream>>>(from, to, count);
  } else {
    cast_kernel<From, To, false><<<blocks, kThreads, 0, stream>>>(from, to, count);
  }
  check_launch("launch of cast_kernel");
}

}  // namespace

void launch_cast(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t count,
                 Stream stream) {
  if (count == 0) return;
  if (input_dtype == output_dtype) {  // bits as they are, NaNs included
    const size_t bytes = static_cast<size_t>(count * size_of(input_dtype));
    PEFTDS_CUDA(cudaMemcpyAsync(output, input, bytes, cudaMemcpyDeviceToDevice, stream));
    return;
  }
  with_type(input_dtype, [&](auto from) {
    with_type(output_dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      if constexpr (!std::is_same_v<From, To>) launch<From, To>(input, output, count, stream);
    });
  });
}

}  // namespace peftds::kernels::cuda
