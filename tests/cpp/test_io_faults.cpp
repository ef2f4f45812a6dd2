// SPDX-License-Identifier: Apache-2.0
// Transfers that go wrong: results stay right, or the ticket says what happened; nobody waits for ever.
#include "io/fault_plan.h"

#include "io_tools.h"

namespace {

using namespace peftds::io;
using namespace peftds::test;
using peftds::ErrorCode;

constexpr int64_t kBlock = 8192;
constexpr size_t kBlocks = 9;

/// A file, and transfers of all of it in `kBlocks` blocks.
class Whole {
 public:
  Whole(Method method, Direct direct, const std::string& faults, int depth)
      : engine_(settings_of(method, depth, kBlock, faults)),
        bytes_(random_bytes(kBlocks * kBlock, 1)),
        file_(file_with(folder_ / "file", bytes_, direct)) {}

  /// In one direction; throws what the ticket throws, else the bytes must be right.
  void transfer(Direction direction, size_t shift) {
    const Bytes fresh = random_bytes(bytes_.size(), ++seed_);
    const Guarded memory(direction == Direction::kWrite ? fresh : Bytes(bytes_.size()), shift);
    engine_.submit(direction, {extent(file_, 0, memory)}).wait();
    if (direction == Direction::kWrite) bytes_ = fresh;
    CHECK(memory.bytes() == bytes_, "the memory is wrong");
    CHECK(content(file_->path()) == bytes_, "the file is wrong");
  }

 private:
  Folder folder_;
  Engine engine_;
  Bytes bytes_;
  FilePointer file_;
  uint32_t seed_ = 1;
};

const char* word(Direction direction) { return direction == Direction::kRead ? "read" : "write"; }

/// Calls `check` with every way of moving bytes, and a fault at the first, a middle and the last block.
template <class Check>
void everywhere(const std::string& fault, Check check) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
        for (const size_t when : {size_t{1}, kBlocks / 2, kBlocks}) {
          for (const size_t shift : {0, 3}) {
            const std::string text = peftds::detail::concat(word(direction), ":", fault, "@", when);
            Whole whole(method, direct, text, shift == 0 ? 4 : 1);
            try {
              check(whole, direction, shift);
            } catch (const std::exception& error) {
              CHECK(false, text, ", ", name(method), ", ", name(direct), ": ", error.what());
            }
          }
        }
      }
    }
  }
}

void check_harmless(const std::string& fault) {
  everywhere(fault, [](Whole& whole, Direction direction, size_t shift) {
    whole.transfer(direction, shift);
    whole.transfer(Direction::kRead, shift);
  });
}

void check_fatal(const std::string& fault, ErrorCode when_reading, ErrorCode when_writing, int number) {
  everywhere(fault, [=](Whole& whole, Direction direction, size_t shift) {
    const auto error = file_error_of([&] { whole.transfer(direction, shift); });
    CHECK(error.code() == (direction == Direction::kRead ? when_reading : when_writing), error.what());
    CHECK(error.number() == number, error.number());
    CHECK(says(error, std::string(word(direction)) + " of ") && says(error, " bytes at offset "),
          error.what());
    whole.transfer(Direction::kWrite, shift);
    whole.transfer(Direction::kRead, shift);
  });
}

/// Thousands of small transfers, each possibly with the fault.
void check_often(const std::string& faults) {
  const Folder folder;
  constexpr size_t kSize = 4096 * 300 + 123;
  const Bytes bytes = random_bytes(kSize, 1);
  const Guarded source(bytes);
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Engine engine(settings_of(method, 8, 4096, faults));
      const FilePointer file = file_with(folder / "file", Bytes(kSize), direct);
      write(engine, {extent(file, 0, source)});
      CHECK(content(file->path()) == bytes, faults, ", ", name(method), ", ", name(direct));
      const Guarded target(kSize, 0);
      read(engine, {extent(file, 0, target)});
      CHECK(target.bytes() == bytes, faults, ", ", name(method), ", ", name(direct));
    }
  }
}

