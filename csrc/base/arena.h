// SPDX-License-Identifier: Apache-2.0
// Page-aligned host memory in exactly the sizes asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/page_lock.h"

namespace peftds {

/// Hands out buffers and keeps those that come back for the next request of the same size, or for a smaller
/// one that can use them.
///
/// A buffer is a mapping of its own, rounded up to the page and to nothing more, so there is neither
/// fragmentation nor a slot size to guess. All that is held stays within `kSlack` above the largest
/// amount that was in use at once; beyond it, the mappings unused for longest go back to the system.
/// Mappings of 2 MiB and more lie in huge pages where the system has them.
///
/// Given a PageLock, mappings are page-locked as long as they are held, as far as the system allows it: one
/// that it refuses is used unlocked, and `why_not_locked` tells of that. A device that copies from or to a
/// buffer must be done before the buffer goes.
///
/// Thread-safe. Buffers may outlive the arena. The child of a fork() does not have the memory that its parent
/// locked, and must not touch such buffers; what is mapped there is not locked.
class Arena {
 public:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kHugePage = int64_t{2} << 20;
  static constexpr double kSlack = 0.04;

  /// Is told about mappings, for example to register them with a kernel interface. They are locked already
  /// when they are `mapped`, and still when they are `unmapping`. Called with the arena's lock held: must
  /// not call the arena. Must outlive the arena and its buffers.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void mapped(std::byte* data, int64_t size) noexcept = 0;
    virtual void unmapping(std::byte* data) noexcept = 0;
  };

  struct Usage {
    int64_t live = 0;         // bytes of the mappings that are in use now
    int64_t held = 0;         // bytes mapped now
    int64_t locked = 0;       // those of them that are page-locked in this process
    int64_t peak_live = 0;    // the largest `live` so far
    int64_t peak_held = 0;    // the largest `held` so far
    int64_t peak_locked = 0;  // the largest `locked` so far
  };

  class Buffer;

  explicit Arena(std::shared_ptr<Listener> listener = nullptr,
                 std::optional<PageLock> page_lock = std::nullopt);

  /// Returns `size` bytes of memory, aligned to the page, with any content. A mapping of up to `most` bytes
  /// may serve if it is there, and is in use as a whole then. Throws kOutOfMemory, and kInvalidArgument
  /// unless `size` is positive.
  [[nodiscard]] Buffer allocate(int64_t size, int64_t most = 0);

  [[nodiscard]] Usage usage() const;

  /// Why a mapping could not be page-locked, and what helps; of several the first. Empty while there is none,
  /// and without a PageLock.
  [[nodiscard]] std::string why_not_locked() const;

 private:
  struct Mapping {
    std::byte* data = nullptr;
    int64_t size = 0;
    bool locked = false;
  };
  struct State;
  std::shared_ptr<State> state_;
};

/// Memory of an arena; goes back when the buffer is destroyed.
class Arena::Buffer {
 public:
  Buffer(Buffer&& other) noexcept = default;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer();

  [[nodiscard]] std::byte* data() const noexcept { return mapping_.data; }
  [[nodiscard]] int64_t size() const noexcept { return size_; }

 private:
  friend class Arena;
  Buffer(std::shared_ptr<State> state, const Mapping& mapping, int64_t size);

  std::shared_ptr<State> state_;  // null once moved from
  Mapping mapping_;
  int64_t size_;
};

}  // namespace peftds
