// SPDX-License-Identifier: Apache-2.0
// Tickets, priorities, errors, threads, closing and registration of the storage engine.
#include <atomic>
#include <functional>
#include <limits>
#include <optional>

#include "io_tools.h"

namespace {

using namespace peftds::io;
using namespace peftds::test;
using peftds::Arena;
using peftds::ErrorCode;
using std::chrono::milliseconds;

constexpr int64_t kBlock = 4096;

Extent block_of(const FilePointer& file, int64_t index, const Guarded& memory) {
  return {file, index * kBlock, memory.data(), static_cast<int64_t>(memory.size())};
}

/// The first transfer takes long and the second fails. `order` submits requests while the first is under
/// way, and waits for or polls them; the one that was served second is the one that fails. Where the
/// first was over too early for that, it is tried again.
void with_second_failing(Method method,
                         const std::function<void(Engine&, const FilePointer&, Ticket&)>& order) {
  const Folder folder;
  const FilePointer file = file_with(folder / "file", random_bytes(64 * kBlock, 1));
  for (int attempt = 0; attempt < 5; ++attempt) {
    Engine engine(settings_of(method, 1, kBlock, "read:delay=150@1;read:eio@2"));
    const Guarded memory(kBlock, 0);
    Ticket first = engine.submit(Direction::kRead, {block_of(file, 0, memory)}, Priority::kReadAhead);
    try {
      order(engine, file, first);
      return;
    } catch (const std::logic_error&) {
    }
  }
  CHECK(false, "the first transfer was always over before the others were submitted");
}

void must_be_under_way(const Ticket& ticket) {
  if (ticket.done()) throw std::logic_error("over too early");
}

bool fails(const Ticket& ticket) {
  try {
    ticket.wait();
  } catch (const peftds::FileError& error) {
    CHECK(error.number() == EIO, error.what());
    return true;
  }
  return false;
}

/// An engine and a file of some blocks, for tests that need no more.
struct Simple {
  explicit Simple(Method method, int depth = 4, const std::string& faults = "", Direct direct = Direct::kAuto)
      : bytes(random_bytes(32 * kBlock, 5)),
        file(file_with(folder / "file", bytes, direct)),
        engine(settings_of(method, depth, kBlock, faults)) {}
  [[nodiscard]] Ticket read(const Guarded& memory, int64_t offset = 0,
                            Priority priority = Priority::kDemand) {
    return engine.submit(Direction::kRead, {extent(file, offset, memory)}, priority);
  }
  [[nodiscard]] Bytes part(int64_t offset, size_t size) const {
    const auto first = bytes.begin() + offset;
    return {first, first + static_cast<std::ptrdiff_t>(size)};
  }

  Folder folder;
  Bytes bytes;
  FilePointer file;
  Engine engine;
};

void check_works(Simple& simple, int64_t offset = 100) {
  const Guarded memory(5 * kBlock, 0);
  simple.read(memory, offset).wait();
  CHECK(memory.bytes() == simple.part(offset, memory.size()));
}

}  // namespace

TEST(the_method_is_what_was_asked_for) {
  for (const Method method : methods())
    CHECK(Engine(settings_of(method, 1, kBlock)).method() == name(method));
  const Engine chosen(settings_of(Method::kAuto, 1, kBlock));
  CHECK((chosen.method() == "io_uring") == chosen.why_threads().empty(), chosen.why_threads());
  CHECK((chosen.method() == "io_uring") == (methods().size() == 2));
}

TEST(demand_overtakes_read_ahead) {
  for (const Method method : methods()) {
    with_second_failing(method, [](Engine& engine, const FilePointer& file, Ticket& first) {
      const Guarded far(20 * kBlock, 0);
      const Guarded near(kBlock, 0);
      const Ticket ahead = engine.submit(Direction::kRead, {block_of(file, 1, far)}, Priority::kReadAhead);
      const Ticket demand = engine.submit(Direction::kRead, {block_of(file, 30, near)}, Priority::kDemand);
      must_be_under_way(first);
      CHECK(fails(demand), "demand was not next");
      CHECK(!fails(first) && !fails(ahead));
    });
  }
}

