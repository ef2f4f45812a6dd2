// SPDX-License-Identifier: Apache-2.0
#include "io/fault_plan.h"

#include <cerrno>
#include <charconv>
#include <utility>

#include "base/error.h"

namespace peftds::io {
namespace {

template <class Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// Splits at the first `mark`; without one the second part is empty.
std::pair<std::string_view, std::string_view> cut(std::string_view text, char mark) {
  const size_t at = text.find(mark);
  if (at == std::string_view::npos) return {text, {}};
  return {text.substr(0, at), text.substr(at + 1)};
}

std::optional<Fault> fault_named(std::string_view text) {
  const auto [name, argument] = cut(text, '=');
  if (name == "delay") {
    const auto milliseconds = number<int>(argument);
    if (!milliseconds || *milliseconds < 0) return std::nullopt;
    return Fault{Fault::Kind::kDelay, *milliseconds};
  }
  if (name != text) return std::nullopt;  // the others have no argument, nor an empty one
  if (name == "short") return Fault{Fault::Kind::kShort, 0};
  if (name == "end") return Fault{Fault::Kind::kEnd, 0};
  if (name == "eio") return Fault{Fault::Kind::kErrno, EIO};
  if (name == "enospc") return Fault{Fault::Kind::kErrno, ENOSPC};
  if (name == "eintr") return Fault{Fault::Kind::kErrno, EINTR};
  if (name == "reorder") return Fault{Fault::Kind::kReorder, 0};
  return std::nullopt;
}

}  // namespace

FaultPlan::Rule FaultPlan::parse_rule(std::string_view text) {
  const auto [what, when] = cut(text, '@');
  const auto [operation, fault_text] = cut(what, ':');
  Rule rule;
  rule.reads = operation == "read" || operation == "any";
  rule.writes = operation == "write" || operation == "any";
  const auto fault = fault_named(fault_text);
  bool understood = (rule.reads || rule.writes) && fault && !when.empty();
  if (understood && when.front() == 'p') {
    const auto probability = number<double>(when.substr(1));
    understood = probability && *probability >= 0.0 && *probability <= 1.0;
    rule.probability = probability.value_or(0.0);
  } else if (understood) {
    rule.and_later = when.back() == '+';
    const auto first = number<int64_t>(when.substr(0, when.size() - (rule.and_later ? 1 : 0)));
    understood = first && *first > 0;
    rule.first = first.value_or(0);
  }
  PEFTDS_CHECK(
      understood, kConfig, "PEFTDS_IO_FAULTS: '", text,
      "' is not OPERATION:FAULT@WHEN with OPERATION read, write or any; FAULT short, end, eio, enospc, "
      "eintr, delay=MILLISECONDS or reorder; WHEN N, N+ or pPROBABILITY");
  rule.fault = *fault;
  return rule;
}

FaultPlan FaultPlan::parse(std::string_view text) {
  FaultPlan plan;
  while (!text.empty()) {
    const auto [part, rest] = cut(text, ';');
    text = rest;
    if (part.empty()) continue;
    if (part.starts_with("seed=")) {
      const auto seed = number<uint64_t>(part.substr(5));
      PEFTDS_CHECK(seed, kConfig, "PEFTDS_IO_FAULTS: '", part, "' is not seed=NUMBER");
      plan.random_.seed(*seed);
    } else {
      plan.rules_.push_back(parse_rule(part));
    }
  }
  return plan;
}

std::optional<Fault> FaultPlan::next(Direction direction) {
  std::optional<Fault> chosen;
  for (Rule& rule : rules_) {
    if (!(direction == Direction::kRead ? rule.reads : rule.writes)) continue;
    const int64_t position = ++rule.seen;
    const bool applies = rule.first == 0
                             ? std::uniform_real_distribution<>(0.0, 1.0)(random_) < rule.probability
                             : position == rule.first || (rule.and_later && position > rule.first);
    if (applies && !chosen) chosen = rule.fault;
  }
  return chosen;
}

}  // namespace peftds::io
