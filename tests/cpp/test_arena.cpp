// SPDX-License-Identifier: Apache-2.0
#include "base/arena.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "in_child.h"

namespace {

using peftds::Arena;
using peftds::PageLock;
using Buffers = std::vector<Arena::Buffer>;

int64_t pages(int64_t size) { return (size + 4095) / 4096 * 4096; }

/// Keeps account of the mappings that it is told about.
class Account final : public Arena::Listener {
 public:
  void mapped(std::byte* data, int64_t size) noexcept override {
    const std::lock_guard lock(mutex_);
    wrong_ = wrong_ || size <= 0 || !mappings_.emplace(data, size).second;
    held_ += size;
    ++total_;
  }
  void unmapping(std::byte* data) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(data);
    if (found == mappings_.end()) {
      wrong_ = true;
      return;
    }
    std::memset(data, 1, static_cast<size_t>(found->second));  // it is still mapped
    held_ -= found->second;
    mappings_.erase(found);
  }
  [[nodiscard]] int64_t held() const {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  [[nodiscard]] int total() const {
    const std::lock_guard lock(mutex_);
    return total_;
  }
  [[nodiscard]] bool wrong() const {
    const std::lock_guard lock(mutex_);
    return wrong_;
  }
  /// Whether the bytes lie in one mapping.
  [[nodiscard]] bool covers(const std::byte* data, int64_t size) const {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(const_cast<std::byte*>(data));
    return found != mappings_.end() && found->second >= size;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::byte*, int64_t> mappings_;
  int64_t held_ = 0;
  int total_ = 0;
  bool wrong_ = false;
};

/// A page lock that keeps account of what it locked, and locks at most so many bytes at once. Of one at a
/// time: a PageLock's functions know of no object.
class FakeLock {
 public:
  static constexpr int kRefused = 77;

  explicit FakeLock(int64_t most = std::numeric_limits<int64_t>::max()) : most_(most) { current_ = this; }
  ~FakeLock() { current_ = nullptr; }
  FakeLock(const FakeLock&) = delete;
  FakeLock& operator=(const FakeLock&) = delete;

  [[nodiscard]] static PageLock page_lock() { return {&lock, &unlock, &describe}; }

  [[nodiscard]] int64_t locked() const {
    const std::lock_guard guard(mutex_);
    return locked_;
  }
  [[nodiscard]] int calls() const {
    const std::lock_guard guard(mutex_);
    return calls_;
  }
  [[nodiscard]] bool wrong() const {
    const std::lock_guard guard(mutex_);
    return wrong_;
  }

 private:
  static int lock(void* data, size_t size) {
    std::memset(data, 1, size);
    const std::lock_guard guard(current_->mutex_);
    ++current_->calls_;
    if (current_->locked_ + static_cast<int64_t>(size) > current_->most_) return kRefused;
    current_->wrong_ = current_->wrong_ || !current_->ranges_.emplace(data, size).second;
    current_->locked_ += static_cast<int64_t>(size);
    return 0;
  }
  static int unlock(void* data, size_t size) {
    std::memset(data, 1, size);  // it is still mapped
    const std::lock_guard guard(current_->mutex_);
    ++current_->calls_;
    const auto found = current_->ranges_.find(data);
    if (found == current_->ranges_.end() || found->second != size) {
      current_->wrong_ = true;
      return kRefused;
    }
    current_->locked_ -= static_cast<int64_t>(size);
    current_->ranges_.erase(found);
    return kRefused;  // which changes nothing
  }
  static const char* describe(int code) { return code == kRefused ? "the fake refuses" : "what is this?"; }

  static inline FakeLock* current_ = nullptr;
  mutable std::mutex mutex_;
  std::map<void*, size_t> ranges_;
  const int64_t most_;
  int64_t locked_ = 0;
  int calls_ = 0;
  bool wrong_ = false;
};

/// Marks every page of a buffer, so that two buffers with a common page are found out.
void mark(const Arena::Buffer& buffer, uint64_t value) {
  for (int64_t at = 0; at + 8 <= buffer.size(); at += 4096) std::memcpy(buffer.data() + at, &value, 8);
  if (buffer.size() >= 8) std::memcpy(buffer.data() + buffer.size() - 8, &value, 8);
}
bool marked(const Arena::Buffer& buffer, uint64_t value) {
  uint64_t last = value;
  if (buffer.size() >= 8) std::memcpy(&last, buffer.data() + buffer.size() - 8, 8);
  bool right = last == value;
  for (int64_t at = 0; at + 4096 <= buffer.size(); at += 4096) {
    uint64_t first = 0;
    std::memcpy(&first, buffer.data() + at, 8);
    right = right && first == value;
  }
  return right;
}

/// Allocates and frees at random and compares each step with what must be.
template <class Size>
void check_against_model(uint32_t seed, Size random_size) {
  std::mt19937 random(seed);
  const auto account = std::make_shared<Account>();
  FakeLock fake(1 << 20);  // enough for a part of it
  Arena arena(account, FakeLock::page_lock());
  std::map<uint64_t, Arena::Buffer> live;
  int64_t live_bytes = 0;
  int64_t peak = 0;
  for (uint64_t step = 0; step < 4000; ++step) {
    const bool growing = step / 500 % 2 == 0;  // waves, so that much becomes free at times
    if (live.empty() || random() % 10 < (growing ? 6U : 4U)) {
      const int64_t size = random_size(random);
      const auto& buffer = live.emplace(step, arena.allocate(size)).first->second;
      CHECK(buffer.size() == size && reinterpret_cast<uintptr_t>(buffer.data()) % 4096 == 0);
      mark(buffer, step);
      live_bytes += pages(size);
      peak = std::max(peak, live_bytes);
    } else {
      const auto gone = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
      CHECK(marked(gone->second, gone->first), "another buffer wrote into buffer ", gone->first);
      live_bytes -= pages(gone->second.size());
      live.erase(gone);
    }
    const Arena::Usage usage = arena.usage();
    CHECK(usage.live == live_bytes && usage.peak_live == peak, "in step ", step);
    CHECK(usage.held == account->held() && usage.held >= usage.live, "in step ", step);
    CHECK(static_cast<double>(usage.held) <= 1.05 * static_cast<double>(peak), usage.held, " of ", peak);
    CHECK(usage.peak_held >= usage.held &&
          static_cast<double>(usage.peak_held) <= 1.05 * static_cast<double>(peak));
    CHECK(usage.locked == fake.locked() && usage.locked <= usage.held && usage.locked <= usage.peak_locked,
          "in step ", step);
  }
  live.clear();
  CHECK(arena.usage().live == 0 && !account->wrong() && !fake.wrong());
}

TEST(a_larger_mapping_serves_where_it_may) {
  Arena arena;
  std::optional<Arena::Buffer> large(arena.allocate(10 * Arena::kPage));
  std::byte* data = large->data();
  large.reset();
  {
    const auto other = arena.allocate(4 * Arena::kPage, 9 * Arena::kPage);
    CHECK(other.data() != data, "a mapping that is too large was used");
  }
  large.emplace(arena.allocate(10 * Arena::kPage));
  data = large->data();
  large.reset();
  const auto smaller = arena.allocate(4 * Arena::kPage + 1, 10 * Arena::kPage);
  CHECK(smaller.data() == data && smaller.size() == 4 * Arena::kPage + 1, smaller.size());
  CHECK(arena.usage().live == 10 * Arena::kPage, "the whole mapping is in use: ", arena.usage().live);
}

}  // namespace

TEST(a_random_life_with_few_sizes) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    check_against_model(seed, [](std::mt19937& random) {
      constexpr int64_t kSizes[] = {1, 4096, 65536, 100000};
      return kSizes[random() % 4];
    });
  }
}