TEST(demand_overtakes_read_ahead_that_has_begun) {
  const Folder folder;
  const FilePointer file = file_with(folder / "file", random_bytes(8 * kBlock, 1));
  for (const Method method : methods()) {
    bool seen = false;
    for (int attempt = 0; attempt < 5 && !seen; ++attempt) {
      Engine engine(settings_of(method, 1, kBlock, "read:delay=150@1;read:eio@2"));
      const Guarded far(4 * kBlock, 0);
      const Guarded near(kBlock, 0);
      const auto before = std::chrono::steady_clock::now();
      const Ticket ahead = engine.submit(Direction::kRead, {block_of(file, 0, far)}, Priority::kReadAhead);
      const Ticket demand = engine.submit(Direction::kRead, {block_of(file, 6, near)}, Priority::kDemand);
      if (std::chrono::steady_clock::now() - before > milliseconds(100)) continue;
      CHECK(fails(demand) && !fails(ahead), "demand was not next");
      seen = true;
    }
    CHECK(seen, "this machine is too slow to say");
  }
}

TEST(requests_of_one_priority_keep_their_order) {
  for (const Method method : methods()) {
    for (const Priority priority : {Priority::kDemand, Priority::kReadAhead}) {
      with_second_failing(method, [priority](Engine& engine, const FilePointer& file, Ticket& first) {
        const Guarded one(kBlock, 0);
        const Guarded two(kBlock, 0);
        const Ticket second = engine.submit(Direction::kRead, {block_of(file, 9, one)}, priority);
        const Ticket third = engine.submit(Direction::kRead, {block_of(file, 2, two)}, priority);
        must_be_under_way(first);
        while (!third.done()) std::this_thread::yield();  // waiting would change the order
        CHECK(fails(second) && !fails(third) && !fails(first));
      });
    }
  }
}

TEST(waiting_makes_read_ahead_demand) {
  for (const Method method : methods()) {
    with_second_failing(method, [](Engine& engine, const FilePointer& file, Ticket& first) {
      const Guarded one(kBlock, 0);
      const Guarded two(kBlock, 0);
      const Ticket second = engine.submit(Direction::kRead, {block_of(file, 1, one)}, Priority::kReadAhead);
      const Ticket third = engine.submit(Direction::kRead, {block_of(file, 2, two)}, Priority::kReadAhead);
      CHECK(!third.wait_for(milliseconds(0)) || first.done());
      must_be_under_way(first);
      CHECK(fails(third) && !fails(second) && !fails(first), "the one waited for was not next");
    });
  }
}

TEST(wait_for_returns_in_time_and_done_says_when) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:delay=300@1");
    const Guarded memory(kBlock, 0);
    const auto before = std::chrono::steady_clock::now();
    const Ticket ticket = simple.read(memory);
    const bool early = ticket.wait_for(milliseconds(1));
    CHECK(!early || std::chrono::steady_clock::now() - before >= milliseconds(300));
    while (!ticket.wait_for(milliseconds(5))) {
    }
    CHECK(std::chrono::steady_clock::now() - before >= milliseconds(300));
    CHECK(ticket.done() && ticket.wait_for(milliseconds(0)));
    ticket.wait();
  }
}

TEST(nothing_to_transfer_is_done_at_once) {
  for (const Method method : methods()) {
    Simple simple(method);
    const Ticket none = simple.engine.submit(Direction::kRead, {});
    const Ticket empty = simple.engine.submit(Direction::kWrite, {{simple.file, 77, nullptr, 0}});
    CHECK(none.done() && empty.done());
    none.wait();
    empty.wait();
    CHECK(content(simple.file->path()) == simple.bytes);
  }
}

