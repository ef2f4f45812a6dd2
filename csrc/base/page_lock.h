// SPDX-License-Identifier: Apache-2.0
// How memory is page-locked, as a choice of whoever makes an arena.
#pragma once

#include <cstddef>

namespace peftds {

/// Two functions that lock memory into its physical pages and let it go again, and one that says why they
/// did not. They are called from any thread, must not throw, and must stay callable until the process ends.
struct PageLock {
  /// Locks whole pages of mapped memory, which are populated by that. Returns 0, or a code of its own; then
  /// nothing is locked.
  int (*lock)(void* data, size_t size);

  /// Ends the lock of exactly what a call of `lock` locked. The memory is still mapped, and is unmapped
  /// next whatever is returned.
  int (*unlock)(void* data, size_t size);

  /// Says what a code other than 0 means. The text stays valid until the next call on this thread.
  const char* (*describe)(int code);
};

/// Memory that the system may not swap out, by mlock(); no device is told about it. Its codes are errno's.
[[nodiscard]] const PageLock& mlock_page_lock();

}  // namespace peftds
