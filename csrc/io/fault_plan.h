// SPDX-License-Identifier: Apache-2.0
// Which transfers are to go wrong, and how: the storage engine's faults on demand.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <string_view>
#include <vector>

#include "io/transport.h"

namespace peftds::io {

struct Fault {
  enum class Kind {
    kShort,    // fewer bytes than asked for are transferred
    kEnd,      // nothing is transferred, as at the end of a file
    kErrno,    // the transfer fails with `value`
    kDelay,    // the completion comes `value` milliseconds late
    kReorder,  // the completion comes after those of later blocks
  };
  Kind kind = Kind::kShort;
  int value = 0;
};

/// Rules and a count of the transfers seen so far. Not thread-safe.
///
/// Text: rules separated by ';', each "OPERATION:FAULT@WHEN", and optionally "seed=N".
///   OPERATION  read, write or any
///   FAULT      short, end, eio, enospc, eintr, delay=MILLISECONDS, reorder
///   WHEN       N (the Nth transfer of that operation, from 1), N+ (that one and all later ones),
///              pX (each with probability X)
/// Example: "read:eio@3;write:short@p0.1;any:delay=2@p0.5;seed=7".
class FaultPlan {
 public:
  /// Throws kConfig, naming the part that is not understood.
  [[nodiscard]] static FaultPlan parse(std::string_view text);

  /// Counts one transfer and returns what is to happen to it: the first rule that applies.
  [[nodiscard]] std::optional<Fault> next(Direction direction);

 private:
  struct Rule {
    bool reads = false;
    bool writes = false;
    Fault fault;
    int64_t first = 0;  // 0: by probability
    bool and_later = false;
    double probability = 0.0;
    int64_t seen = 0;
  };
  static Rule parse_rule(std::string_view text);

  std::vector<Rule> rules_;
  std::mt19937_64 random_{0};
};

/// A transport over another one that makes transfers go wrong as planned. `make_inner` builds the
/// other one.
[[nodiscard]] std::unique_ptr<Transport> make_faulty_transport(
    FaultPlan plan, const std::function<std::unique_ptr<Transport>(Deliver)>& make_inner, Deliver deliver);

}  // namespace peftds::io