TEST(one_failing_ticket_disturbs_no_other) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Simple simple(method, 4, "", direct);
      std::vector<Guarded> memory;
      std::vector<Ticket> good;
      std::vector<Ticket> bad;
      for (int i = 0; i < 40; ++i) {
        memory.emplace_back(3 * kBlock, i % 3);
        if (i % 4 == 1)
          bad.push_back(simple.read(memory.back(), 31 * kBlock));  // two blocks too far
        else
          good.push_back(simple.read(memory.back(), i * 1000));
      }
      for (const Ticket& ticket : good) ticket.wait();
      for (const Ticket& ticket : bad) CHECK_THROWS(ticket.wait(), kCorruptData);
      for (int i = 0; i < 40; ++i) {
        const auto& target = memory[static_cast<size_t>(i)];
        if (i % 4 != 1) CHECK(target.bytes() == simple.part(i * 1000, target.size()), i);
      }
    }
  }
}

TEST(a_read_beyond_the_end_is_corrupt_data_each_time) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Simple simple(method, 2, "", direct);
      const int64_t end = 32 * kBlock;
      for (const int64_t offset : {end, end - 1, end + 12345, end - 3 * kBlock, int64_t{1} << 40}) {
        const Guarded memory(3 * kBlock + 1, 0);
        const Ticket ticket = simple.read(memory, offset);
        const auto error = file_error_of([&] { ticket.wait(); });
        CHECK(error.code() == ErrorCode::kCorruptData && error.number() == 0, error.what());
        CHECK(error.path() == simple.file->path() && says(error, simple.file->path()), error.what());
        CHECK(says(error, "read of ") && says(error, " bytes at offset "), error.what());
        CHECK(std::string(file_error_of([&] { ticket.wait(); }).what()) == error.what());
        CHECK(std::string(file_error_of([&] { ticket.wait_for(milliseconds(1)); }).what()) == error.what());
        CHECK(ticket.done());
        static_cast<void>(memory.bytes());
      }
    }
  }
}

TEST(an_error_names_operation_size_offset_and_reason) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:eio@2;write:enospc@1");
    const Guarded memory(3 * kBlock, 0);
    const Guarded same(simple.part(2 * kBlock, 3 * kBlock));
    const Ticket ticket = simple.read(memory, 5 * kBlock);
    const auto error = file_error_of([&] { ticket.wait(); });
    CHECK(error.code() == ErrorCode::kStorage && error.number() == EIO, error.what());
    CHECK(says(error, "read of 4096 bytes at offset 24576"), error.what());
    CHECK(says(error, std::strerror(EIO)) && says(error, simple.file->path()), error.what());
    const auto full = file_error_of([&] { write(simple.engine, {extent(simple.file, 8192, same)}); });
    CHECK(full.code() == ErrorCode::kStorageFull && full.number() == ENOSPC, full.what());
    CHECK(says(full, "write of 4096 bytes at offset 8192") && says(full, "free space"), full.what());
    check_works(simple);
  }
}

TEST(writing_to_a_file_opened_for_reading_is_refused) {
  const Folder folder;
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      const Bytes bytes = random_bytes(2 * kBlock, 1);
      put(folder / "file", bytes);
      const auto file = std::make_shared<const File>(folder / "file", Access::kRead, direct);
      Engine engine(settings_of(method, 2, kBlock));
      for (const size_t size : {size_t{4096}, size_t{100}}) {
        const Guarded memory(size, 0);
        const auto error = file_error_of([&] { write(engine, {extent(file, 0, memory)}); });
        CHECK(error.code() == ErrorCode::kStorage && error.number() == EBADF, error.what());
      }
      const Guarded memory(2 * kBlock, 0);
      read(engine, {extent(file, 0, memory)});
      CHECK(memory.bytes() == bytes && content(folder / "file") == bytes);
    }
  }
}

