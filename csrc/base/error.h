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
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
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
