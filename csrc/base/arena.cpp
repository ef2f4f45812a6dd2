// SPDX-License-Identifier: Apache-2.0
#include "base/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace peftds {
namespace {

constexpr int64_t kLargest = int64_t{1} << 56;  // no address space has more; sums cannot overflow

int64_t whole_pages(int64_t size) { return (size + Arena::kPage - 1) / Arena::kPage * Arena::kPage; }

/// Maps fresh memory, in huge pages as far as it fills them, or returns null with errno set. A block of
/// scattered small pages can have more segments than a disk takes in one request.
std::byte* map_memory(int64_t size) {
  const int64_t spare = size >= Arena::kHugePage ? Arena::kHugePage - Arena::kPage : 0;
  void* whole = mmap(nullptr, static_cast<size_t>(size + spare), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  auto* data = static_cast<std::byte*>(whole);
  if (spare == 0) return data;
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % Arena::kHugePage);
  const int64_t before = past == 0 ? 0 : Arena::kHugePage - past;
  if (before > 0) munmap(data, static_cast<size_t>(before));
  data += before;
  if (before < spare) munmap(data + size, static_cast<size_t>(spare - before));
  madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // advice: where there are none it changes nothing
  return data;
}

std::string limit_on_locked_memory() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return detail::concat(limit.rlim_cur / 1024, " KiB");
}

/// Page-locks memory as long as it can, for the process that made it. A child made by fork() inherits no
/// lock, and must not end those that a driver keeps for its parent.
class Locker {
 public:
  explicit Locker(std::optional<PageLock> page_lock) : page_lock_(page_lock) {}

  /// Returns whether the memory is locked now, after `before` bytes of other memory.
  bool lock(std::byte* data, int64_t size, int64_t before) noexcept {
    if (!page_lock_ || !in_own_process()) return false;
    const int code = page_lock_->lock(data, static_cast<size_t>(size));
    if (code != 0 && !failure_) failure_ = {size, before, code};
    // fork() copies at once what a driver has pinned; to a child the memory is of no use.
    if (code == 0) madvise(data, static_cast<size_t>(size), MADV_DONTFORK);
    return code == 0;
  }

  /// Of what is locked, which is unmapped next even if this is refused.
  void unlock(std::byte* data, int64_t size) noexcept {
    if (in_own_process()) page_lock_->unlock(data, static_cast<size_t>(size));
  }

  [[nodiscard]] bool in_own_process() const noexcept { return getpid() == process_; }

  [[nodiscard]] std::string why_not() const {
    if (!page_lock_) return "";
    if (!in_own_process()) return "this arena was made by another process, before fork(): make one here";
    if (!failure_) return "";
    return detail::concat("a buffer of ", failure_->size, " bytes could not be page-locked (",
                          page_lock_->describe(failure_->code), "), after ", failure_->before,
                          " bytes that are. It is used all the same, but copies between it and a device are "
                          "slower and are waited for. Raise the limit on locked memory (ulimit -l, which is ",
                          limit_on_locked_memory(),
                          "; for a container --ulimit memlock=-1), or leave more host memory free");
  }

 private:
  struct Failure {
    int64_t size;
    int64_t before;
    int code;
  };

  const std::optional<PageLock> page_lock_;
  const pid_t process_ = getpid();
  std::optional<Failure> failure_;  // the first
};

}  // namespace

struct Arena::State {
  State(std::shared_ptr<Listener> who, std::optional<PageLock> page_lock)
      : locker(page_lock), listener(std::move(who)) {}
  ~State() {
    while (!unused.empty()) release_oldest();
  }

  Mapping take(int64_t size, int64_t most) {
    const std::lock_guard lock(mutex);
    forget_what_is_not_here();
    Mapping mapping = reuse(size, most);
    if (mapping.data == nullptr) {
      make_room(size);  // mapping is the only way in which more becomes held
      mapping = map(size);
    }
    usage.live += mapping.size;
    usage.peak_live = std::max(usage.peak_live, usage.live);
    return mapping;
  }