TEST(memory_that_is_not_there_is_an_error) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Simple simple(method, 2, "", direct);
      auto* nowhere = reinterpret_cast<std::byte*>(uintptr_t{4096});
      const auto error =
          file_error_of([&] { write(simple.engine, {{simple.file, 0, nowhere, 2 * kBlock}}); });
      CHECK(error.code() == ErrorCode::kStorage && error.number() == EFAULT, error.what());
      check_works(simple);
    }
  }
}

TEST(wrong_settings_are_refused) {
  for (const int depth : {0, -1, 1025, std::numeric_limits<int>::max()})
    CHECK_THROWS(Engine(settings_of(Method::kAuto, depth, kBlock)), kInvalidArgument);
  for (const int64_t block :
       {int64_t{0}, int64_t{-4096}, int64_t{4095}, int64_t{512}, int64_t{4096} * 262145})
    CHECK_THROWS(Engine(settings_of(Method::kAuto, 1, block)), kInvalidArgument);
  for (const Method method : methods()) {
    CHECK(Engine(settings_of(method, 1024, kBlock)).method() == name(method));
    CHECK(Engine(settings_of(method, 1, int64_t{1} << 30)).method() == name(method));
  }
}

TEST(wrong_extents_are_refused_as_a_whole) {
  for (const Method method : methods()) {
    Simple simple(method);
    const Guarded memory(kBlock, 0);
    const Extent good = extent(simple.file, 0, memory);
    const int64_t largest = std::numeric_limits<int64_t>::max();
    for (const Extent& bad :
         {Extent{nullptr, 0, memory.data(), 1}, Extent{simple.file, -1, memory.data(), 1},
          Extent{simple.file, 0, memory.data(), -1}, Extent{simple.file, 0, nullptr, 1},
          Extent{simple.file, largest, memory.data(), 1}, Extent{simple.file, 1, memory.data(), largest},
          Extent{simple.file, largest - kBlock, memory.data(), kBlock}}) {
      CHECK_THROWS(simple.engine.submit(Direction::kWrite, {good, bad}), kInvalidArgument);
      CHECK_THROWS(simple.engine.submit(Direction::kRead, {bad}), kInvalidArgument);
    }
    CHECK(content(simple.file->path()) == simple.bytes, "something was written all the same");
  }
}

TEST(tickets_dropped_unwaited_leave_nothing_behind) {
  for (const Method method : methods()) {
    Simple simple(method, 2, "read:delay=1@p0.2");
    for (int round = 0; round < 50; ++round) {
      const Guarded memory(4 * kBlock, static_cast<size_t>(round));
      const auto priority = round % 2 == 0 ? Priority::kDemand : Priority::kReadAhead;
      {
        const Ticket dropped = simple.read(memory, round * 100, priority);
      }
      CHECK(memory.bytes() == simple.part(round * 100, memory.size()), "in round ", round);
    }
    {
      const Guarded memory(kBlock, 0);
      const Ticket dropped = simple.read(memory, 32 * kBlock);
    }
    check_works(simple);
  }
}

TEST(a_ticket_that_moved_is_waited_for_once) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:delay=20@1+");
    const Guarded memory(kBlock, 0);
    std::optional<Ticket> kept;
    {
      Ticket first = simple.read(memory);
      kept.emplace(std::move(first));
    }
    kept->wait();
    CHECK(memory.bytes() == simple.part(0, kBlock));
  }
}

// The kernel ends what a thread has asked of io_uring when the thread ends.
TEST(a_thread_that_submitted_may_end_before_the_transfer) {
  const Folder folder;
  const Bytes bytes = random_bytes(3 << 20, 9);
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Engine engine(settings_of(method, 32, 65536));
      for (int round = 0; round < 3; ++round) {
        const FilePointer file = file_with(folder / "file", bytes, direct);
        fsync(file->buffered_descriptor());
        posix_fadvise(file->buffered_descriptor(), 0, 0, POSIX_FADV_DONTNEED);
        const Guarded memory(bytes.size(), 0);
        std::optional<Ticket> ticket;
        const auto start = [&](Direction direction) {
          std::thread([&] { ticket.emplace(engine.submit(direction, {extent(file, 0, memory)})); }).join();
          ticket->wait();
          ticket.reset();
        };
        start(Direction::kRead);
        CHECK(memory.bytes() == bytes, name(method), name(direct));
        start(Direction::kWrite);
        CHECK(content(file->path()) == bytes, name(method), name(direct));
      }
    }
  }
}

