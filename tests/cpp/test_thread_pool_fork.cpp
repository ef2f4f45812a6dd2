// SPDX-License-Identifier: Apache-2.0
// The pool over fork(). Not run under ThreadSanitizer, which does not support threads that are started
// after a fork of a process with several threads.
#include <atomic>
#include <thread>

#include "base/thread_pool.h"
#include "in_child.h"

namespace {

using peftds::ThreadPool;
using peftds::test::succeeds_in_child;

void check_sum(int threads) {
  std::atomic<int64_t> sum{0};
  ThreadPool::instance().parallel_for(1000, 7, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum += i;
  });
  CHECK(sum == 499500, "got ", sum.load());
}

}  // namespace

TEST(a_child_starts_with_an_empty_pool_and_can_run_jobs) {
  check_sum(4);
  CHECK(ThreadPool::instance().worker_count() == 3);
  CHECK(succeeds_in_child([] {
    CHECK(ThreadPool::instance().worker_count() == 0);
    check_sum(3);
    CHECK(ThreadPool::instance().worker_count() == 2);
  }));
}

TEST(the_parent_keeps_its_pool) {
  check_sum(4);
  CHECK(succeeds_in_child([] {}));
  CHECK(ThreadPool::instance().worker_count() == 3);
  check_sum(4);
}

TEST(a_grandchild_can_run_jobs) {
  check_sum(4);
  CHECK(succeeds_in_child([] {
    check_sum(3);
    CHECK(succeeds_in_child([] { check_sum(2); }));
    check_sum(3);
  }));
}

TEST(forking_while_another_thread_runs_jobs) {
  std::atomic<bool> stop{false};
  std::atomic<bool> wrong{false};
  std::thread busy([&] {
    try {
      while (!stop) check_sum(3);
    } catch (const std::exception&) {
      wrong = true;
    }
  });
  bool all = true;
  for (int round = 0; round < 50; ++round) all = succeeds_in_child([] { check_sum(3); }) && all;
  stop = true;
  busy.join();
  CHECK(all, "a child failed or hung");
  CHECK(!wrong, "the parent's job failed");
}

int main() { return peftds::test::run_all(); }
