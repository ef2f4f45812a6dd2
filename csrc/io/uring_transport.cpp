// SPDX-License-Identifier: Apache-2.0
// The only file that knows liburing. Built without PEFTDS_WITH_URING it says so and offers nothing.
#include "io/transport.h"

#ifndef PEFTDS_WITH_URING

namespace peftds::io {

std::unique_ptr<Transport> make_uring_transport(int /*depth*/, Deliver /*deliver*/, std::string& reason) {
  reason = "this build has no io_uring: liburing was not found when it was compiled";
  return nullptr;
}

}  // namespace peftds::io

#else

#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace peftds::io {
namespace {

/// A table of slots in the kernel and who has which.
template <class Key>
class Slots {
 public:
  explicit Slots(unsigned count) {
    for (unsigned slot = count; slot > 0; --slot) free_.push_back(slot - 1);
  }
  [[nodiscard]] bool full() const { return free_.empty(); }
  unsigned take(Key key) {
    const unsigned slot = free_.back();
    free_.pop_back();
    taken_[key] = slot;
    return slot;
  }
  void drop(Key key) {
    free_.push_back(taken_.at(key));
    taken_.erase(key);
  }
  [[nodiscard]] const std::map<Key, unsigned>& taken() const { return taken_; }

 private:
  std::vector<unsigned> free_;
  std::map<Key, unsigned> taken_;
};

class UringTransport final : public Transport {
 public:
  UringTransport(const io_uring& ring, Deliver deliver) : ring_(ring), deliver_(std::move(deliver)) {
    has_file_table_ = io_uring_register_files_sparse(&ring_, kFiles) == 0;
    has_memory_table_ = io_uring_register_buffers_sparse(&ring_, kMappings) == 0;
    reaper_ = std::thread([this] { reap(); });
  }

  ~UringTransport() override {
    {
      const std::lock_guard lock(mutex_);
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      io_uring_prep_nop(entry);
      io_uring_sqe_set_data(entry, nullptr);  // the reaper's signal to end
      while (io_uring_submit(&ring_) < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    reaper_.join();
    io_uring_queue_exit(&ring_);
  }

  Submitted submit(std::span<Block* const> blocks) override {
    const std::lock_guard lock(mutex_);
    if (broken_ != 0) return {0, broken_};
    for (Block* block : blocks) prepare(*block);
    return flush(blocks.size());
  }

  [[nodiscard]] std::string_view name() const noexcept override { return "io_uring"; }

  bool offer_memory(std::byte* data, int64_t size) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!has_memory_table_ || memory_.full() || size > kLargestMapping) return false;
    const unsigned slot = memory_.take(data);
    const iovec range{data, static_cast<size_t>(size)};
    if (update_memory(slot, range)) {
      sizes_[data] = size;
      return true;
    }
    memory_.drop(data);  // more than the limit on locked memory allows: it goes without
    return false;
  }