TEST(many_threads_submit_wait_poll_and_drop) {
  for (const Method method : methods()) {
    for (const std::string faults : {"", "any:reorder@p0.2;any:short@p0.1;any:delay=1@p0.01"}) {
      Simple simple(method, 4, faults);
      std::atomic<int> wrong{0};
      std::vector<std::thread> users;
      for (uint32_t user = 0; user < 4; ++user) {
        users.emplace_back([&, user] {
          std::mt19937 random(user);
          try {
            for (int round = 0; round < 60; ++round) {
              const int64_t offset = random() % (20 * kBlock);
              const Guarded memory(1 + random() % (10 * kBlock), random() % 3);
              const auto priority = random() % 2 == 0 ? Priority::kDemand : Priority::kReadAhead;
              {
                const Ticket ticket = simple.read(memory, offset, priority);
                const uint32_t how = random() % 4;
                if (how == 0) ticket.wait();
                while (how == 1 && !ticket.done()) std::this_thread::yield();
                while (how == 2 && !ticket.wait_for(milliseconds(1))) {
                }
              }
              if (memory.bytes() != simple.part(offset, memory.size())) ++wrong;
            }
          } catch (const std::exception& error) {
            std::fprintf(stderr, "%s\n", error.what());
            ++wrong;
          }
        });
      }
      for (std::thread& user : users) user.join();
      CHECK(wrong == 0, wrong.load(), " with ", name(method), " ", faults);
    }
  }
}

TEST(one_ticket_may_be_waited_for_by_many_threads) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:delay=20@1;read:eio@2");
    const Guarded memory(3 * kBlock, 0);
    const Ticket ticket = simple.read(memory, 0, Priority::kReadAhead);
    std::atomic<int> failed{0};
    std::vector<std::thread> waiters;
    for (int i = 0; i < 4; ++i) waiters.emplace_back([&] { failed += fails(ticket) ? 1 : 0; });
    for (std::thread& waiter : waiters) waiter.join();
    CHECK(failed == 4);
  }
}

TEST(writers_of_their_own_files_do_not_meet) {
  for (const Method method : methods()) {
    const Folder folder;
    Engine engine(settings_of(method, 8, 8192));
    std::atomic<int> wrong{0};
    std::vector<std::thread> writers;
    for (uint32_t writer = 0; writer < 4; ++writer) {
      writers.emplace_back([&, writer] {
        try {
          const std::string path = folder / std::to_string(writer);
          const auto file = std::make_shared<const File>(path, Access::kCreate, Direct::kAuto);
          Bytes expected;
          for (uint32_t round = 0; round < 10; ++round) {
            const Guarded source(random_bytes(30000 + round, 10 * writer + round), round);
            write(engine, {extent(file, static_cast<int64_t>(expected.size()), source)});
            const Bytes added = source.bytes();
            expected.insert(expected.end(), added.begin(), added.end());
          }
          if (content(path) != expected) ++wrong;
        } catch (const std::exception& error) {
          std::fprintf(stderr, "%s\n", error.what());
          ++wrong;
        }
      });
    }
    for (std::thread& writer : writers) writer.join();
    CHECK(wrong == 0, name(method));
  }
}

