// SPDX-License-Identifier: Apache-2.0
#include "base/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <mutex>
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

}  // namespace

struct Arena::State {
  struct Mapping {
    std::byte* data;
    int64_t size;
  };

  explicit State(std::shared_ptr<Listener> who) : listener(std::move(who)) {}
  ~State() {
    while (!unused.empty()) release_oldest();
  }

  Mapping take(int64_t size, int64_t most) {
    const std::lock_guard lock(mutex);
    Mapping mapping = reuse(size, most);
    if (mapping.data == nullptr) {
      make_room(size);  // mapping is the only way in which more becomes held
      mapping = {map(size), size};
    }
    usage.live += mapping.size;
    usage.peak_live = std::max(usage.peak_live, usage.live);
    return mapping;
  }

  void give_back(std::byte* data, int64_t size) noexcept {
    const std::lock_guard lock(mutex);
    usage.live -= size;
    unused.push_back({data, size});
  }

  mutable std::mutex mutex;
  Usage usage;

 private:
  /// Takes the smallest unused mapping of a size from `size` to `most`, and of these the one used last.
  Mapping reuse(int64_t size, int64_t most) {
    auto best = unused.end();
    for (auto mapping = unused.begin(); mapping != unused.end(); ++mapping)
      if (mapping->size >= size && mapping->size <= most &&
          (best == unused.end() || mapping->size <= best->size))
        best = mapping;
    if (best == unused.end()) return {nullptr, 0};
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

  std::byte* map(int64_t size) {
    std::byte* data = map_memory(size);
    PEFTDS_CHECK(data != nullptr, kOutOfMemory, "no memory for a buffer of ", size, " bytes (",
                 std::strerror(errno), "); ", usage.held, " bytes are held already");
    usage.held += size;
    usage.peak_held = std::max(usage.peak_held, usage.held);
    if (listener) listener->mapped(data, size);
    return data;
  }

  void release_oldest() noexcept {
    const Mapping oldest = unused.front();
    unused.pop_front();
    usage.held -= oldest.size;
    if (listener) listener->unmapping(oldest.data);
    munmap(oldest.data, static_cast<size_t>(oldest.size));
  }

  std::shared_ptr<Listener> listener;
  std::list<Mapping> unused;  // the one unused for longest first
};

Arena::Arena(std::shared_ptr<Listener> listener) : state_(std::make_shared<State>(std::move(listener))) {}

Arena::Buffer Arena::allocate(int64_t size, int64_t most) {
  PEFTDS_CHECK(size > 0, kInvalidArgument, "a buffer must have a positive size, got ", size);
  PEFTDS_CHECK(size <= kLargest, kOutOfMemory, "no machine has memory for a buffer of ", size, " bytes");
  const auto [data, capacity] =
      state_->take(whole_pages(size), whole_pages(std::clamp(most, size, kLargest)));
  return {state_, data, size, capacity};
}

Arena::Usage Arena::usage() const {
  const std::lock_guard lock(state_->mutex);
  return state_->usage;
}

Arena::Buffer::Buffer(std::shared_ptr<State> state, std::byte* data, int64_t size, int64_t capacity)
    : state_(std::move(state)), data_(data), size_(size), capacity_(capacity) {}

Arena::Buffer::~Buffer() {
  if (state_) state_->give_back(data_, capacity_);
}

}  // namespace peftds
