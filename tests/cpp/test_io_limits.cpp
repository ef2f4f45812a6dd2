// SPDX-License-Identifier: Apache-2.0
// The storage engine over fork() and at the system's limits. Not run under ThreadSanitizer, which does not
// support threads that are started after a fork of a process with several threads.
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <fstream>
#include <optional>

#include "in_child.h"
#include "io_tools.h"

namespace {

using namespace peftds::io;
using namespace peftds::test;
using peftds::Arena;
using peftds::ErrorCode;

constexpr int64_t kBlock = 4096;

/// Sets a limit as long as it lives.
class Limit {
 public:
  Limit(__rlimit_resource which, rlim_t value) : which_(which) {
    CHECK(getrlimit(which_, &before_) == 0);
    rlimit changed = before_;
    changed.rlim_cur = std::min(value, before_.rlim_max);
    CHECK(setrlimit(which_, &changed) == 0);
  }
  ~Limit() { setrlimit(which_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  __rlimit_resource which_;
  rlimit before_{};
};

/// Bytes of private writable mappings: what RLIMIT_DATA counts.
rlim_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    rlim_t kibibytes = 0;
    if (word == "VmData:" && status >> kibibytes) return kibibytes * 1024;
  }
  throw std::runtime_error("/proc/self/status has no VmData");
}

/// In a child: gives up every privilege that limits do not hold for.
void become_nobody() {
  if (geteuid() == 0) CHECK(setgid(65534) == 0 && setuid(65534) == 0, std::strerror(errno));
}

void check_reads(Engine& engine, const FilePointer& file, const Bytes& bytes) {
  const Guarded memory(bytes.size(), 0);
  read(engine, {extent(file, 0, memory)});
  CHECK(memory.bytes() == bytes);
}

}  // namespace