TEST(closing_ends_what_waits_and_waits_for_what_runs) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:delay=100@1+");
    const Guarded one(kBlock, 0);
    const Guarded two(kBlock, 0);
    const Guarded three(3 * kBlock, 0);
    const auto before = std::chrono::steady_clock::now();
    const Ticket running = simple.read(one);
    const Ticket queued = simple.read(two);
    const Ticket ahead = simple.read(three, 0, Priority::kReadAhead);
    simple.engine.close();
    const bool early = std::chrono::steady_clock::now() - before < milliseconds(200);
    CHECK(running.done() && queued.done() && ahead.done());
    running.wait();
    CHECK(one.bytes() == simple.part(0, kBlock));
    if (early) {  // else the second transfer had begun, since this thread came late to its close()
      const auto error = file_error_of([&] { queued.wait(); });
      CHECK(error.code() == ErrorCode::kStorage && says(error, "closed"), error.what());
      CHECK_THROWS(ahead.wait(), kStorage);
    }
    CHECK_THROWS(simple.read(one), kInvalidArgument);
    CHECK_THROWS(simple.engine.submit(Direction::kRead, {}), kInvalidArgument);
    simple.engine.close();
    simple.engine.attach(simple.file);
    CHECK(simple.engine.method() == "closed");
  }
}

TEST(closing_fails_a_request_of_which_only_a_part_was_started) {
  for (const Method method : methods()) {
    Simple simple(method, 1, "read:delay=100@1+");
    const Guarded memory(3 * kBlock, 0);
    const auto before = std::chrono::steady_clock::now();
    const Ticket begun = simple.read(memory);
    simple.engine.close();
    if (std::chrono::steady_clock::now() - before < milliseconds(200)) CHECK_THROWS(begun.wait(), kStorage);
    CHECK(begun.done());
  }
}

TEST(closing_with_many_waiters_frees_them_all_and_leaves_no_thread) {
  const int before = thread_count();
  for (const Method method : methods()) {
    for (int round = 0; round < 10; ++round) {
      std::optional<Simple> simple(std::in_place, method, 2, "read:delay=1@p0.5;read:reorder@p0.3");
      std::atomic<int> submitted{0};
      std::atomic<int> returned{0};
      std::vector<std::thread> waiters;
      for (int waiter = 0; waiter < 4; ++waiter) {
        waiters.emplace_back([&] {
          const Guarded memory(20 * kBlock, 0);
          std::vector<Ticket> tickets;
          try {
            for (int i = 0; i < 5; ++i)
              tickets.push_back(
                  simple->read(memory, 0, i % 2 == 0 ? Priority::kDemand : Priority::kReadAhead));
          } catch (const peftds::Error& error) {
            if (error.code() != ErrorCode::kInvalidArgument) return;
          }
          ++submitted;
          for (const Ticket& ticket : tickets) {
            try {
              ticket.wait();
            } catch (const peftds::FileError& error) {
              if (!says(error, "closed")) return;
            }
          }
          ++returned;
        });
      }
      while (round % 2 == 0 && submitted < 4) std::this_thread::yield();
      simple->engine.close();
      for (std::thread& waiter : waiters) waiter.join();
      CHECK(returned == 4, returned.load());
      simple.reset();
      check_thread_count(before);
    }
  }
}

TEST(what_succeeded_stays_successful_when_the_engine_closes) {
  for (const Method method : methods()) {
    for (int round = 0; round < 50; ++round) {
      Simple simple(method, 1);
      const Guarded memory(kBlock, 0);
      const Ticket ticket = simple.read(memory);
      std::thread closer([&] { simple.engine.close(); });
      bool succeeded = true;
      try {
        ticket.wait();
      } catch (const peftds::FileError&) {
        succeeded = false;
      }
      closer.join();
      if (succeeded) ticket.wait();
      if (succeeded) CHECK(memory.bytes() == simple.part(0, kBlock));
    }
  }
}

TEST(requests_of_nothing_and_closing_may_meet) {
  for (const Method method : methods()) {
    for (int round = 0; round < 50; ++round) {
      Engine engine(settings_of(method, 1, kBlock));
      std::thread user([&] {
        try {
          for (int i = 0; i < 100; ++i) engine.submit(Direction::kRead, {}).wait();
        } catch (const peftds::Error& error) {
          if (error.code() != ErrorCode::kInvalidArgument) std::abort();
        }
      });
      engine.close();
      user.join();
    }
  }
}

