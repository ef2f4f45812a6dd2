// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "io/transport.h"

namespace peftds::io {
namespace {

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(int threads, Deliver deliver)
      : limit_(static_cast<size_t>(threads)), deliver_(std::move(deliver)) {}

  ~ThreadTransport() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Submitted submit(std::span<Block* const> blocks) override {
    const std::lock_guard lock(mutex_);
    const int error = grow(blocks.size());
    if (workers_.empty()) return {0, error};
    queue_.insert(queue_.end(), blocks.begin(), blocks.end());
    for (size_t i = 0; i < blocks.size(); ++i) wake_.notify_one();
    return {blocks.size(), 0};
  }

  [[nodiscard]] std::string_view name() const noexcept override { return "threads"; }

 private:
  /// Makes threads for `more` blocks; one thread is enough to go on. Returns an errno.
  int grow(size_t more) {
    try {
      while (workers_.size() < limit_ && idle_ < queue_.size() + more) {
        workers_.emplace_back([this] { work(); });
        ++idle_;
      }
    } catch (const std::system_error& error) {
      return error.code().value();
    }
    return 0;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Block* block = queue_.front();
      queue_.pop_front();
      --idle_;
      lock.unlock();
      const Completion done{block, transfer(*block)};
      deliver_({&done, 1});
      lock.lock();
      ++idle_;
    }
  }

  static int64_t transfer(const Block& block) {
    const auto size = static_cast<size_t>(block.size);
    const ssize_t moved = block.direction == Direction::kRead
                              ? pread(block.descriptor, block.data, size, block.offset)
                              : pwrite(block.descriptor, block.data, size, block.offset);
    return moved < 0 ? -errno : moved;
  }

  const size_t limit_;
  const Deliver deliver_;
  std::mutex mutex_;  // guards all below
  std::condition_variable wake_;
  std::deque<Block*> queue_;
  std::vector<std::thread> workers_;
  size_t idle_ = 0;  // threads that wait for a block, or are about to
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_thread_transport(int threads, Deliver deliver) {
  return std::make_unique<ThreadTransport>(threads, std::move(deliver));
}

}  // namespace peftds::io
