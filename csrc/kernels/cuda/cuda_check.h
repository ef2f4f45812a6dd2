// SPDX-License-Identifier: Apache-2.0
// Every call of the CUDA runtime that must succeed goes through these.
#pragma once

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace peftds::kernels::cuda {

/// Throws Error(kCuda) that names `what`, unless `status` is success.
inline void check(cudaError_t status, const char* what) {
  PEFTDS_CHECK(
      status == cudaSuccess, kCuda, what, " failed: ", cudaGetErrorString(status), " (",
      cudaGetErrorName(status),
      "). The fault may lie in earlier work on this device: CUDA_LAUNCH_BLOCKING=1 shows where. With "
      "cudaErrorNoKernelImageForDevice, build again with this device in TORCH_CUDA_ARCH_LIST.");
}

/// Call right after `kernel<<<...>>>()`: throws Error(kCuda) if the launch was refused.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

}  // namespace peftds::kernels::cuda

/// Throws Error(kCuda) with the text of the call, unless it returns cudaSuccess.
#define PEFTDS_CUDA(call) ::peftds::kernels::cuda::check((call), #call)