TEST(tickets_outlive_their_engine) {
  for (const Method method : methods()) {
    std::optional<Simple> simple(std::in_place, method, 2, "read:delay=10@1+");
    const Guarded memory(kBlock, 0);
    const Ticket ticket = simple->read(memory);
    simple.reset();
    CHECK(ticket.done() && ticket.wait_for(milliseconds(0)));
    ticket.wait();
  }
}

TEST(several_threads_may_close) {
  const int before = thread_count();
  for (const Method method : methods()) {
    for (int round = 0; round < 20; ++round) {
      Simple simple(method, 4);
      const Guarded memory(20 * kBlock, 0);
      const Ticket ticket = simple.read(memory);
      std::vector<std::thread> closers;
      for (int i = 0; i < 3; ++i) closers.emplace_back([&] { simple.engine.close(); });
      for (std::thread& closer : closers) closer.join();
      CHECK(ticket.done());
    }
    check_thread_count(before);
  }
}

TEST(an_engine_that_was_not_used_leaves_no_thread) {
  const int before = thread_count();
  for (const Method method : methods()) {
    for (int round = 0; round < 20; ++round) const Engine engine(settings_of(method, 16, kBlock));
  }
  check_thread_count(before);
}

TEST(threads_are_not_more_than_the_depth) {
  const int before = thread_count();
  Simple simple(Method::kThreads, 3, "read:delay=2@1+");
  const Guarded memory(30 * kBlock, 0);
  const Ticket ticket = simple.read(memory);
  int most = 0;
  while (!ticket.done()) most = std::max(most, thread_count() - before);
  CHECK(most <= 3, most);
  ticket.wait();
}

TEST(registered_files_and_memory_change_no_result) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      for (const std::string faults : {"", "any:short@p0.3;any:reorder@p0.2"}) {
        Simple simple(method, 4, faults, direct);
        simple.engine.attach(simple.file);
        simple.engine.attach(simple.file);
        Arena arena = simple.engine.make_arena();
        for (const int64_t size : {int64_t{1}, kBlock, 5 * kBlock + 3, 20 * kBlock}) {
          for (const int64_t offset : {int64_t{0}, int64_t{1}, kBlock, 3 * kBlock - 1}) {
            const Arena::Buffer buffer = arena.allocate(size);
            read(simple.engine, {{simple.file, offset, buffer.data(), size}});
            CHECK(Bytes(buffer.data(), buffer.data() + size) ==
                  simple.part(offset, static_cast<size_t>(size)));
            const Bytes fresh = random_bytes(static_cast<size_t>(size), static_cast<uint32_t>(offset));
            std::copy(fresh.begin(), fresh.end(), buffer.data());
            write(simple.engine, {{simple.file, offset, buffer.data(), size}});
            std::copy(fresh.begin(), fresh.end(), simple.bytes.begin() + offset);
            CHECK(content(simple.file->path()) == simple.bytes);
          }
        }
      }
    }
  }
}

TEST(more_buffers_than_can_be_registered) {
  for (const Method method : methods()) {
    Simple simple(method, 8);
    Arena arena = simple.engine.make_arena();
    for (int round = 0; round < 2; ++round) {
      std::vector<Arena::Buffer> buffers;
      std::vector<Extent> extents;
      for (int i = 0; i < 1100; ++i) {
        buffers.push_back(arena.allocate(kBlock));
        extents.push_back({simple.file, (i % 32) * kBlock, buffers.back().data(), kBlock});
      }
      read(simple.engine, extents);
      for (int i = 0; i < 1100; ++i) {
        const std::byte* data = buffers[static_cast<size_t>(i)].data();
        CHECK(Bytes(data, data + kBlock) == simple.part((i % 32) * kBlock, kBlock), "buffer ", i);
      }
    }
  }
}

