// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"

namespace peftds {
namespace {

thread_local bool inside_job = false;

/// One parallel_for; lives on the caller's stack until every worker has left it.
struct Job {
  const ThreadPool::Body* body;
  int64_t count;
  int64_t grain;
  std::atomic<int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void run() noexcept {
    inside_job = true;
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) break;
      try {
        (*body)(begin, std::min(count, begin + grain));
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        next.store(count, std::memory_order_relaxed);
      }
    }
    inside_job = false;
  }
};

}  // namespace

struct ThreadPool::State {
  std::mutex job_mutex;      // held for the length of a job: one job at a time
  mutable std::mutex mutex;  // guards all below
  std::condition_variable wake;
  std::condition_variable idle;
  std::vector<std::thread> workers;
  Job* job = nullptr;
  int wanted = 0;   // workers that may still join the job
  int running = 0;  // workers inside the job
  bool stopping = false;

  /// Makes workers up to `count`; with fewer (the system's limit on threads) jobs still finish.
  void grow(int count) {
    try {
      while (static_cast<int>(workers.size()) < count) workers.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    }
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return stopping || wanted > 0; });
      if (stopping) return;
      --wanted;
      ++running;
      Job* current = job;
      lock.unlock();
      current->run();
      lock.lock();
      if (--running == 0) idle.notify_one();
    }
  }
};

ThreadPool::ThreadPool() : state_(std::make_unique<State>()) {}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

ThreadPool& ThreadPool::instance() {
  // Never destroyed: a static destructor would join threads while other statics are going away.
  static ThreadPool* pool = [] {
    pthread_atfork(nullptr, nullptr, &after_fork_in_child);
    return new ThreadPool();
  }();
  return *pool;
}

void ThreadPool::parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  PEFTDS_CHECK(grain > 0, kInvalidArgument, "parallel_for: grain must be positive, got ", grain);
  if (count <= 0) return;
  Job job{.body = &body, .count = count, .grain = grain, .error_mutex = {}, .error = {}};
  const int64_t chunks = (count + grain - 1) / grain;
  const int helpers = static_cast<int>(std::min<int64_t>(threads, chunks)) - 1;

  State& state = *state_;
  const bool nested = inside_job;
  std::unique_lock turn(state.job_mutex, std::defer_lock);
  if (nested || helpers <= 0 || !turn.try_lock()) {
    job.run();
    inside_job = nested;
  } else {
    {
      const std::lock_guard lock(state.mutex);
      state.grow(helpers);
      state.job = &job;
      state.wanted = std::min(helpers, static_cast<int>(state.workers.size()));
    }
    state.wake.notify_all();
    job.run();
    std::unique_lock lock(state.mutex);
    state.wanted = 0;  // a worker that has not joined by now has nothing left to do
    state.idle.wait(lock, [&state] { return state.running == 0; });
    state.job = nullptr;
  }
  if (job.error) std::rethrow_exception(job.error);
}

int ThreadPool::worker_count() const {
  const std::lock_guard lock(state_->mutex);
  return static_cast<int>(state_->workers.size());
}

// fork() copies only the calling thread, and locks in whatever state they are. The child leaves the old
// state behind as a whole, since the threads do not exist there and must not be joined.
void ThreadPool::after_fork_in_child() {
  static std::vector<State*> abandoned;  // reachable on purpose: leaked, and not by mistake
  abandoned.push_back(instance().state_.release());
  instance().state_ = std::make_unique<State>();
  inside_job = false;
}

}  // namespace peftds
