// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace peftds::bindings {

/// Adds the storage engine, its files and its memory to a module.
void bind_io(pybind11::module_& module);

}  // namespace peftds::bindings