TEST(more_files_than_can_be_registered) {
  for (const Method method : methods()) {
    const Folder folder;
    Engine engine(settings_of(method, 8, kBlock));
    for (uint32_t i = 0; i < 80; ++i) {
      const Bytes bytes = random_bytes(10000, i);
      const FilePointer file = file_with(folder / std::to_string(i), bytes);
      engine.attach(file);
      const Guarded memory(bytes.size(), 0);
      read(engine, {extent(file, 0, memory)});
      CHECK(memory.bytes() == bytes, "file ", i);
    }
  }
}

TEST(files_that_are_attached_often_leave_room_for_others) {
  const Folder folder;
  Engine engine(settings_of(methods().back(), 2, kBlock));
  const Bytes bytes = random_bytes(3 * kBlock, 1);
  std::weak_ptr<const File> gone;
  {
    const FilePointer often = file_with(folder / "often", bytes);
    gone = often;
    for (int i = 0; i < 200; ++i) engine.attach(often);
    const Guarded memory(bytes.size(), 0);
    read(engine, {extent(often, 0, memory)});
    CHECK(memory.bytes() == bytes);
  }
  engine.close();
  CHECK(gone.expired(), "a closed engine keeps files open");
}

TEST(a_descriptor_is_not_mistaken_for_an_attached_one) {
  const Folder folder;
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 2, kBlock));
    for (uint32_t i = 0; i < 20; ++i) {  // closed and opened again, files have the same descriptors
      const Bytes bytes = random_bytes(2 * kBlock + 1, i);
      const std::string path = folder / (name(method) + std::to_string(i));
      const FilePointer file = file_with(path, bytes);
      if (i % 2 == 0) engine.attach(file);
      const Guarded memory(bytes.size(), 0);
      read(engine, {extent(file, 0, memory)});
      CHECK(memory.bytes() == bytes, "file ", i);
    }
  }
}

TEST(memory_given_back_and_taken_anew_is_the_new_memory) {
  for (const Method method : methods()) {
    Simple simple(method, 4);
    Arena arena = simple.engine.make_arena();
    for (int64_t round = 0; round < 200; ++round) {
      const int64_t size = kBlock * (1 + round % 7);
      const Arena::Buffer buffer = arena.allocate(size);
      read(simple.engine, {{simple.file, round * 10, buffer.data(), size}});
      CHECK(Bytes(buffer.data(), buffer.data() + size) == simple.part(round * 10, static_cast<size_t>(size)));
    }
  }
}

TEST(an_arena_outlives_its_engine) {
  for (const Method method : methods()) {
    std::optional<Simple> simple(std::in_place, method);
    Arena arena = simple->engine.make_arena();
    std::optional<Arena::Buffer> buffer = arena.allocate(100000);
    simple.reset();
    std::memset(buffer->data(), 1, 100000);
    buffer.reset();
    for (int64_t size = 1; size < 100000; size += 9999) static_cast<void>(arena.allocate(size));
  }
}

TEST(arenas_and_transfers_of_several_threads) {
  for (const Method method : methods()) {
    Simple simple(method, 4);
    simple.engine.attach(simple.file);
    Arena arena = simple.engine.make_arena();
    std::atomic<int> wrong{0};
    std::vector<std::thread> users;
    for (uint32_t user = 0; user < 4; ++user) {
      users.emplace_back([&, user] {
        std::mt19937 random(user);
        for (int round = 0; round < 100; ++round) {
          const int64_t size = kBlock * (1 + random() % 6);
          const int64_t offset = kBlock * (random() % 20);
          const Arena::Buffer buffer = arena.allocate(size);
          read(simple.engine, {{simple.file, offset, buffer.data(), size}});
          if (Bytes(buffer.data(), buffer.data() + size) != simple.part(offset, static_cast<size_t>(size)))
            ++wrong;
        }
      });
    }
    for (std::thread& user : users) user.join();
    CHECK(wrong == 0, name(method));
  }
}

int main() { return run_all(); }