/// Thousands of small tickets under faults that are errors: each one fails so, or is right.
void check_errors_often(const std::string& faults, ErrorCode expected) {
  const Folder folder;
  const Bytes bytes = random_bytes(64 * 4096, 1);
  const FilePointer file = file_with(folder / "file", bytes);
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 8, 4096, faults));
    int failed = 0;
    for (int round = 0; round < 20; ++round) {
      std::vector<Guarded> memory;
      std::vector<Ticket> tickets;
      for (int64_t i = 0; i < 64; ++i) {
        memory.emplace_back(4096, 0);
        tickets.push_back(engine.submit(Direction::kRead, {extent(file, 4096 * i, memory.back())}));
      }
      for (size_t i = 0; i < 64; ++i) {
        try {
          tickets[i].wait();
          const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(4096 * i);
          CHECK(memory[i].bytes() == Bytes(first, first + 4096), "ticket ", i);
        } catch (const peftds::FileError& error) {
          CHECK(error.code() == expected, error.what());
          ++failed;
        }
      }
    }
    CHECK(failed > 250 && failed < 520, failed, " of 1280 failed with ", faults);
  }
}

/// What the first `count` transfers of one operation meet, a letter each: '.' for nothing.
std::string plan(const std::string& text, Direction direction, int count) {
  FaultPlan faults = FaultPlan::parse(text);
  std::string met;
  for (int i = 0; i < count; ++i) {
    const auto fault = faults.next(direction);
    met += !fault                                 ? '.'
           : fault->kind == Fault::Kind::kShort   ? 's'
           : fault->kind == Fault::Kind::kEnd     ? 'e'
           : fault->kind == Fault::Kind::kDelay   ? 'd'
           : fault->kind == Fault::Kind::kReorder ? 'r'
           : fault->value == EIO                  ? 'i'
           : fault->value == ENOSPC               ? 'f'
           : fault->value == EINTR                ? 't'
                                                  : '?';
  }
  return met;
}

}  // namespace

TEST(a_short_transfer_is_resumed) { check_harmless("short"); }
TEST(an_interrupted_transfer_is_repeated) { check_harmless("eintr"); }
TEST(a_late_transfer_is_waited_for) { check_harmless("delay=3"); }
TEST(the_order_of_completions_does_not_matter) { check_harmless("reorder"); }

TEST(a_faulty_disk_is_a_storage_error) { check_fatal("eio", ErrorCode::kStorage, ErrorCode::kStorage, EIO); }
TEST(a_full_disk_has_its_own_error) {
  check_fatal("enospc", ErrorCode::kStorageFull, ErrorCode::kStorageFull, ENOSPC);
}
TEST(an_early_end_is_an_error) { check_fatal("end", ErrorCode::kCorruptData, ErrorCode::kStorage, 0); }

TEST(thousands_of_short_transfers) { check_often("any:short@p0.3"); }
TEST(thousands_of_interruptions) { check_often("any:eintr@p0.3"); }
TEST(thousands_out_of_order) { check_often("any:reorder@p0.3;seed=3"); }
TEST(thousands_of_delays) { check_often("any:delay=0@p0.3;any:delay=1@p0.02"); }
TEST(thousands_of_everything_harmless) {
  check_often("any:short@p0.3;any:eintr@p0.3;any:reorder@p0.3;any:delay=1@p0.01;seed=5");
}
TEST(every_transfer_short_or_out_of_order) {
  check_often("any:short@1+");
  check_often("any:reorder@1+");
}

TEST(thousands_of_tickets_with_errors) {
  check_errors_often("read:eio@p0.3", ErrorCode::kStorage);
  check_errors_often("read:enospc@p0.3", ErrorCode::kStorageFull);
  check_errors_often("read:end@p0.3", ErrorCode::kCorruptData);
}

TEST(endless_interruptions_end_with_an_error) {
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
        Whole whole(method, direct, std::string(word(direction)) + ":eintr@1+", 2);
        const auto error = file_error_of([&] { whole.transfer(direction, 0); });
        CHECK(error.code() == ErrorCode::kStorage && error.number() == EINTR, error.what());
      }
    }
  }
}