TEST(a_random_life_with_many_sizes) {
  for (uint32_t seed = 0; seed < 3; ++seed) {
    check_against_model(
        seed, [](std::mt19937& random) { return int64_t{1} + static_cast<int64_t>(random() % 300000); });
  }
}

TEST(a_size_is_reused) {
  const auto account = std::make_shared<Account>();
  Arena arena(account);
  const std::byte* first = nullptr;
  for (int round = 0; round < 100; ++round) {
    const Arena::Buffer buffer = arena.allocate(100000 + round % 2);  // of equally many pages
    if (round == 0) first = buffer.data();
    CHECK(buffer.data() == first, "in round ", round);
  }
  CHECK(account->total() == 1);
}

TEST(sizes_that_alternate_stay_within_the_bound) {
  Arena arena;
  for (int round = 0; round < 50; ++round) {
    const Arena::Buffer buffer = arena.allocate(round % 2 == 0 ? 1 << 20 : (1 << 20) + 4096);
    CHECK(arena.usage().held <= (1 << 20) / 100 * 105, arena.usage().held, " bytes in round ", round);
  }
}

TEST(unused_memory_of_a_busy_size_is_kept) {
  const auto account = std::make_shared<Account>();
  Arena arena(account);
  for (int round = 0; round < 20; ++round) {
    Buffers layer;
    for (const int64_t size : {8192, 20000, 8192, 300000}) layer.push_back(arena.allocate(size));
  }
  CHECK(account->total() == 4, account->total(), " mappings were made for the same four buffers");
}

