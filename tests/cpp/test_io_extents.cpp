// SPDX-License-Identifier: Apache-2.0
// Random extents against plain pread and pwrite: results, and every byte around them.
#include "io_tools.h"

namespace {

using namespace peftds::io;
using namespace peftds::test;

constexpr size_t kSpan = 160 * 1024;

struct Range {
  size_t offset;
  size_t size;
};

/// Up to `count` ranges without a common byte, of which some touch, some are aligned and some are empty.
std::vector<Range> apart(std::mt19937& random, int count) {
  std::vector<size_t> borders;
  for (int i = 0; i < 2 * count; ++i) {
    size_t border = random() % kSpan;
    if (random() % 3 == 0) border = border / 4096 * 4096;
    borders.push_back(border);
  }
  std::sort(borders.begin(), borders.end());
  const size_t step = 1 + random() % 2;  // 1: each range begins where the last one ends
  std::vector<Range> ranges;
  for (size_t i = 0; i + 1 < borders.size(); i += step)
    ranges.push_back({borders[i], borders[i + 1] - borders[i]});
  std::shuffle(ranges.begin(), ranges.end(), random);
  return ranges;
}

size_t random_shift(std::mt19937& random) { return random() % 2 == 0 ? 0 : random() % 4096; }

/// Files, what should be in them, and an engine to move bytes.
class Bench {
 public:
  Bench(Engine& engine, const std::string& root, Direct direct, uint32_t seed)
      : engine_(engine), folder_(root), random_(seed) {
    for (const char* file : {"a", "b"}) {
      expected_.push_back(random_bytes(kSpan / 2 + 777, seed));
      files_.push_back(file_with(folder_ / file, expected_.back(), direct));
    }
  }

  /// Disjoint extents of both files, spread over some tickets that are under way together.
  void write_some() {
    std::vector<Guarded> sources;
    std::vector<std::vector<Extent>> tickets(1 + random_() % 3);
    for (size_t file = 0; file < files_.size(); ++file) {
      for (const Range& range : apart(random_, 1 + static_cast<int>(random_() % 12))) {
        sources.emplace_back(random_bytes(range.size, random_()), random_shift(random_));
        tickets[random_() % tickets.size()].push_back(
            extent(files_[file], static_cast<int64_t>(range.offset), sources.back()));
        remember(expected_[file], range, sources.back());
      }
    }
    run(Direction::kWrite, std::move(tickets));
    for (size_t file = 0; file < files_.size(); ++file)
      CHECK(content(files_[file]->path()) == expected_[file], "file ", file);
  }

  /// Any extents of both files, with common bytes too.
  void read_some() {
    std::vector<Guarded> targets;
    std::vector<Bytes> right;
    std::vector<std::vector<Extent>> tickets(1 + random_() % 3);
    for (int i = 0; i < 12; ++i) {
      const size_t file = random_() % files_.size();
      const Bytes& whole = expected_[file];
      const size_t offset = random_() % whole.size();
      const size_t size = random_() % 4 == 0 ? whole.size() - offset : random_() % (whole.size() - offset);
      const auto first = whole.begin() + static_cast<std::ptrdiff_t>(offset);
      right.emplace_back(first, first + static_cast<std::ptrdiff_t>(size));
      targets.emplace_back(size, random_shift(random_));
      tickets[random_() % tickets.size()].push_back(
          extent(files_[file], static_cast<int64_t>(offset), targets.back()));
    }
    run(Direction::kRead, std::move(tickets));
    for (size_t i = 0; i < right.size(); ++i)
      CHECK(targets[i].bytes() == right[i], "extent ", i, " of ", right[i].size(), " bytes");
  }

 private:
  static void remember(Bytes& whole, const Range& range, const Guarded& source) {
    if (range.size == 0) return;
    if (whole.size() < range.offset + range.size) whole.resize(range.offset + range.size);
    const Bytes bytes = source.bytes();
    std::copy(bytes.begin(), bytes.end(), whole.begin() + static_cast<std::ptrdiff_t>(range.offset));
  }

  void run(Direction direction, std::vector<std::vector<Extent>> vectors) {
    std::vector<Ticket> tickets;
    for (auto& extents : vectors) tickets.push_back(engine_.submit(direction, std::move(extents)));
    for (const Ticket& ticket : tickets) ticket.wait();
  }

