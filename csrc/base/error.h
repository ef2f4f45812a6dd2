// SPDX-License-Identifier: Apache-2.0
// The one exception of the native code, and the macro that raises it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace peftds {

/// What went wrong; the Python side maps each code to one exception class.
enum class ErrorCode {
  kInvalidArgument,  // a caller broke a documented precondition
  kConfig,           // an environment variable or setting is not valid here
  kCuda,             // a CUDA runtime call failed
  kOutOfMemory,      // the system has no memory left to give
  kStorage,          // the system refused an operation on a file
  kStorageFull,      // there is no room for what is to be written
  kCorruptData,      // a file is shorter, or other, than it should be
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

/// An operation on a file failed.
class FileError : public Error {
 public:
  /// `what` says what was tried and the remedy, without the path; `number` is the errno, or 0.
  FileError(ErrorCode code, const std::string& what, const std::string& path, int number)
      : Error(code, what + ": '" + path + "'"), description_(what), path_(path), number_(number) {}
  [[nodiscard]] const std::string& description() const noexcept { return description_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  std::string description_;
  std::string path_;
  int number_;
};

namespace detail {
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}
}  // namespace detail

}  // namespace peftds

/// Throws Error(code) with the remaining arguments joined as its message, unless `condition` holds.
/// The message is built on failure only.
#define PEFTDS_CHECK(condition, code, ...)                                                     \
  do {                                                                                         \
    if (!(condition)) [[unlikely]]                                                             \
      throw ::peftds::Error(::peftds::ErrorCode::code, ::peftds::detail::concat(__VA_ARGS__)); \
  } while (false)
