// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <sys/statvfs.h>

#include "io/piece.h"
#include "io_tools.h"

namespace {

using namespace peftds::io;
using namespace peftds::test;
using peftds::ErrorCode;

peftds::FileError error_of_opening(const std::string& path, Access access) {
  return file_error_of([&] { const File file(path, access, Direct::kAuto); });
}

int open_descriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

int64_t free_bytes(const std::string& path) {
  struct statvfs facts{};
  CHECK(statvfs(path.c_str(), &facts) == 0);
  return static_cast<int64_t>(facts.f_bavail) * static_cast<int64_t>(facts.f_frsize);
}

int64_t allocated_bytes(const std::string& path) {
  struct stat facts{};
  CHECK(stat(path.c_str(), &facts) == 0);
  return static_cast<int64_t>(facts.st_blocks) * 512;
}

std::vector<std::string> roots() {
  std::vector<std::string> all{disk_root()};
  if (!memory_root().empty()) all.push_back(memory_root());
  return all;
}

/// Pieces of a whole extent, which must follow each other without a gap.
std::vector<Piece> pieces(const Extent& extent, Direction direction, int64_t block_bytes) {
  const int64_t start = round_down(extent.offset, extent.file->alignment());
  std::vector<Piece> all;
  for (int64_t done = 0; done < extent.size;) {
    all.push_back(next_piece(extent, done, direction, block_bytes));
    const Piece& piece = all.back();
    CHECK(piece.size > 0 && piece.size <= block_bytes && piece.offset == extent.offset + done);
    CHECK(piece.data == extent.data + done);
    done += piece.size;
    CHECK(done == extent.size || (done < extent.size && (extent.offset + done - start) % block_bytes == 0),
          "a piece of ", extent.size, " bytes at ", extent.offset, " ends after ", done);
  }
  return all;
}

}  // namespace

TEST(a_new_file_is_made_private_and_empty) {
  const Folder folder;
  const File file(folder / "new", Access::kCreate, Direct::kAuto);
  struct stat facts{};
  CHECK(stat(file.path().c_str(), &facts) == 0 && file.path() == folder / "new");
  CHECK((facts.st_mode & 0077) == 0 && facts.st_size == 0 && file.size() == 0);
}

TEST(a_file_that_exists_is_not_created) {
  const Folder folder;
  const Bytes bytes = random_bytes(1000, 1);
  put(folder / "file", bytes);
  const auto error = error_of_opening(folder / "file", Access::kCreate);
  CHECK(error.code() == ErrorCode::kStorage && error.number() == EEXIST, error.what());
  CHECK(says(error, "creation") && says(error, folder / "file"), error.what());
  CHECK(content(folder / "file") == bytes);
}

TEST(a_file_that_is_missing_is_not_opened) {
  const Folder folder;
  for (const Access access : {Access::kRead, Access::kUpdate}) {
    const auto error = error_of_opening(folder / "none", access);
    CHECK(error.code() == ErrorCode::kStorage && error.number() == ENOENT, error.what());
    CHECK(error.path() == folder / "none" && says(error, "open for reading"), error.what());
  }
  CHECK(error_of_opening(folder / "none/file", Access::kCreate).number() == ENOENT);
  CHECK(!std::filesystem::exists(folder / "none"));
}

TEST(a_folder_is_no_file) {
  const Folder folder;
  CHECK(error_of_opening(folder.path(), Access::kUpdate).number() == EISDIR);
  CHECK(error_of_opening(folder.path(), Access::kCreate).number() == EEXIST);
  CHECK(error_of_opening(folder.path(), Access::kRead).number() == EISDIR);
}

TEST(descriptors_are_closed_and_not_inherited) {
  const Folder folder;
  const int before = open_descriptors();
  {
    const File file(folder / "file", Access::kCreate, Direct::kAuto);
    for (const int descriptor : {file.buffered_descriptor(), file.direct_descriptor()}) {
      if (descriptor >= 0) CHECK((fcntl(descriptor, F_GETFD) & FD_CLOEXEC) != 0);
    }
  }
  for (const Access access : {Access::kCreate, Access::kRead, Access::kUpdate})
    static_cast<void>(file_error_of([&] { const File file(folder.path(), access, Direct::kAuto); }));
  CHECK(open_descriptors() == before);
}

TEST(direct_says_whether_and_why_not) {
  for (const std::string& root : roots()) {
    const Folder folder(root);
    const File off(folder / "off", Access::kCreate, Direct::kOff);
    CHECK(!off.direct() && off.direct_descriptor() < 0 &&
          says(std::runtime_error(off.why_buffered()), "off"));
    const File file(folder / "file", Access::kCreate, Direct::kAuto);
    CHECK(file.direct() == file.why_buffered().empty(), root, ": ", file.why_buffered());
    CHECK(!file.direct() || file.direct_descriptor() >= 0);
    CHECK(file.alignment() >= 4096 && (file.alignment() & (file.alignment() - 1)) == 0);
    file.give_up_direct();
    CHECK(!file.direct() && !file.why_buffered().empty());
  }
}

TEST(direct_transfers_bypass_the_cache_where_they_are_allowed) {
  const Folder folder;
  const FilePointer file = file_with(folder / "file", random_bytes(1 << 20, 1));
  if (!file->direct()) return;
  CHECK((fcntl(file->direct_descriptor(), F_GETFL) & O_DIRECT) != 0);
  CHECK((fcntl(file->buffered_descriptor(), F_GETFL) & O_DIRECT) == 0);
}

