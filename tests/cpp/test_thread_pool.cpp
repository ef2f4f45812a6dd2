// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using peftds::ThreadPool;
using Chunks = std::vector<std::pair<int64_t, int64_t>>;

/// The chunks that a job really ran, in ascending order.
Chunks chunks_of_job(ThreadPool& pool, int64_t count, int64_t grain, int threads) {
  Chunks seen;
  std::mutex mutex;
  pool.parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    seen.emplace_back(begin, end);
  });
  std::sort(seen.begin(), seen.end());
  return seen;
}

int64_t sum_of_job(ThreadPool& pool, int64_t count, int64_t grain, int threads) {
  std::atomic<int64_t> sum{0};
  pool.parallel_for(count, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  return sum;
}

/// Number of threads that took part in a job of many slow chunks.
size_t threads_of_job(ThreadPool& pool, int threads) {
  std::set<std::thread::id> ids;
  std::mutex mutex;
  pool.parallel_for(100, 1, threads, [&](int64_t, int64_t) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    const std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  return ids.size();
}

/// Two chunks that each wait for the other to begin, so that they must run on different threads.
class Meeting {
 public:
  void arrive() {
    ++arrived_;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (arrived_ < 2) {
      CHECK(std::chrono::steady_clock::now() < deadline, "nobody else came");
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<int> arrived_{0};
};

}  // namespace

TEST(every_chunk_runs_once_whatever_the_threads) {
  ThreadPool pool;
  for (const int64_t count : {1, 2, 9, 10, 11, 1000}) {
    for (const int64_t grain : {1, 3, 10, 5000}) {
      Chunks expected;
      for (int64_t begin = 0; begin < count; begin += grain) {
        expected.emplace_back(begin, std::min(count, begin + grain));
      }
      for (const int threads : {-1, 0, 1, 2, 3, 8}) {
        CHECK(chunks_of_job(pool, count, grain, threads) == expected, count, " items by ", grain);
      }
    }
  }
}

TEST(an_empty_job_runs_nothing) {
  ThreadPool pool;
  CHECK(chunks_of_job(pool, 0, 10, 4).empty());
  CHECK(chunks_of_job(pool, -5, 10, 4).empty());
  CHECK(pool.worker_count() == 0);
}

TEST(a_grain_below_one_is_refused) {
  ThreadPool pool;
  CHECK_THROWS(pool.parallel_for(10, 0, 2, [](int64_t, int64_t) {}), kInvalidArgument);
  CHECK_THROWS(pool.parallel_for(10, -1, 2, [](int64_t, int64_t) {}), kInvalidArgument);
}

TEST(workers_take_part) {
  ThreadPool pool;
  Meeting meeting;
  pool.parallel_for(2, 1, 2, [&](int64_t, int64_t) { meeting.arrive(); });
  CHECK(pool.worker_count() == 1);
}

TEST(an_exception_of_a_worker_reaches_the_caller_once) {
  ThreadPool pool;
  const std::thread::id caller = std::this_thread::get_id();
  Meeting meeting;
  std::string message;
  try {
    pool.parallel_for(2, 1, 2, [&](int64_t, int64_t) {
      meeting.arrive();
      if (std::this_thread::get_id() != caller) throw std::runtime_error("from the worker");
    });
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message == "from the worker", "got: ", message);
  CHECK(sum_of_job(pool, 1000, 7, 2) == 499500, "the pool does not work after an exception");
}

TEST(an_exception_drops_the_chunks_not_started) {
  ThreadPool pool;
  for (const int threads : {1, 4}) {
    std::atomic<int> ran{0};
    bool caught = false;
    try {
      pool.parallel_for(1000000, 1, threads, [&](int64_t, int64_t) {
        ++ran;
        throw std::runtime_error("stop");
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught);
    CHECK(ran >= 1 && ran <= threads, ran.load(), " chunks ran on ", threads, " threads");
  }
}

TEST(a_nested_job_runs_on_its_caller) {
  ThreadPool pool;
  std::atomic<int64_t> sum{0};
  std::atomic<bool> strayed{false};
  pool.parallel_for(8, 1, 4, [&](int64_t, int64_t) {
    const std::thread::id outer = std::this_thread::get_id();
    pool.parallel_for(100, 3, 4, [&](int64_t begin, int64_t end) {
      if (std::this_thread::get_id() != outer) strayed = true;
      for (int64_t i = begin; i < end; ++i) sum += i;
    });
  });
  CHECK(sum == 8 * 4950);
  CHECK(!strayed);
}

TEST(jobs_from_several_threads_at_once_are_all_right) {
  ThreadPool pool;
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        if (sum_of_job(pool, 500, 11, 3) != 124750) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0, wrong.load(), " jobs gave a wrong sum");
}

TEST(many_short_jobs) {
  ThreadPool pool;
  for (int round = 0; round < 5000; ++round) {
    CHECK(sum_of_job(pool, 8, 1, 3) == 28, "in round ", round);
  }
}

TEST(the_number_of_threads_is_a_limit_that_may_change_from_job_to_job) {
  ThreadPool pool;
  for (const int threads : {2, 8, 1, 3, 6, 2}) {
    const size_t used = threads_of_job(pool, threads);
    CHECK(used >= 1 && used <= static_cast<size_t>(threads), used, " threads ran where ", threads, " may");
  }
  CHECK(pool.worker_count() == 7, "workers stay for later jobs; there are ", pool.worker_count());
}

int main() { return peftds::test::run_all(); }
