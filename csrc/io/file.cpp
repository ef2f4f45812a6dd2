// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace peftds::io {
namespace {

/// Repeats a system call that a signal interrupted.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

int open_flags(Access access) {
  switch (access) {
    case Access::kRead: return O_RDONLY | O_CLOEXEC;
    case Access::kCreate: return O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
    case Access::kUpdate: return O_RDWR | O_CLOEXEC;
  }
  return O_RDONLY | O_CLOEXEC;
}

const char* purpose(Access access) {
  switch (access) {
    case Access::kRead: return "open for reading";
    case Access::kCreate: return "creation";
    case Access::kUpdate: return "open for reading and writing";
  }
  return "open";
}

/// What the file system says that direct transfers must be aligned to: 0 if it has none, -1 if it
/// does not say.
int64_t stated_alignment([[maybe_unused]] int descriptor) {
#ifdef STATX_DIOALIGN
  struct statx facts{};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &facts) == 0 &&
      (facts.stx_mask & STATX_DIOALIGN) != 0)
    return std::max<int64_t>(facts.stx_dio_offset_align, facts.stx_dio_mem_align);
#endif
  return -1;
}

struct stat facts_of(int descriptor, const std::string& path) {
  struct stat facts{};
  if (fstat(descriptor, &facts) != 0) throw_file_error("size", path, errno);
  return facts;
}

int64_t changed_at(const struct stat& facts) {
  return int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec;
}

/// -1 if the file system does not say.
int64_t free_bytes(int descriptor) {
  struct statvfs facts{};
  if (fstatvfs(descriptor, &facts) != 0 || facts.f_blocks == 0) return -1;
  return static_cast<int64_t>(facts.f_bavail) * static_cast<int64_t>(facts.f_frsize);
}

/// Returns an errno. The space is taken before the file grows: a failure half-way leaves its size alone.
int reserve(int descriptor, int64_t offset, int64_t size) {
  const auto take = [&](int mode) {
    return uninterrupted([&] { return fallocate(descriptor, mode, offset, size); }) == 0 ? 0 : errno;
  };
  const int number = take(FALLOC_FL_KEEP_SIZE);
  return number == 0 || number == EOPNOTSUPP ? take(0) : number;
}

std::string remedy(int number) {
  switch (number) {
    case ENOSPC: return "; free space on the disk or choose another folder";
    case EDQUOT: return "; raise the quota or choose another folder";
    case EROFS: return "; choose a folder on a writable file system";
    case EACCES:
    case EPERM: return "; choose a folder that this user may use";
    case ENOENT: return "; check that the folder exists and its disk is mounted";
    case EEXIST: return "; another process made it: choose another folder";
    case EFBIG: return "; raise the limit on the size of files (ulimit -f)";
    case EAGAIN:
    case ENOMEM: return "; the system is out of memory or threads: see ulimit -v and ulimit -u";
    case EMFILE:
    case ENFILE: return "; raise the limit of open files (ulimit -n)";
    case EIO: return "; the disk reports a fault: see the kernel's log (dmesg) and do not trust this disk";
    case ESTALE: return "; the network file system lost the file: mount it again";
    default: return "";
  }
}

}  // namespace

void throw_file_error(const std::string& what, const std::string& path, int number) {
  const bool full = number == ENOSPC || number == EDQUOT;
  throw FileError(full ? ErrorCode::kStorageFull : ErrorCode::kStorage,
                  detail::concat(what, " failed: ", std::strerror(number), remedy(number)), path, number);
}

File::File(std::string path, Access access, Direct direct) : path_(std::move(path)) {
  buffered_ = uninterrupted([&] { return open(path_.c_str(), open_flags(access), 0600); });
  if (buffered_ < 0) throw_file_error(purpose(access), path_, errno);
  struct stat facts{};
  const int number = fstat(buffered_, &facts) != 0 ? errno : S_ISDIR(facts.st_mode) ? EISDIR : 0;
  if (number != 0) {  // open() refuses folders for writing only
    close(buffered_);
    throw_file_error(purpose(access), path_, number);
  }
  size_at_open_ = facts.st_size;
  changed_at_open_ = changed_at(facts);
  if (direct == Direct::kOff) {
    refusal_ = "direct I/O is switched off";
    return;
  }
  const int flags = (open_flags(access) & ~(O_CREAT | O_EXCL)) | O_DIRECT;
  direct_ = uninterrupted([&] { return open(path_.c_str(), flags, 0600); });
  if (direct_ < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {  // not the file system's word
    const int refused = errno;
    close(buffered_);
    throw_file_error(purpose(access), path_, refused);
  }
  if (direct_ < 0) {
    refusal_ = detail::concat("the file system refuses direct I/O (", std::strerror(errno), ")");
    return;
  }
  const int64_t stated = stated_alignment(direct_);
  if (stated == 0) refusal_ = "the file system has no direct I/O for this file";
  alignment_ = std::max(alignment_, stated);  // a page suits every device, and is what buffers have
  direct_usable_.store(stated != 0, std::memory_order_relaxed);
}

File::~File() {
  if (direct_ >= 0) close(direct_);
  if (buffered_ >= 0) close(buffered_);
}

std::string File::why_buffered() const {
  if (direct()) return "";
  return refusal_.empty() ? "the file system refused a direct transfer" : refusal_;
}

int64_t File::size() const { return facts_of(buffered_, path_).st_size; }

void File::check_unchanged() const {
  const struct stat facts = facts_of(buffered_, path_);
  if (facts.st_size == size_at_open_ && changed_at(facts) == changed_at_open_) return;
  const std::string what = facts.st_size != size_at_open_
                               ? detail::concat("it has ", facts.st_size, " bytes and had ", size_at_open_)
                               : std::string("the time of its last change is another one");
  throw FileError(
      ErrorCode::kCorruptData,
      "the file was changed while it was in use: " + what + "; restore it and start the run again", path_, 0);
}

void File::preallocate(int64_t offset, int64_t size) const {
  const int64_t before = this->size();
  const int64_t growth = std::max<int64_t>(0, offset + size - before);
  const int64_t available = free_bytes(buffered_);
  // Compared first, since the system may take all that is left before it finds that it is not enough.
  int number = available >= 0 && growth > available ? ENOSPC : reserve(buffered_, offset, size);
  if (number == EOPNOTSUPP || number == ENOSYS) {
    const bool grown = growth == 0 || uninterrupted([&] { return ftruncate(buffered_, offset + size); }) == 0;
    number = grown ? 0 : errno;
  }
  if (number == 0) return;
  throw_file_error(
      detail::concat("reserving ", size, " bytes at offset ", offset, " (", available, " bytes are free)"),
      path_, number);
}

}  // namespace peftds::io
