// SPDX-License-Identifier: Apache-2.0
// What the storage tests share: folders that vanish, guarded memory, plain pread and pwrite to compare
// with, and the ways of moving bytes that this machine allows.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "io/engine.h"

namespace peftds::test {

using Bytes = std::vector<std::byte>;
using FilePointer = std::shared_ptr<const io::File>;

inline std::string disk_root() {
  const char* chosen = std::getenv("TMPDIR");
  return chosen != nullptr && *chosen != '\0' ? chosen : "/tmp";
}

/// The folder of a tmpfs, or nothing where there is none to write to.
inline std::string memory_root() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : ""; }

/// A new folder below `root`, removed with all its content.
class Folder {
 public:
  explicit Folder(const std::string& root = disk_root()) : path_(root + "/peftds-io-XXXXXX") {
    CHECK(mkdtemp(path_.data()) != nullptr, "no folder below ", root, ": ", std::strerror(errno));
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Memory of `size` bytes, `shift` bytes past a page, between guards. Reading it back checks the guards.
class Guarded {
 public:
  Guarded(size_t size, size_t shift, std::byte fill = std::byte{0})
      : size_(size), start_(kPage + shift % kPage), all_(allocate(start_ + size + kGuard), &std::free) {
    std::memset(all_.get(), kMark, start_ + size_ + kGuard);
    std::fill_n(data(), size_, fill);
  }
  explicit Guarded(const Bytes& content, size_t shift = 0) : Guarded(content.size(), shift) {
    std::copy(content.begin(), content.end(), data());
  }
  [[nodiscard]] std::byte* data() const { return all_.get() + start_; }
  [[nodiscard]] size_t size() const { return size_; }

  [[nodiscard]] Bytes bytes() const {
    const auto intact = [](std::byte byte) { return byte == std::byte{kMark}; };
    CHECK(std::all_of(all_.get(), data(), intact), "bytes before the memory were changed");
    CHECK(std::all_of(data() + size_, data() + size_ + kGuard, intact),
          "bytes behind the memory were changed");
    return {data(), data() + size_};
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kGuard = 4096;
  static constexpr uint8_t kMark = 0xa5;
  static std::byte* allocate(size_t size) {
    return static_cast<std::byte*>(std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage));
  }

  size_t size_;
  size_t start_;
  std::unique_ptr<std::byte, decltype(&std::free)> all_;
};

inline Bytes random_bytes(size_t size, uint32_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(size);
  for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof(word), size - at));
  }
  return bytes;
}

/// All of a file, read with pread.
inline Bytes content(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK(descriptor >= 0, path, ": ", std::strerror(errno));
  struct stat facts{};
  const bool known = fstat(descriptor, &facts) == 0;
  Bytes bytes(known ? static_cast<size_t>(facts.st_size) : 0);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t moved =
        pread(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (moved <= 0) break;
    done += static_cast<size_t>(moved);
  }
  close(descriptor);
  CHECK(known && done == bytes.size(), "could not read ", path);
  return bytes;
}

/// Makes a file with pwrite, or replaces its first bytes.
inline void put(const std::string& path, const Bytes& bytes) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  CHECK(descriptor >= 0, path, ": ", std::strerror(errno));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t moved =
        pwrite(descriptor, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (moved <= 0) break;
    done += static_cast<size_t>(moved);
  }
  close(descriptor);
  CHECK(done == bytes.size(), "could not write ", path);
}

inline FilePointer file_with(const std::string& path, const Bytes& bytes,
                             io::Direct direct = io::Direct::kAuto) {
  put(path, bytes);
  return std::make_shared<const io::File>(path, io::Access::kUpdate, direct);
}

/// The methods that can be used here: threads always, io_uring where it is built in and allowed.
inline const std::vector<io::Method>& methods() {
  static const std::vector<io::Method> all = [] {
    std::vector<io::Method> found{io::Method::kThreads};
    io::Settings settings;
    settings.method = io::Method::kUring;
    try {
      const io::Engine probe(settings);
      found.push_back(io::Method::kUring);
    } catch (const Error& error) {
      std::printf("note    io_uring is not tested: %s\n", error.what());
    }
    return found;
  }();
  return all;
}

inline const char* name(io::Method method) { return method == io::Method::kUring ? "io_uring" : "threads"; }
inline const char* name(io::Direct direct) { return direct == io::Direct::kAuto ? "direct" : "buffered"; }

inline io::Settings settings_of(io::Method method, int depth, int64_t block_bytes, std::string faults = "") {
  io::Settings settings;
  settings.method = method;
  settings.queue_depth = depth;
  settings.block_bytes = block_bytes;
  settings.faults = std::move(faults);
  return settings;
}

/// One extent of all of `memory`.
inline io::Extent extent(const FilePointer& file, int64_t offset, const Guarded& memory) {
  return {file, offset, memory.data(), static_cast<int64_t>(memory.size())};
}

inline void write(io::Engine& engine, std::vector<io::Extent> extents) {
  engine.submit(io::Direction::kWrite, std::move(extents)).wait();
}
inline void read(io::Engine& engine, std::vector<io::Extent> extents) {
  engine.submit(io::Direction::kRead, std::move(extents)).wait();
}

/// What `call` throws, which must be a FileError.
template <class Call>
FileError file_error_of(Call call) {
  try {
    call();
  } catch (const FileError& error) {
    return error;
  }
  throw std::runtime_error("no FileError was thrown");
}

inline bool says(const std::exception& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

/// This process's threads; those that the kernel makes for io_uring do not count.
inline int thread_count() {
  int count = 0;
  std::error_code ignored;  // a thread may end while its folder is looked at
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::string command;
    std::getline(std::ifstream(entry.path() / "comm"), command);
    if (!command.empty() && !command.starts_with("iou-")) ++count;
  }
  return count;
}

/// Waits until there are `expected` threads: a joined one is listed for a moment longer.
inline void check_thread_count(int expected) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (thread_count() != expected) {
    CHECK(std::chrono::steady_clock::now() < deadline, thread_count(), " threads, not ", expected);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace peftds::test
