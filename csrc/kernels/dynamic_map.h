// SPDX-License-Identifier: Apache-2.0
// The dynamic map of 8-bit optimizer states, as arithmetic instead of a table of 256 values.
//
// Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), and the
// layout of bitsandbytes: codes ascend with their values. [0, 1] is cut into the decades
// [10^(i-7), 10^(i-6)), i = 0..6, and decade i into n equal cells, whose middles are the values:
//   signed    n = 2^i      code 127 + s * k has the sign s and the value of cell k = n + j, j < n
//   unsigned  n = 2^(i+1)  code k = n + j - 1
// Zero has a code of its own (k = 0), and so has 1 (the last code, 255). -1 has none.
//
// Within a decade the value is linear in k, both ways. To decode, q = k + 1/2 (signed) or k + 1 (unsigned)
// has an exponent that tells the decade. To encode, k as a real number is a continuous function of x, made of
// these lines, a line to 0, and one to 1. Rounding k up or down by chance has the exact expectation except
// between the last value of a decade and the first one of the next, where two lines meet and it is higher.
#pragma once

#include <cstdint>
#include <limits>

namespace peftds::kernels {

/// Eight entries, twice: for vectors of eight lanes and of sixteen.
struct Table {
  alignas(64) float entries[16];

  constexpr void set(int entry, double value) {
    entries[entry] = entries[entry + 8] = static_cast<float>(value);
  }
};

struct DynamicMap {
  // value = q * step + start; their index is the exponent of q, modulo 8
  Table step;
  Table start;
  // k = x * slope + intercept, in units of 2^-16; their index is the decade, and 7 is the gap below 1
  Table slope;
  Table intercept;
  Table end;            // where each decade ends
  float slope_to_zero;  // below the first value
  float last;           // k of the value 1, in units of 2^-16
};

/// k is computed in these units, so that it can be rounded with integers.
inline constexpr float kCodeUnit = 65536.0f;

constexpr DynamicMap make_dynamic_map(bool is_signed) {
  constexpr double kEnds[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  const auto cells = [&](int decade) { return static_cast<double>((is_signed ? 1 : 2) << decade); };
  const double last_code = is_signed ? 128.0 : 255.0;
  DynamicMap map{};
  for (int i = 0; i < 7; ++i) {
    const double n = cells(i);
    const double first_value = kEnds[i] * (0.1 + 0.9 * 0.5 / n);
    const double first_q = is_signed ? n + 0.5 : n;
    const int entry = is_signed ? (i + 7) % 8 : i;
    map.step.set(entry, kEnds[i] * 0.9 / n);
    // Follows the rounded step, whose error would count ninefold in the decade's first values.
    map.start.set(entry, first_value - static_cast<double>(map.step.entries[entry]) * first_q);
    map.slope.set(i, kCodeUnit * (n / (kEnds[i] * 0.9)));
    map.intercept.set(i, kCodeUnit * (n * (0.8 / 0.9) - (is_signed ? 0.5 : 1.5)));
    map.end.set(i, kEnds[i]);
  }
  // 0 and 1 share the entry that is left: the line through both.
  const int ends = is_signed ? 6 : 7;
  map.step.set(ends, 1.0 / last_code);
  map.start.set(ends, (is_signed ? -0.5 : -1.0) * static_cast<double>(map.step.entries[ends]));
  // The last gap is half as wide as a cell.
  map.end.set(6, 0.1 + 0.9 * (1.0 - 0.5 / cells(6)));
  map.end.set(7, std::numeric_limits<double>::infinity());
  map.last = kCodeUnit * static_cast<float>(last_code);
  map.slope.set(7, 2.0 * static_cast<double>(map.slope.entries[6]));
  map.intercept.set(7, static_cast<double>(map.last) - static_cast<double>(map.slope.entries[7]));
  map.slope_to_zero = static_cast<float>(kCodeUnit / (kEnds[0] * (0.1 + 0.9 * 0.5 / cells(0))));
  return map;
}

inline constexpr DynamicMap kSignedMap = make_dynamic_map(true);
inline constexpr DynamicMap kUnsignedMap = make_dynamic_map(false);

}  // namespace peftds::kernels
