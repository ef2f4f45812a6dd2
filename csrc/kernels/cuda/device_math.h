// SPDX-License-Identifier: Apache-2.0
// The fp32 operations that adam_update.inl.h needs, each rounded once, to nearest even. The intrinsics
// hold that whatever the flags of nvcc. The host versions, with the same results, are for tests.
#pragma once

#include <cmath>

#include "kernels/macros.h"

namespace peftds::kernels::cuda {

struct DeviceMath {
  using Value = float;

  PEFTDS_HOST_DEVICE static float set1(float x) { return x; }
#if defined(__CUDA_ARCH__)
  PEFTDS_HOST_DEVICE static float mul(float a, float b) { return __fmul_rn(a, b); }
  PEFTDS_HOST_DEVICE static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  PEFTDS_HOST_DEVICE static float sqrt(float a) { return __fsqrt_rn(a); }
  PEFTDS_HOST_DEVICE static float div(float a, float b) { return __fdiv_rn(a, b); }
#else
  PEFTDS_HOST_DEVICE static float mul(float a, float b) { return a * b; }
  PEFTDS_HOST_DEVICE static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  PEFTDS_HOST_DEVICE static float sqrt(float a) { return std::sqrt(a); }
  PEFTDS_HOST_DEVICE static float div(float a, float b) { return a / b; }
#endif
};

}  // namespace peftds::kernels::cuda