TEST(all_bytes_can_be_written) {
  Arena arena;
  for (const int64_t size : {1, 8, 4095, 4096, 4097, 1 << 20}) {
    const Arena::Buffer buffer = arena.allocate(size);
    std::memset(buffer.data(), 0x77, static_cast<size_t>(size));
  }
}

TEST(buffers_outlive_the_arena) {
  const auto account = std::make_shared<Account>();
  std::optional<Arena> arena(account);
  std::optional<Arena::Buffer> kept = arena->allocate(50000);
  {
    const Arena::Buffer unused = arena->allocate(4096);
  }
  arena.reset();
  mark(*kept, 42);
  CHECK(marked(*kept, 42) && account->held() >= pages(50000));
  kept.reset();
  CHECK(account->held() == 0 && !account->wrong() && account->total() == 2);
}

TEST(a_buffer_that_moves_is_given_back_once) {
  Arena arena;
  {
    Arena::Buffer first = arena.allocate(4096);
    const Arena::Buffer second = std::move(first);
    CHECK(arena.usage().live == 4096 && second.size() == 4096);
  }
  CHECK(arena.usage().live == 0);
  const Arena::Buffer one = arena.allocate(4096);
  const Arena::Buffer two = arena.allocate(4096);
  CHECK(one.data() != two.data());
}

TEST(sizes_that_are_not_positive_are_refused) {
  Arena arena;
  CHECK_THROWS(arena.allocate(0), kInvalidArgument);
  CHECK_THROWS(arena.allocate(-1), kInvalidArgument);
  CHECK_THROWS(arena.allocate(std::numeric_limits<int64_t>::min()), kInvalidArgument);
}

TEST(memory_that_nobody_has_is_an_error_and_costs_nothing) {
  const auto account = std::make_shared<Account>();
  Arena arena(account);
  const Arena::Buffer buffer = arena.allocate(4096);
  {
    const Arena::Buffer unused = arena.allocate(8192);
  }
  const int64_t largest = std::numeric_limits<int64_t>::max();
  for (const int64_t size : {int64_t{1} << 50, int64_t{1} << 62, largest - 4095, largest - 1, largest}) {
    CHECK_THROWS(arena.allocate(size), kOutOfMemory);
    CHECK(arena.usage().live == 4096 && arena.usage().peak_live <= 3 * 4096, "after ", size);
    CHECK(arena.usage().held == account->held(), "after ", size);
  }
  const Arena::Buffer later = arena.allocate(8192);
  mark(later, 1);
  CHECK(!account->wrong());
}

