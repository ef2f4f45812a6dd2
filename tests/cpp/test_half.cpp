// SPDX-License-Identifier: Apache-2.0
// The 16-bit formats against their definition in double arithmetic.
#include "kernels/half.h"

#include <cmath>
#include <limits>
#include <random>

#include "check.h"

namespace {

using peftds::kernels::BFloat16;
using peftds::kernels::bits_of;
using peftds::kernels::Float16;
using peftds::kernels::float_of;
using peftds::kernels::widen;

/// The layout of a format: sign, exponent, fraction.
template <class T>
struct Format;
template <>
struct Format<Float16> {
  static constexpr int kFraction = 10;
  static constexpr int kMinExponent = -14;  // of the smallest normal number
  static constexpr int kMaxExponent = 15;
  static Float16 narrow(float x) { return peftds::kernels::to_float16(x); }
};
template <>
struct Format<BFloat16> {
  static constexpr int kFraction = 7;
  static constexpr int kMinExponent = -126;
  static constexpr int kMaxExponent = 127;
  static BFloat16 narrow(float x) { return peftds::kernels::to_bfloat16(x); }
};

/// The value that `bits` stands for, from the definition of the format.
template <class T>
double value_of(uint16_t bits) {
  using F = Format<T>;
  const int fraction = bits & ((1 << F::kFraction) - 1);
  const int exponent = (bits & 0x7fff) >> F::kFraction;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, F::kMinExponent - F::kFraction);
  if (exponent > F::kMaxExponent - F::kMinExponent + 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
  }
  return sign * std::ldexp((1 << F::kFraction) + fraction, exponent - 1 + F::kMinExponent - F::kFraction);
}

/// `x` rounded to the format's nearest value, ties to even, in double arithmetic.
template <class T>
double rounded(float x) {
  using F = Format<T>;
  if (!std::isfinite(x) || x == 0.0f) return x;
  const int exponent = std::max(std::ilogb(x), F::kMinExponent);
  const double spacing = std::ldexp(1.0, exponent - F::kFraction);
  const double nearest = std::nearbyint(x / spacing) * spacing;
  return std::fabs(nearest) >= std::ldexp(1.0, F::kMaxExponent + 1) ? std::copysign(HUGE_VAL, x) : nearest;
}

template <class T>
void check_narrowing(float x) {
  const double got = value_of<T>(Format<T>::narrow(x).bits);
  const double expected = rounded<T>(x);
  CHECK(got == expected && std::signbit(got) == std::signbit(expected), x, " (bits ", bits_of(x), ") became ",
        got, ", not ", expected);
}

/// Widening gives the exact value of all 65536 patterns, and narrowing gives the pattern back.
template <class T>
void check_every_pattern() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const T half{static_cast<uint16_t>(bits)};
    const double expected = value_of<T>(half.bits);
    const float wide = widen(half);
    const uint16_t back = Format<T>::narrow(wide).bits;
    if (std::isnan(expected)) {
      constexpr uint16_t kQuiet = 1 << (Format<T>::kFraction - 1);
      CHECK(std::isnan(wide), "pattern ", bits);
      CHECK(back == (bits | kQuiet), "the NaN ", bits, " came back as ", back);
    } else {
      CHECK(wide == expected && std::signbit(wide) == std::signbit(expected), "pattern ", bits);
      CHECK(back == bits, bits, " came back as ", back);
    }
  }
}

/// Values at, and one fp32 step to either side of, each value of the format and each tie between two.
template <class T>
void check_every_border() {
  constexpr float kUp = std::numeric_limits<float>::infinity();
  for (uint16_t bits = 0; std::isfinite(value_of<T>(bits)); ++bits) {
    const double here = value_of<T>(bits);
    const double after = value_of<T>(bits + 1);
    const double next = std::isfinite(after) ? after : std::ldexp(1.0, Format<T>::kMaxExponent + 1);
    for (const double exact : {here, (here + next) / 2}) {
      const float x = static_cast<float>(exact);
      for (const float y : {std::nextafter(x, -kUp), x, std::nextafter(x, kUp)}) {
        check_narrowing<T>(y);
        check_narrowing<T>(-y);
      }
    }
  }
}

template <class T>
void check_random_patterns() {
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    const float x = float_of(bits);
    if (std::isnan(x)) {
      const uint16_t narrow = Format<T>::narrow(x).bits;
      CHECK(std::isnan(value_of<T>(narrow)), "the NaN ", bits, " became ", narrow);
      CHECK((narrow >> 15) == (bits >> 31), "the NaN ", bits, " lost its sign");
    } else {
      check_narrowing<T>(x);
    }
  }
}

template <class T>
void check_extremes() {
  using Limits = std::numeric_limits<float>;
  for (const float x : {0.0f, Limits::max(), Limits::min(), Limits::denorm_min(), Limits::infinity()}) {
    check_narrowing<T>(x);
    check_narrowing<T>(-x);
  }
  for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    CHECK(std::isnan(value_of<T>(Format<T>::narrow(float_of(nan)).bits)), "the NaN ", nan);
  }
}

}  // namespace

TEST(float16_every_pattern) { check_every_pattern<Float16>(); }
TEST(float16_every_border) { check_every_border<Float16>(); }
TEST(float16_random_patterns) { check_random_patterns<Float16>(); }
TEST(float16_extremes) { check_extremes<Float16>(); }

// Widening bf16 is a shift, so a signalling NaN would stay one; narrowing makes it quiet.
TEST(bfloat16_every_pattern) { check_every_pattern<BFloat16>(); }
TEST(bfloat16_every_border) { check_every_border<BFloat16>(); }
TEST(bfloat16_random_patterns) { check_random_patterns<BFloat16>(); }
TEST(bfloat16_extremes) { check_extremes<BFloat16>(); }

int main() { return peftds::test::run_all(); }
