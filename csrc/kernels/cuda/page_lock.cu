// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/page_lock.h"

#include <cuda_runtime_api.h>

namespace peftds::kernels::cuda {
namespace {

/// Returns the code, and takes it back from the runtime: else the next check of a launch would find it.
int settled(cudaError_t status) {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

int register_memory(void* data, size_t size) {
  return settled(cudaHostRegister(data, size, cudaHostRegisterPortable));
}

int unregister_memory(void* data, size_t /*size*/) { return settled(cudaHostUnregister(data)); }

const char* describe(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // namespace

const PageLock& page_lock() {
  static constexpr PageLock kLock{&register_memory, &unregister_memory, &describe};
  return kLock;
}

}  // namespace peftds::kernels::cuda
