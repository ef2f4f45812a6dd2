// SPDX-License-Identifier: Apache-2.0
#include "base/page_lock.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace peftds {
namespace {

int lock_memory(void* data, size_t size) {
  if (mlock(data, size) == 0) return 0;
  const int code = errno;
  munlock(data, size);  // where only the populating failed, the pages count as locked
  return code;
}

int unlock_memory(void* data, size_t size) { return munlock(data, size) == 0 ? 0 : errno; }

const char* describe_errno(int code) { return std::strerror(code); }

}  // namespace

const PageLock& mlock_page_lock() {
  static constexpr PageLock kLock{&lock_memory, &unlock_memory, &describe_errno};
  return kLock;
}

}  // namespace peftds
