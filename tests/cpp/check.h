// SPDX-License-Identifier: Apache-2.0
// The tests' few tools: TEST defines and registers a test, CHECK fails it, run_all is main's work.
#pragma once

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"

namespace peftds::test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

/// Runs every test of this program; returns main's exit status.
inline int run_all() {
  int failed = 0;
  for (const Case& test : cases()) {
    try {
      test.run();
      std::printf("ok      %s\n", test.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED  %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d of %zu tests failed\n", failed, cases().size());
  return failed == 0 && !cases().empty() ? 0 : 1;
}

}  // namespace peftds::test

#define TEST(name)                                                    \
  static void name();                                                 \
  static const ::peftds::test::Register register_##name(#name, name); \
  static void name()

/// Ends the test as failed unless `condition` holds; further arguments are joined to the message.
#define CHECK(condition, ...)                                                                            \
  do {                                                                                                   \
    if (!(condition))                                                                                    \
      throw std::runtime_error(::peftds::detail::concat(__FILE__, ":", __LINE__, ": ", #condition,       \
                                                        " does not hold. " __VA_OPT__(, ) __VA_ARGS__)); \
  } while (false)

/// Ends the test as failed unless `expression` throws peftds::Error with ErrorCode `expected`.
#define CHECK_THROWS(expression, expected)                                             \
  do {                                                                                 \
    bool thrown = false;                                                               \
    try {                                                                              \
      static_cast<void>(expression);                                                   \
    } catch (const ::peftds::Error& error) {                                           \
      thrown = true;                                                                   \
      CHECK(error.code() == ::peftds::ErrorCode::expected, "message: ", error.what()); \
    }                                                                                  \
    CHECK(thrown, #expression, " did not throw");                                      \
  } while (false)
