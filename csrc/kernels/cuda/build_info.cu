// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/cuda/cuda_check.h"
#include "kernels/cuda/launch.h"

namespace peftds::kernels::cuda {

std::vector<int> architectures() {
  std::vector<int> list = {__CUDA_ARCH_LIST__};  // such as 800,900
  for (int& architecture : list) architecture /= 10;
  std::sort(list.begin(), list.end());
  return list;
}

int runtime_version() {
  int version = 0;
  PEFTDS_CUDA(cudaRuntimeGetVersion(&version));
  return version;
}

}  // namespace peftds::kernels::cuda
