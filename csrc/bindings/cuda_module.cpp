// SPDX-License-Identifier: Apache-2.0
// Python module `_cuda`: importing it, after `_core`, registers the CUDA operators; its functions tell
// about this build. Importing needs a CUDA torch, not a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bind_error.h"
#include "bindings/page_lock_capsule.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/page_lock.h"

namespace {

std::vector<std::string> arch_list() {
  std::vector<std::string> names;
  for (const int architecture : peftds::kernels::cuda::architectures()) {
    names.push_back("sm_" + std::to_string(architecture));
  }
  return names;
}

std::string runtime_version() {
  const int version = peftds::kernels::cuda::runtime_version();
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "CUDA kernels of peftds_ext and the torch operators over them.";
  peftds::bindings::register_errors();
  module.def("arch_list", &arch_list, "Architectures that the kernels are compiled for, such as sm_90.");
  module.def("runtime_version", &runtime_version, "Version of the loaded CUDA runtime, such as 13.0.");
  module.def(
      "page_lock", [] { return peftds::bindings::to_capsule(peftds::kernels::cuda::page_lock()); },
      "A page lock for arenas: memory that every CUDA device copies from and to in the background.");
}