TEST(a_file_that_stops_taking_direct_transfers_is_still_right) {
  const Folder folder;
  for (const Method method : methods()) {
    const Bytes bytes = random_bytes(300000, 1);
    const FilePointer file = file_with(folder / "file", bytes);
    Engine engine(settings_of(method, 2, 8192));
    const Guarded before(bytes.size(), 0);
    const Guarded after(bytes.size(), 0);
    const Ticket ticket = engine.submit(Direction::kRead, {extent(file, 0, before)});
    file->give_up_direct();
    ticket.wait();
    read(engine, {extent(file, 0, after)});
    CHECK(before.bytes() == bytes && after.bytes() == bytes, name(method));
  }
}

TEST(preallocation_takes_the_space_and_grows_the_file) {
  for (const std::string& root : roots()) {
    const Folder folder(root);
    const File file(folder / "file", Access::kCreate, Direct::kAuto);
    file.preallocate(0, 1 << 20);
    CHECK(file.size() == 1 << 20 && allocated_bytes(file.path()) >= 1 << 20, root);
    file.preallocate(1 << 20, 12345);
    CHECK(file.size() == (1 << 20) + 12345, root);
    file.preallocate(4096, 4096);
    CHECK(file.size() == (1 << 20) + 12345, "a part that exists already changes nothing");
  }
}

TEST(preallocation_keeps_what_is_there) {
  for (const std::string& root : roots()) {
    const Folder folder(root);
    Bytes bytes = random_bytes(10000, 1);
    const FilePointer file = file_with(folder / "file", bytes);
    file->preallocate(0, 50000);
    bytes.resize(50000);
    CHECK(content(file->path()) == bytes, root);
  }
}

TEST(preallocation_of_more_than_there_is_changes_nothing) {
  for (const std::string& root : roots()) {
    const Folder folder(root);
    const Bytes bytes = random_bytes(5000, 1);
    const FilePointer file = file_with(folder / "file", bytes);
    const int64_t allocated = allocated_bytes(file->path());
    const int64_t available = free_bytes(folder.path());
    for (const int64_t size : {available + (int64_t{1} << 36), int64_t{1} << 50, int64_t{1} << 62}) {
      const auto error = file_error_of([&] { file->preallocate(0, size); });
      CHECK(error.code() == ErrorCode::kStorageFull && error.number() == ENOSPC, root, ": ", error.what());
      CHECK(says(error, "reserving " + std::to_string(size) + " bytes at offset 0"), error.what());
      CHECK(says(error, file->path()) && says(error, "bytes are free"), error.what());
      CHECK(content(file->path()) == bytes && allocated_bytes(file->path()) <= allocated + 4096, root);
    }
    file->preallocate(0, 100000);
    CHECK(file->size() == 100000);
  }
}

TEST(preallocation_needs_a_file_opened_for_writing) {
  const Folder folder;
  put(folder / "file", random_bytes(10, 1));
  const File file(folder / "file", Access::kRead, Direct::kAuto);
  const auto error = file_error_of([&] { file.preallocate(0, 4096); });
  CHECK(error.code() == ErrorCode::kStorage && error.number() == EBADF, error.what());
}

TEST(codes_and_remedies_of_system_errors) {
  const auto error_of = [](int number) {
    return file_error_of([&] { throw_file_error("read of 5 bytes at offset 6", "/some/where", number); });
  };
  for (const int number : {ENOSPC, EDQUOT}) CHECK(error_of(number).code() == ErrorCode::kStorageFull);
  for (const int number : {EIO, EACCES, EPERM, EROFS, ENOENT, EEXIST, EMFILE, ENFILE, ESTALE, EBADF}) {
    const auto error = error_of(number);
    CHECK(error.code() == ErrorCode::kStorage && error.number() == number, number);
    CHECK(says(error, "read of 5 bytes at offset 6 failed: ") && says(error, std::strerror(number)));
    CHECK(error.path() == "/some/where" && says(error, "'/some/where'"), error.what());
    CHECK(number == EBADF || says(error, "; "), "no remedy: ", error.what());
  }
}

TEST(pieces_cover_an_extent_and_are_aligned_inside) {
  const Folder folder;
  const FilePointer direct = file_with(folder / "direct", {});
  const FilePointer buffered = file_with(folder / "buffered", {}, Direct::kOff);
  const Guarded memory(100000, 0);
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    for (const FilePointer& file : {direct, buffered}) {
      const int64_t shift = random() % 2 == 0 ? 0 : random() % 4096;
      const auto offset = static_cast<int64_t>(random() % 50000);
      const Extent extent{file, offset, memory.data() + shift, 1 + static_cast<int64_t>(random() % 90000)};
      for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
        for (const Piece& piece : pieces(extent, direction, round % 2 == 0 ? 4096 : 8192)) {
          const bool aligned = piece.offset % 4096 == 0 && piece.size % 4096 == 0 &&
                               reinterpret_cast<uintptr_t>(piece.data) % 4096 == 0;
          const auto expected = !file->direct()                 ? Piece::Way::kBuffered
                                : aligned                       ? Piece::Way::kDirect
                                : direction == Direction::kRead ? Piece::Way::kWindow
                                                                : Piece::Way::kBuffered;
          if (file->alignment() == 4096) CHECK(piece.way == expected);
        }
      }
    }
  }
}

int main() { return run_all(); }
