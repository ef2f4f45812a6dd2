// SPDX-License-Identifier: Apache-2.0
// The process's worker threads for the CPU kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace peftds {

/// A lazily started pool. Threads are made by the first parallel job that needs them and then
/// sleep between jobs. A child process made by fork() starts with an empty pool of its own.
///
/// All members are thread-safe. The process-wide instance lives until the process ends.
class ThreadPool {
 public:
  /// Runs on [begin, end), a range of items.
  using Body = std::function<void(int64_t begin, int64_t end)>;

  ThreadPool();
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// The process-wide pool.
  static ThreadPool& instance();

  /// Splits [0, count) into chunks of `grain` items (the last may be shorter), runs `body` on
  /// each exactly once, on at most `threads` threads of which the caller is one, and returns when
  /// all are done. Chunk borders depend on `count` and `grain` alone.
  ///
  /// The first exception that `body` throws is rethrown here after all running chunks have ended;
  /// chunks not yet started are dropped. A call from inside `body`, or while another thread's job
  /// is running, runs on the caller alone, so no call ever waits for another.
  void parallel_for(int64_t count, int64_t grain, int threads, const Body& body);

  /// Threads that exist now, the callers not counted.
  [[nodiscard]] int worker_count() const;

 private:
  struct State;
  static void after_fork_in_child();

  std::unique_ptr<State> state_;
};

}  // namespace peftds
