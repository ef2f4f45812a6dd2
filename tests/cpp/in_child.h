// SPDX-License-Identifier: Apache-2.0
// Runs code in a child process made by fork().
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "check.h"

namespace peftds::test {

/// Forks, runs `body` in the child, waits, and returns true if `body` returned without an exception.
/// A child that hangs is killed after a minute.
template <class Body>
bool succeeds_in_child(Body body) {
  std::fflush(stdout);
  const pid_t child = fork();
  CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(60);
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
      status = 1;
    }
    _exit(status);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace peftds::test
