// SPDX-License-Identifier: Apache-2.0
// A file opened for direct I/O where its file system allows it, and for buffered I/O always.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace peftds::io {

enum class Access {
  kRead,    // must exist
  kCreate,  // read and write; must not exist
  kUpdate,  // read and write; must exist
};

enum class Direct {
  kAuto,  // direct I/O unless the file system refuses it
  kOff,   // buffered I/O alone
};

/// Two descriptors of one file. Both see the same bytes: the kernel writes dirty pages back before
/// a direct read and drops clean ones after a direct write (open(2), notes on O_DIRECT).
///
/// Thread-safe. Errors are FileError.
class File {
 public:
  File(std::string path, Access access, Direct direct);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  /// True while direct I/O is used. It ends for good when the file system turns out to refuse it.
  [[nodiscard]] bool direct() const noexcept { return direct_usable_.load(std::memory_order_relaxed); }
  void give_up_direct() const noexcept { direct_usable_.store(false, std::memory_order_relaxed); }
  /// Why direct I/O is not used; empty if it is.
  [[nodiscard]] std::string why_buffered() const;

  /// What offset, size and memory of a direct transfer must be multiples of.
  [[nodiscard]] int64_t alignment() const noexcept { return alignment_; }

  [[nodiscard]] int direct_descriptor() const noexcept { return direct_; }
  [[nodiscard]] int buffered_descriptor() const noexcept { return buffered_; }

  [[nodiscard]] int64_t size() const;

  /// Throws kCorruptData if size or time of the last change are not what they were when it was opened.
  /// For files that only others could change.
  void check_unchanged() const;

  /// Takes the space of [offset, offset + size) on the disk, so that writing there cannot find it
  /// full, and grows the file to hold it. Where the file system cannot reserve, free space is only
  /// compared and the file grown. Throws kStorageFull, with the file unchanged in size.
  void preallocate(int64_t offset, int64_t size) const;

 private:
  std::string path_;
  std::string refusal_;
  int buffered_ = -1;
  int direct_ = -1;
  int64_t alignment_ = 4096;
  int64_t size_at_open_ = 0;
  int64_t changed_at_open_ = 0;  // nanoseconds since the epoch
  mutable std::atomic<bool> direct_usable_{false};
};

/// Composes what is told about a failed operation: what was tried, the system's reason, the remedy.
/// ENOSPC and EDQUOT give kStorageFull, everything else kStorage.
[[noreturn]] void throw_file_error(const std::string& what, const std::string& path, int number);

}  // namespace peftds::io