  void withdraw_memory(std::byte* data) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!sizes_.contains(data)) return;
    update_memory(memory_.taken().at(data), iovec{nullptr, 0});
    memory_.drop(data);
    sizes_.erase(data);
  }

  bool offer_file(int descriptor) noexcept override {
    const std::lock_guard lock(mutex_);
    if (!has_file_table_ || files_.full()) return false;
    const unsigned slot = files_.take(descriptor);
    if (io_uring_register_files_update(&ring_, slot, &descriptor, 1) == 1) return true;
    files_.drop(descriptor);
    return false;
  }

 private:
  static constexpr unsigned kFiles = 64;
  static constexpr unsigned kMappings = 1024;
  static constexpr int64_t kLargestMapping = int64_t{1} << 30;  // the kernel's own limit
  static constexpr auto kPatience = std::chrono::seconds(10);

  bool update_memory(unsigned slot, iovec range) noexcept {
    __u64 tag = 0;
    return io_uring_register_buffers_update_tag(&ring_, slot, &range, &tag, 1) == 1;
  }

  /// The slot of the offered memory that holds all of the block, or -1.
  [[nodiscard]] int memory_slot(const Block& block) const {
    auto after = memory_.taken().upper_bound(block.data);
    if (after == memory_.taken().begin()) return -1;
    const auto& [start, slot] = *std::prev(after);
    return block.data + block.size <= start + sizes_.at(start) ? static_cast<int>(slot) : -1;
  }

  void prepare(Block& block) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);  // never null: the ring has room for the depth
    const auto file = files_.taken().find(block.descriptor);
    const bool known_file = file != files_.taken().end();
    const int descriptor = known_file ? static_cast<int>(file->second) : block.descriptor;
    const auto size = static_cast<unsigned>(block.size);
    const auto offset = static_cast<__u64>(block.offset);
    const int slot = memory_slot(block);
    if (block.direction == Direction::kRead)
      slot >= 0 ? io_uring_prep_read_fixed(entry, descriptor, block.data, size, offset, slot)
                : io_uring_prep_read(entry, descriptor, block.data, size, offset);
    else
      slot >= 0 ? io_uring_prep_write_fixed(entry, descriptor, block.data, size, offset, slot)
                : io_uring_prep_write(entry, descriptor, block.data, size, offset);
    if (known_file) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data(entry, &block);
    prepared_.push_back(entry);
  }

  /// Hands `count` prepared entries to the kernel. When the kernel keeps refusing, the rest become
  /// entries that do nothing, for they cannot be taken back, and the transport is not used again.
  Submitted flush(size_t count) {
    size_t accepted = 0;
    handed_over_.fetch_add(1, std::memory_order_release);
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (accepted < count) {
      const int result = io_uring_submit(&ring_);
      if (result > 0) {
        accepted += static_cast<size_t>(result);
      } else if (std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else {
        broken_ = result < 0 ? -result : EAGAIN;
        for (size_t i = accepted; i < count; ++i) {
          io_uring_prep_nop(prepared_[i]);
          io_uring_sqe_set_data(prepared_[i], &ignored_);
        }
        break;
      }
    }
    prepared_.clear();
    return {accepted, broken_};
  }

  void reap() {
    std::vector<Completion> done;
    for (bool ending = false; !ending;) {
      io_uring_cqe* first = nullptr;
      if (io_uring_wait_cqe(&ring_, &first) < 0) continue;  // a signal: nothing else makes it fail
      std::array<io_uring_cqe*, 64> entries{};
      const unsigned count = io_uring_peek_batch_cqe(&ring_, entries.data(), entries.size());
      static_cast<void>(handed_over_.load(std::memory_order_acquire));
      done.clear();
      for (unsigned i = 0; i < count; ++i) {
        void* owner = io_uring_cqe_get_data(entries[i]);
        if (owner == nullptr)
          ending = true;
        else if (owner != &ignored_)
          done.push_back({static_cast<Block*>(owner), entries[i]->res});
      }
      io_uring_cq_advance(&ring_, count);
      if (!done.empty()) deliver_(done);
    }
  }

  io_uring ring_;
  const Deliver deliver_;
  std::mutex mutex_;  // guards the submission side of the ring, and all below
  Slots<int> files_{kFiles};
  Slots<std::byte*> memory_{kMappings};
  std::map<std::byte*, int64_t> sizes_;
  std::vector<io_uring_sqe*> prepared_;
  Block ignored_;
  bool has_file_table_ = false;
  bool has_memory_table_ = false;
  int broken_ = 0;
  // The kernel orders a block's submission before its completion; this says the same in terms of C++.
  std::atomic<uint64_t> handed_over_{0};
  std::thread reaper_;
};

}  // namespace

std::unique_ptr<Transport> make_uring_transport(int depth, Deliver deliver, std::string& reason) {
  io_uring ring{};
  // One entry more than blocks can be in flight: for the signal to end.
  const int result = io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring, IORING_SETUP_CLAMP);
  if (result == 0) {
    try {
      return std::make_unique<UringTransport>(ring, std::move(deliver));
    } catch (const std::system_error& error) {
      io_uring_queue_exit(&ring);
      reason = detail::concat("no thread could be started for io_uring (", error.what(), ")");
      return nullptr;
    }
  }
  reason = detail::concat("the system does not allow io_uring (", std::strerror(-result), ")");
  if (result == -EPERM || result == -ENOSYS)
    reason += "; see kernel.io_uring_disabled and the container's seccomp profile";
  if (result == -ENOMEM) reason += "; see the limit on locked memory (ulimit -l)";
  return nullptr;
}

}  // namespace peftds::io

#endif