TEST(after_the_first_error_nothing_more_of_a_ticket_is_started) {
  const Folder folder;
  for (const Method method : methods()) {
    const FilePointer file = file_with(folder / "file", Bytes(20 * 4096));
    Engine engine(settings_of(method, 1, 4096, "write:eio@3"));
    const Guarded source(random_bytes(20 * 4096, 1));
    CHECK_THROWS(write(engine, {extent(file, 0, source)}), kStorage);
    const Bytes after = content(file->path());
    CHECK(std::all_of(after.begin() + 3 * 4096, after.end(), [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(closing_while_completions_are_held_back_or_late) {
  for (const Method method : methods()) {
    for (const std::string faults : {"any:reorder@1+", "any:delay=30@p0.5;any:reorder@p0.5;any:short@p0.2"}) {
      for (int round = 0; round < 5; ++round) {
        const Folder folder;
        const FilePointer file = file_with(folder / "file", random_bytes(50 * 4096, 1));
        Engine engine(settings_of(method, 3, 4096, faults));
        const Guarded one(50 * 4096, 0);
        const Guarded two(50 * 4096, 0);
        const Ticket first = engine.submit(Direction::kRead, {extent(file, 0, one)});
        const Ticket second = engine.submit(Direction::kRead, {extent(file, 0, two)}, Priority::kReadAhead);
        engine.close();
        CHECK(first.done() && second.done());
      }
    }
  }
}

TEST(a_plan_says_when) {
  CHECK(plan("read:eio@3", Direction::kRead, 6) == "..i...");
  CHECK(plan("read:eio@3", Direction::kWrite, 6) == "......");
  CHECK(plan("any:enospc@2+", Direction::kWrite, 5) == ".ffff");
  CHECK(plan("write:end@1;write:short@1+", Direction::kWrite, 4) == "esss", "the first rule that applies");
  CHECK(plan("read:delay=5@2;read:reorder@4;read:eintr@5", Direction::kRead, 6) == ".d.rt.");
  CHECK(plan("read:short@p0", Direction::kRead, 50) == std::string(50, '.'));
  CHECK(plan("read:short@p1", Direction::kRead, 50) == std::string(50, 's'));
  CHECK(plan("", Direction::kRead, 3) == "..." && plan(";;", Direction::kRead, 3) == "...");
  CHECK(FaultPlan::parse("any:delay=250@1").next(Direction::kRead)->value == 250);
}

TEST(chance_is_repeatable) {
  const std::string one = plan("any:short@p0.3;seed=7", Direction::kRead, 1000);
  CHECK(one == plan("seed=7;any:short@p0.3", Direction::kRead, 1000));
  CHECK(one != plan("any:short@p0.3;seed=8", Direction::kRead, 1000));
  const auto met = std::count(one.begin(), one.end(), 's');
  CHECK(met > 230 && met < 370, met);
}

TEST(what_is_no_plan_is_refused) {
  for (const std::string text : {"read",
                                 "read:",
                                 "read:eio",
                                 "read:eio@",
                                 ":eio@1",
                                 "@1",
                                 "Read:eio@1",
                                 "reads:eio@1",
                                 "read:EIO@1",
                                 "read:eios@1",
                                 "read:eio@0",
                                 "read:eio@-1",
                                 "read:eio@+",
                                 "read:eio@1++",
                                 "read:eio@+1",
                                 "read:eio@1.5",
                                 "read:eio@x",
                                 "read:eio@1 ",
                                 " read:eio@1",
                                 "read:eio@1,write:eio@1",
                                 "read:eio@1@2",
                                 "read:eio@p",
                                 "read:eio@p1.1",
                                 "read:eio@p-0.1",
                                 "read:eio@pnan",
                                 "read:eio@pinf",
                                 "read:eio@p0.5x",
                                 "read:eio=5@1",
                                 "read:short=@1",
                                 "read:delay@1",
                                 "read:delay=@1",
                                 "read:delay=-1@1",
                                 "read:delay=1.5@1",
                                 "read:delay=99999999999@1",
                                 "read:eio@99999999999999999999",
                                 "seed=",
                                 "seed=x",
                                 "seed=-1",
                                 "seed",
                                 "seed=1.5",
                                 "read:eio@1;nonsense",
                                 "nonsense;read:eio@1",
                                 "read:read:eio@1"}) {
    CHECK_THROWS(FaultPlan::parse(text), kConfig);
    try {
      const Engine engine(settings_of(Method::kThreads, 1, 4096, text));
      CHECK(false, "an engine was made with ", text);
    } catch (const peftds::Error& error) {
      CHECK(error.code() == ErrorCode::kConfig && says(error, "PEFTDS_IO_FAULTS"), error.what());
    }
  }
}

int main() { return run_all(); }