  Engine& engine_;
  Folder folder_;
  std::mt19937 random_;
  std::vector<FilePointer> files_;
  std::vector<Bytes> expected_;
};

void check_random_extents(const std::string& root, int rounds) {
  uint32_t seed = 0;
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      for (const int depth : {1, 2, 8}) {
        for (const int64_t block_bytes : {4096, 8192, 65536}) {
          Engine engine(settings_of(method, depth, block_bytes));
          ++seed;
          try {
            Bench bench(engine, root, direct, seed);
            for (int round = 0; round < rounds; ++round) {
              bench.write_some();
              bench.read_some();
            }
          } catch (const std::exception& error) {
            CHECK(false, name(method), ", ", name(direct), ", depth ", depth, ", blocks of ", block_bytes,
                  ", seed ", seed, ": ", error.what());
          }
        }
      }
    }
  }
}

/// Bytes [offset, offset + size) of a file go to memory and back to another file.
void check_extent(Engine& engine, const FilePointer& from, const FilePointer& to, const Bytes& whole,
                  size_t offset, size_t size, size_t shift) {
  const auto first = whole.begin() + static_cast<std::ptrdiff_t>(offset);
  const Guarded memory(size, shift, std::byte{0x5a});
  read(engine, {extent(from, static_cast<int64_t>(offset), memory)});
  CHECK(memory.bytes() == Bytes(first, first + static_cast<std::ptrdiff_t>(size)), "read of ", size, " at ",
        offset, ", memory at ", shift);
  Bytes expected = content(to->path());
  std::copy_n(first, size, expected.begin() + static_cast<std::ptrdiff_t>(offset));
  write(engine, {extent(to, static_cast<int64_t>(offset), memory)});
  CHECK(content(to->path()) == expected, "write of ", size, " at ", offset, ", memory at ", shift);
}

}  // namespace

TEST(random_extents_on_a_disk) { check_random_extents(disk_root(), 4); }

TEST(random_extents_in_memory) {
  if (!memory_root().empty()) check_random_extents(memory_root(), 4);
}

TEST(extents_around_the_borders_of_blocks) {
  const Folder folder;
  const Bytes whole = random_bytes(5 * 8192 + 100, 1);
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Engine engine(settings_of(method, 2, 8192));
      const FilePointer from = file_with(folder / "from", whole, direct);
      const FilePointer to = file_with(folder / "to", Bytes(whole.size()), direct);
      for (const size_t offset : {0, 1, 4095, 4096, 8191, 8192, 8193, 16384}) {
        for (const size_t size : {1, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 20000}) {
          for (const size_t shift : {0, 512, 1}) check_extent(engine, from, to, whole, offset, size, shift);
        }
      }
    }
  }
}

TEST(an_unaligned_end_of_a_file_is_read_and_grown) {
  const Folder folder;
  for (const Method method : methods()) {
    for (const Direct direct : {Direct::kAuto, Direct::kOff}) {
      Engine engine(settings_of(method, 4, 8192));
      Bytes whole = random_bytes(12345, 2);
      const std::string path = folder / (std::string(name(method)) + name(direct));
      const FilePointer file = file_with(path, whole, direct);
      for (const size_t more : {1, 4096, 8192, 30000, 20000, 3}) {
        const Guarded added(random_bytes(more, static_cast<uint32_t>(more)));
        write(engine, {extent(file, static_cast<int64_t>(whole.size()), added)});
        const Bytes bytes = added.bytes();
        whole.insert(whole.end(), bytes.begin(), bytes.end());
        CHECK(content(path) == whole, "after ", more, " more");
        const Guarded all(whole.size(), 0);
        read(engine, {extent(file, 0, all)});
        CHECK(all.bytes() == whole, "after ", more, " more");
      }
    }
  }
}

TEST(one_ticket_of_very_many_extents) {
  const Folder folder;
  const Bytes whole = random_bytes(400 * 1024, 3);
  const FilePointer file = file_with(folder / "file", whole);
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 8, 4096));
    const Guarded memory(whole.size(), 0);
    std::vector<Extent> extents;
    for (size_t start = 0; start < whole.size(); start += 100)
      extents.push_back({file, static_cast<int64_t>(start), memory.data() + start,
                         static_cast<int64_t>(std::min<size_t>(100, whole.size() - start))});
    std::reverse(extents.begin(), extents.end());
    read(engine, extents);
    CHECK(memory.bytes() == whole, name(method));
  }
}

TEST(an_offset_beyond_four_gibibytes) {
  const Folder folder;
  const FilePointer file = file_with(folder / "sparse", {});
  const int64_t offset = (int64_t{5} << 30) + 123;
  for (const Method method : methods()) {
    Engine engine(settings_of(method, 2, 8192));
    const Guarded source(random_bytes(20000, 4));
    const Guarded target(20000, 7);
    write(engine, {extent(file, offset, source)});
    read(engine, {extent(file, offset, target)});
    CHECK(target.bytes() == source.bytes(), name(method));
    CHECK(file->size() == offset + 20000);
  }
}

int main() { return run_all(); }
