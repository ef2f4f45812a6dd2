// SPDX-License-Identifier: Apache-2.0
// A PageLock as a Python object, by which one of our modules hands it to another.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "base/error.h"
#include "base/page_lock.h"

namespace peftds::bindings {

inline constexpr const char* kPageLockCapsule = "peftds_ext.page_lock";

/// `page_lock` must stay valid until the process ends.
inline pybind11::capsule to_capsule(const PageLock& page_lock) {
  return pybind11::capsule(&page_lock, kPageLockCapsule);
}

/// Throws kInvalidArgument for a capsule of something else.
inline const PageLock& page_lock_in(const pybind11::capsule& capsule) {
  PEFTDS_CHECK(PyCapsule_IsValid(capsule.ptr(), kPageLockCapsule) != 0, kInvalidArgument,
               "a page lock is what _core.mlock_page_lock() or _cuda.page_lock() returns, got ",
               std::string(pybind11::repr(capsule)));
  return *capsule.get_pointer<PageLock>();
}

}  // namespace peftds::bindings