  void give_back(const Mapping& mapping) noexcept {
    const std::lock_guard lock(mutex);
    usage.live -= mapping.size;
    unused.push_back(mapping);
  }

  mutable std::mutex mutex;
  Usage usage;
  Locker locker;

 private:
  /// Takes the smallest unused mapping of a size from `size` to `most`, and of these the one used last.
  Mapping reuse(int64_t size, int64_t most) {
    auto best = unused.end();
    for (auto mapping = unused.begin(); mapping != unused.end(); ++mapping)
      if (mapping->size >= size && mapping->size <= most &&
          (best == unused.end() || mapping->size <= best->size))
        best = mapping;
    if (best == unused.end()) return {};
    const Mapping found = *best;
    unused.erase(best);
    return found;
  }

  /// Keeps the bound on held memory when `size` more bytes are going to be mapped.
  void make_room(int64_t size) {
    const auto peak = static_cast<double>(std::max(usage.peak_live, usage.live + size));
    const auto limit = static_cast<int64_t>((1.0 + kSlack) * peak);
    while (!unused.empty() && usage.held + size > limit) release_oldest();
  }

  Mapping map(int64_t size) {
    std::byte* data = map_memory(size);
    PEFTDS_CHECK(data != nullptr, kOutOfMemory, "no memory for a buffer of ", size, " bytes (",
                 std::strerror(errno), "); ", usage.held, " bytes are held already");
    usage.held += size;
    usage.peak_held = std::max(usage.peak_held, usage.held);
    const bool locked = locker.lock(data, size, usage.locked);  // populates it, in huge pages if it may
    if (locked) usage.locked += size;
    usage.peak_locked = std::max(usage.peak_locked, usage.locked);
    if (listener) listener->mapped(data, size);
    return {data, size, locked};
  }

  void release_oldest() noexcept {
    const Mapping oldest = unused.front();
    unused.pop_front();
    usage.held -= oldest.size;
    if (listener) listener->unmapping(oldest.data);
    if (oldest.locked) {
      locker.unlock(oldest.data, oldest.size);
      usage.locked -= oldest.size;
    }
    if (is_here(oldest)) munmap(oldest.data, static_cast<size_t>(oldest.size));
  }

  /// Whether the memory is in this process: a child of fork() has nothing where its parent's locked memory
  /// is, or something else by now.
  [[nodiscard]] bool is_here(const Mapping& mapping) const noexcept {
    return !mapping.locked || locker.in_own_process();
  }

  void forget_what_is_not_here() noexcept {
    if (locker.in_own_process()) return;
    const auto gone = [this](const Mapping& mapping) { return !is_here(mapping); };
    for (const Mapping& mapping : unused)
      if (gone(mapping)) usage.held -= mapping.size;
    unused.remove_if(gone);
  }

  std::shared_ptr<Listener> listener;
  std::list<Mapping> unused;  // the one unused for longest first
};

Arena::Arena(std::shared_ptr<Listener> listener, std::optional<PageLock> page_lock)
    : state_(std::make_shared<State>(std::move(listener), page_lock)) {}

Arena::Buffer Arena::allocate(int64_t size, int64_t most) {
  PEFTDS_CHECK(size > 0, kInvalidArgument, "a buffer must have a positive size, got ", size);
  PEFTDS_CHECK(size <= kLargest, kOutOfMemory, "no machine has memory for a buffer of ", size, " bytes");
  return {state_, state_->take(whole_pages(size), whole_pages(std::clamp(most, size, kLargest))), size};
}

Arena::Usage Arena::usage() const {
  const std::lock_guard lock(state_->mutex);
  Usage usage = state_->usage;
  if (!state_->locker.in_own_process()) usage.locked = 0;
  return usage;
}

std::string Arena::why_not_locked() const {
  const std::lock_guard lock(state_->mutex);
  return state_->locker.why_not();
}

Arena::Buffer::Buffer(std::shared_ptr<State> state, const Mapping& mapping, int64_t size)
    : state_(std::move(state)), mapping_(mapping), size_(size) {}

Arena::Buffer::~Buffer() {
  if (state_) state_->give_back(mapping_);
}

}  // namespace peftds