TEST(the_listener_covers_every_buffer) {
  const auto account = std::make_shared<Account>();
  {
    Arena arena(account);
    Buffers buffers;
    for (int64_t size = 1; size < 100000; size += 777) {
      buffers.push_back(arena.allocate(size));
      CHECK(account->covers(buffers.back().data(), pages(size)));
    }
  }
  CHECK(account->held() == 0 && !account->wrong());
}

TEST(threads_share_an_arena) {
  const auto account = std::make_shared<Account>();
  FakeLock fake(1 << 20);
  std::atomic<int> wrong{0};
  {
    Arena arena(account, FakeLock::page_lock());
    std::vector<std::thread> users;
    for (uint64_t user = 0; user < 4; ++user) {
      users.emplace_back([&, user] {
        std::mt19937 random(static_cast<uint32_t>(user));
        std::deque<Arena::Buffer> mine;
        for (int step = 0; step < 2000; ++step) {
          mine.push_back(arena.allocate(int64_t{4096} * (1 + static_cast<int64_t>(random() % 20))));
          mark(mine.back(), user);
          if (!marked(mine.front(), user)) ++wrong;
          if (mine.size() > 10) mine.pop_front();
          const bool refused = !arena.why_not_locked().empty();
          const Arena::Usage usage = arena.usage();
          if (static_cast<double>(usage.held) > 1.05 * static_cast<double>(usage.peak_live)) ++wrong;
          if (refused && usage.peak_held <= 1 << 20) ++wrong;
        }
      });
    }
    for (std::thread& user : users) user.join();
    CHECK(arena.usage().live == 0);
  }
  CHECK(wrong == 0 && account->held() == 0 && !account->wrong());
  CHECK(fake.locked() == 0 && !fake.wrong());
}

namespace {

/// Checks at each step whether the mapping is locked as it must be.
class Order final : public Arena::Listener {
 public:
  explicit Order(const FakeLock& lock) : lock_(lock) {}
  void mapped(std::byte* /*data*/, int64_t size) noexcept override { at_mapped_ = lock_.locked() == size; }
  void unmapping(std::byte* /*data*/) noexcept override { at_unmapping_ = lock_.locked() > 0; }
  [[nodiscard]] bool locked_at_mapped() const { return at_mapped_; }
  [[nodiscard]] bool locked_at_unmapping() const { return at_unmapping_; }

 private:
  const FakeLock& lock_;
  bool at_mapped_ = false;
  bool at_unmapping_ = false;
};

}  // namespace

