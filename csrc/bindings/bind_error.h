// SPDX-License-Identifier: Apache-2.0
// The one place where native errors become Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "base/error.h"

namespace peftds::bindings {

/// Raises a class of peftds_ext.errors, with errno and filename where the system refused.
inline void raise_file_error(const FileError& error, const char* name) {
  namespace py = pybind11;
  const py::object type = py::module_::import("peftds_ext.errors").attr(name);
  const py::object value = error.number() != 0 ? type(error.number(), error.description(), error.path())
                                               : type(std::string(error.what()));
  PyErr_SetObject(type.ptr(), value.ptr());
}

/// Each ErrorCode becomes one class of peftds_ext.errors, or the built-in exception of that meaning.
inline void translate_error(std::exception_ptr pointer) {
  namespace py = pybind11;
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const FileError& error) {
    switch (error.code()) {
      case ErrorCode::kStorageFull: return raise_file_error(error, "StorageFullError");
      case ErrorCode::kCorruptData: return raise_file_error(error, "CorruptDataError");
      default: return raise_file_error(error, "StorageError");
    }
  } catch (const Error& error) {
    switch (error.code()) {
      case ErrorCode::kConfig: {
        const py::object type = py::module_::import("peftds_ext.errors").attr("ConfigError");
        PyErr_SetString(type.ptr(), error.what());
        return;
      }
      case ErrorCode::kInvalidArgument: PyErr_SetString(PyExc_ValueError, error.what()); return;
      case ErrorCode::kOutOfMemory: PyErr_SetString(PyExc_MemoryError, error.what()); return;
      case ErrorCode::kStorage:
      case ErrorCode::kStorageFull:
      case ErrorCode::kCorruptData:
      case ErrorCode::kCuda: PyErr_SetString(PyExc_RuntimeError, error.what()); return;
    }
  }
}

/// Call in the body of a module: its functions then raise as above. Other modules are not affected.
inline void register_errors() { pybind11::register_local_exception_translator(&translate_error); }

}  // namespace peftds::bindings
