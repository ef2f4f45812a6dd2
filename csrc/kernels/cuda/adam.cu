// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/grid.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/thread_loops.h"

namespace peftds::kernels::cuda {
namespace {

template <class Grad, class Out, bool kAligned>
__global__ void __launch_bounds__(kThreads) adam_kernel(AdamArrays arrays, AdamCoefficients coefficients) {
  adam_thread<Grad, Out, kAligned>(arrays, coefficients, thread_number(), thread_count());
}

template <class Grad, class Out>
void launch(const AdamArrays& a, const AdamCoefficients& c, Stream stream) {
  bool aligned = is_aligned<float, kAdamWidth>(a.param) && is_aligned<float, kAdamWidth>(a.exp_avg) &&
                 is_aligned<float, kAdamWidth>(a.exp_avg_sq) && is_aligned<Grad, kAdamWidth>(a.grad);
  if constexpr (!std::is_void_v<Out>) aligned = aligned && is_aligned<Out, kAdamWidth>(a.out);
  const unsigned int blocks = blocks_for(a.count, kAdamWidth, kMaxBlocks);
  if (aligned) {
    adam_kernel<Grad, Out, true><<<blocks, kThreads, 0, stream>>>(a, c);
  } else {
    adam_kernel<Grad, Out, false><<<blocks, kThreads, 0, stream>>>(a, c);
  }
  check_launch("launch of adam_kernel");
}

}  // namespace

void launch_adam_step(const AdamArrays& arrays, const AdamCoefficients& coefficients, Stream stream) {
  if (arrays.count == 0) return;
  with_type(arrays.grad_dtype, [&](auto grad) {
    using Grad = decltype(grad);
    if (arrays.out == nullptr) return launch<Grad, void>(arrays, coefficients, stream);
    with_type(arrays.out_dtype, [&](auto out) { launch<Grad, decltype(out)>(arrays, coefficients, stream); });
  });
}

}  // namespace peftds::kernels::cuda
