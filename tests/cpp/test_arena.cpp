// SPDX-License-Identifier: Apache-2.0
#include "base/arena.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "check.h"

namespace {

using peftds::Arena;
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
  Arena arena(account);
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
  }
  live.clear();
  CHECK(arena.usage().live == 0 && !account->wrong());
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
  std::atomic<int> wrong{0};
  {
    Arena arena(account);
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
          const Arena::Usage usage = arena.usage();
          if (static_cast<double>(usage.held) > 1.05 * static_cast<double>(usage.peak_live)) ++wrong;
        }
      });
    }
    for (std::thread& user : users) user.join();
    CHECK(arena.usage().live == 0);
  }
  CHECK(wrong == 0 && account->held() == 0 && !account->wrong());
}

int main() { return peftds::test::run_all(); }
