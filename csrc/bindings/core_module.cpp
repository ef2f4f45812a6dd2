// SPDX-License-Identifier: Apache-2.0
// Python module `_core`: importing it registers the CPU operators; its functions tell about this CPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "base/thread_pool.h"
#include "bindings/bind_error.h"
#include "bindings/bind_io.h"
#include "bindings/bind_stream.h"

namespace {

std::vector<std::string> available_cpu_isas() {
  std::vector<std::string> names;
  for (const peftds::Isa isa : peftds::supported_isas()) names.emplace_back(to_string(isa));
  return names;
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() =
      "Compiled core of peftds_ext: CPU kernels and the torch operators over them, the storage engine, and "
      "the executor of plans.";
  peftds::bindings::register_errors();
  peftds::bindings::bind_io(module);
  peftds::bindings::bind_stream(module);
  module.def(
      "cpu_isa", [] { return std::string(to_string(peftds::chosen_isa())); },
      "Instruction set that the CPU kernels use; raises ConfigError for a wrong PEFTDS_CPU_ISA.");
  module.def("available_cpu_isas", &available_cpu_isas, "Instruction sets that this CPU can run, ascending.");
  module.def(
      "worker_threads", [] { return peftds::ThreadPool::instance().worker_count(); },
      "Threads that the kernels' pool holds in this process now.");
}