TEST(a_mapping_is_locked_before_the_listener_knows_it_and_longer) {
  FakeLock fake;
  const auto order = std::make_shared<Order>(fake);
  {
    Arena arena(order, FakeLock::page_lock());
    static_cast<void>(arena.allocate(100'000));
    CHECK(order->locked_at_mapped(), "the listener was told of memory that is not locked");
    CHECK(fake.locked() == pages(100'000), "what is kept for later stays locked: ", fake.locked());
  }
  CHECK(order->locked_at_unmapping(), "the lock ended before the listener let go");
  CHECK(fake.locked() == 0 && !fake.wrong() && fake.calls() == 2, fake.calls());
}

TEST(what_cannot_be_locked_is_used_unlocked_and_told) {
  FakeLock fake(10 * Arena::kPage);
  {
    Arena arena(nullptr, FakeLock::page_lock());
    const Arena::Buffer first = arena.allocate(8 * Arena::kPage);
    CHECK(arena.why_not_locked().empty(), arena.why_not_locked());
    const Arena::Buffer second = arena.allocate(3 * Arena::kPage - 5);
    const Arena::Buffer third = arena.allocate(4 * Arena::kPage);
    const Arena::Buffer fourth = arena.allocate(2 * Arena::kPage);  // for which there is room again
    for (const Arena::Buffer* buffer : {&first, &second, &third, &fourth}) mark(*buffer, 1);
    const Arena::Usage usage = arena.usage();
    CHECK(usage.held == 17 * Arena::kPage && usage.live == usage.held, usage.held);
    CHECK(usage.locked == 10 * Arena::kPage && usage.peak_locked == usage.locked, usage.locked);
    const std::string why = arena.why_not_locked();
    for (const char* part :
         {"a buffer of 12288 bytes", "(the fake refuses)", "after 32768 bytes", "ulimit -l"})
      CHECK(why.find(part) != std::string::npos, part, " is not in: ", why);
  }
  CHECK(fake.locked() == 0 && !fake.wrong(), "what was not locked was unlocked");
  CHECK(fake.calls() == 4 + 2, fake.calls());
}

TEST(what_is_locked_goes_with_its_mapping) {
  FakeLock fake;
  Arena arena(nullptr, FakeLock::page_lock());
  static_cast<void>(arena.allocate(10 * Arena::kPage));
  const Arena::Buffer larger = arena.allocate(11 * Arena::kPage);  // for it the other mapping goes
  const Arena::Usage usage = arena.usage();
  CHECK(usage.locked == 11 * Arena::kPage && usage.peak_locked == usage.locked, usage.locked, " ",
        usage.peak_locked);
  CHECK(fake.locked() == usage.locked && !fake.wrong(), fake.locked());
}

TEST(without_a_page_lock_nothing_is_locked) {
  Arena arena;
  const Arena::Buffer buffer = arena.allocate(1 << 20);
  CHECK(arena.usage().locked == 0 && arena.usage().peak_locked == 0 && arena.why_not_locked().empty());
}

TEST(locked_buffers_outlive_the_arena) {
  FakeLock fake;
  std::optional<Arena> arena(std::in_place, nullptr, FakeLock::page_lock());
  std::optional<Arena::Buffer> kept = arena->allocate(50000);
  arena.reset();
  CHECK(fake.locked() == pages(50000), fake.locked());
  mark(*kept, 42);
  kept.reset();
  CHECK(fake.locked() == 0 && !fake.wrong());
}

TEST(a_forked_child_leaves_its_parents_locks_alone) {
  FakeLock fake;
  std::optional<Arena> arena(std::in_place, nullptr, FakeLock::page_lock());
  std::optional<Arena::Buffer> buffer = arena->allocate(8 * Arena::kPage);
  CHECK(peftds::test::succeeds_in_child([&] {
    CHECK(arena->usage().locked == 0, arena->usage().locked);
    mark(arena->allocate(8 * Arena::kPage), 1);  // not the parent's, which is not here
    mark(arena->allocate(9 * Arena::kPage), 1);
    CHECK(arena->usage().locked == 0 && fake.calls() == 1, "the child locked with its parent's arena");
    CHECK(arena->why_not_locked().find("before fork()") != std::string::npos, arena->why_not_locked());
    buffer.reset();
    arena.reset();
    CHECK(fake.calls() == 1, "the child unlocked what its parent locked");
  }));
  CHECK(arena->usage().locked == 8 * Arena::kPage && arena->why_not_locked().empty());
  buffer.reset();
  arena.reset();
  CHECK(fake.calls() == 2 && fake.locked() == 0 && !fake.wrong());
}

TEST(the_systems_lock_takes_whole_pages_and_says_why_not) {
  const PageLock& lock = peftds::mlock_page_lock();
  Arena arena(nullptr, lock);
  const Arena::Buffer buffer = arena.allocate(2 * Arena::kPage + 1);
  mark(buffer, 1);
  const int64_t locked = arena.usage().locked;  // none where the limit is tiny
  CHECK(locked == (arena.why_not_locked().empty() ? 3 * Arena::kPage : 0), locked);
  CHECK(std::string(lock.describe(ENOMEM)) == std::strerror(ENOMEM), lock.describe(ENOMEM));
}

int main() { return peftds::test::run_all(); }
