// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace peftds::bindings {

/// Adds the executor of transfer plans to a module.
void bind_stream(pybind11::module_& module);

}  // namespace peftds::bindings