TEST(a_child_is_refused_and_leaves_cleanly) {
  const Folder folder;
  const Bytes bytes = random_bytes(10 * kBlock, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  for (const Method method : methods()) {
    std::optional<Engine> engine(std::in_place, settings_of(method, 2, kBlock));
    check_reads(*engine, file, bytes);
    const Guarded memory(kBlock, 0);
    std::optional<Ticket> ticket(engine->submit(Direction::kRead, {extent(file, 0, memory)}));
    ticket->wait();
    CHECK(succeeds_in_child([&] {
      CHECK_THROWS(engine->submit(Direction::kRead, {extent(file, 0, memory)}), kInvalidArgument);
      CHECK_THROWS(engine->submit(Direction::kRead, {}), kInvalidArgument);
      CHECK_THROWS(engine->attach(file), kInvalidArgument);
      CHECK_THROWS(ticket->wait(), kInvalidArgument);
      CHECK_THROWS(ticket->wait_for(std::chrono::milliseconds(1)), kInvalidArgument);
      CHECK_THROWS(ticket->done(), kInvalidArgument);
      CHECK_THROWS(engine->method(), kInvalidArgument);
      engine->close();
      ticket.reset();
      engine.reset();
      Engine own(settings_of(method, 2, kBlock));
      check_reads(own, file, bytes);
    }));
    check_reads(*engine, file, bytes);
  }
}

// Whatever another thread does at the time of the fork: it is not there in the child.
TEST(a_child_leaves_while_the_parent_transfers_and_waits) {
  const Folder folder;
  const Bytes bytes = random_bytes(10 * kBlock, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  for (const Method method : methods()) {
    std::optional<Engine> engine(std::in_place, settings_of(method, 1, kBlock, "read:delay=2@p0.5"));
    std::optional<Arena> arena(engine->make_arena());
    const Guarded mine(10 * kBlock, 0);
    std::atomic<bool> stop{false};
    std::atomic<bool> wrong{false};
    std::thread waiter([&] {
      try {
        while (!stop) check_reads(*engine, file, bytes);
      } catch (const std::exception&) {
        wrong = true;
      }
    });
    bool all = true;
    for (int round = 0; round < 20; ++round) {
      std::optional<Ticket> ticket(engine->submit(Direction::kRead, {extent(file, 0, mine)}));
      std::optional<Arena::Buffer> buffer(arena->allocate(kBlock));
      all = succeeds_in_child([&] {
              CHECK_THROWS(ticket->wait(), kInvalidArgument);
              CHECK_THROWS(engine->attach(file), kInvalidArgument);
              ticket.reset();
              buffer.reset();
              arena.reset();
              engine.reset();
            }) &&
            all;
      ticket->wait();
      CHECK(mine.bytes() == bytes, "in round ", round);
    }
    stop = true;
    waiter.join();
    CHECK(all && !wrong, name(method));
  }
}

TEST(a_child_drops_what_a_thread_of_the_parent_waits_for) {
  const Folder folder;
  const FilePointer file = file_with(folder / "file", random_bytes(kBlock, 1));
  for (const Method method : methods()) {
    std::optional<Engine> engine(std::in_place, settings_of(method, 1, kBlock, "read:delay=300@1"));
    const Guarded memory(kBlock, 0);
    std::optional<Ticket> ticket(engine->submit(Direction::kRead, {extent(file, 0, memory)}));
    std::thread waiter([&] { ticket->wait(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const bool clean = succeeds_in_child([&] {
      ticket.reset();
      engine.reset();
    });
    waiter.join();
    CHECK(clean, name(method));
  }
}

TEST(memory_in_a_child_is_its_own) {
  const Folder folder;
  const Bytes bytes = random_bytes(4 * kBlock, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 2, kBlock));
    Arena arena = engine.make_arena();
    const Arena::Buffer buffer = arena.allocate(4 * kBlock);
    std::memset(buffer.data(), 1, 4 * kBlock);
    CHECK(succeeds_in_child([&] {
      std::memset(buffer.data(), 2, 4 * kBlock);
      for (int64_t size = kBlock; size < 20 * kBlock; size += kBlock) static_cast<void>(arena.allocate(size));
    }));
    CHECK(buffer.data()[0] == std::byte{1});
    read(engine, {{file, 0, buffer.data(), 4 * kBlock}});
    CHECK(Bytes(buffer.data(), buffer.data() + 4 * kBlock) == bytes);
  }
}

TEST(little_lockable_memory_only_costs_registration) {
  const Folder folder;
  const Bytes bytes = random_bytes(64 * kBlock, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  for (const Method method : methods()) {
    CHECK(succeeds_in_child([&] {
      become_nobody();
      const Limit limit(RLIMIT_MEMLOCK, 64 * 1024);
      Engine engine(settings_of(method, 4, kBlock));
      engine.attach(file);
      Arena arena = engine.make_arena();
      for (const int64_t size : {kBlock, 8 * kBlock, 64 * kBlock}) {
        for (int round = 0; round < 20; ++round) {
          const Arena::Buffer buffer = arena.allocate(size);
          read(engine, {{file, 0, buffer.data(), size}});
          CHECK(std::equal(buffer.data(), buffer.data() + size, bytes.begin()));
        }
      }
      check_reads(engine, file, bytes);
    }));
  }
}

// An unaligned direct read needs a window; here there is no memory for it.
TEST(no_memory_for_a_window_fails_the_ticket_alone) {
  const Folder folder;
  const Bytes bytes = random_bytes(10 * kBlock, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  if (!file->direct()) return;
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 2, int64_t{1} << 30));
    const Guarded memory(3 * kBlock, 1);
    const Guarded aligned(3 * kBlock, 0);
    check_reads(engine, file, bytes);
    {
      const Limit limit(RLIMIT_DATA, data_bytes() + (rlim_t{256} << 20));
      const Ticket starved = engine.submit(Direction::kRead, {extent(file, 5, memory)});
      const auto error = file_error_of([&] { starved.wait(); });
      CHECK(error.code() == ErrorCode::kStorage && error.number() == ENOMEM, error.what());
      read(engine, {extent(file, 0, aligned)});
    }
    read(engine, {extent(file, 5, memory)});
    CHECK(std::equal(memory.data(), memory.data() + memory.size(), bytes.begin() + 5));
    engine.close();
  }
}

TEST(no_thread_to_be_had_is_an_error_and_no_hang) {
  const Folder folder;
  const FilePointer file = file_with(folder / "file", random_bytes(10 * kBlock, 1));
  for (const Method method : methods()) {
    const int descriptors = dup(0);
    close(descriptors);
    CHECK(succeeds_in_child([&] {
      become_nobody();
      const Limit limit(RLIMIT_NPROC, 0);
      const Guarded memory(5 * kBlock, 0);
      if (method == Method::kUring) {
        CHECK_THROWS(Engine(settings_of(method, 2, kBlock)), kConfig);
        const int after = dup(0);
        CHECK(after == descriptors, "a descriptor was not closed");
        return;
      }
      Engine engine(settings_of(method, 2, kBlock));
      for (int round = 0; round < 3; ++round) {
        const Ticket one = engine.submit(Direction::kRead, {extent(file, 0, memory)});
        const Ticket two = engine.submit(Direction::kRead, {extent(file, kBlock, memory)});
        const auto error = file_error_of([&] { one.wait(); });
        CHECK(error.code() == ErrorCode::kStorage && error.number() == EAGAIN, error.what());
        CHECK_THROWS(two.wait(), kStorage);
      }
    }));
  }
}

TEST(a_file_size_limit_is_an_error_of_the_ticket) {
  const Folder folder;
  for (const Method method : methods()) {
    CHECK(succeeds_in_child([&] {
      CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
      const Limit limit(RLIMIT_FSIZE, 10 * kBlock + 100);
      const FilePointer file = file_with(folder / name(method), {});
      Engine engine(settings_of(method, 1, 2 * kBlock));
      const Guarded source(random_bytes(12 * kBlock, 1));
      const auto error = file_error_of([&] { write(engine, {extent(file, 0, source)}); });
      CHECK(error.code() == ErrorCode::kStorage && error.number() == EFBIG, error.what());
    }));
  }
}

int main() { return run_all(); }
