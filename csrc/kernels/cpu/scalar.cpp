// SPDX-License-Identifier: Apache-2.0
// The reference: one element at a time, any CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/cpu/variants.h"
#include "kernels/dynamic_map.h"
#include "kernels/half.h"
#include "kernels/macros.h"

namespace peftds::kernels::cpu {
namespace scalar {
namespace {

struct Vec {
  using Value = float;
  static constexpr int64_t kWidth = 1;

  static float load(const float* p) { return *p; }
  static float load(const BFloat16* p) { return widen(*p); }
  static float load(const Float16* p) { return widen(*p); }
  static void store(float* p, float x) { *p = x; }
  static void store(BFloat16* p, float x) { *p = to_bfloat16(x); }
  static void store(Float16* p, float x) { *p = to_float16(x); }

  template <class T>
  static void stream(T* p, float x) {
    store(p, x);
  }
  static void fence() {}

  static float set1(float x) { return x; }
  static float add(float a, float b) { return a + b; }
  static float mul(float a, float b) { return a * b; }
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float sqrt(float a) { return std::sqrt(a); }
  static float div(float a, float b) { return a / b; }

  // ---- patterns of 32 bits: signed integers, modulo 2^32 ----

  using Bits = uint32_t;

  static uint32_t bits(float x) { return bits_of(x); }
  static float value(uint32_t x) { return float_of(x); }
  static uint32_t set1_bits(uint32_t x) { return x; }
  static uint32_t lane_numbers() { return 0; }
  static uint32_t load_bits(const uint8_t* p) { return *p; }
  static uint32_t load_bits(const uint16_t* p) { return *p; }
  static uint32_t load_bits(const int16_t* p) { return static_cast<uint32_t>(*p); }
  template <class T>
  static void store_bits(T* p, uint32_t x) {
    *p = static_cast<T>(x);
  }

  static uint32_t add(uint32_t a, uint32_t b) { return a + b; }
  static uint32_t sub(uint32_t a, uint32_t b) { return a - b; }
  static uint32_t mul(uint32_t a, uint32_t b) { return a * b; }
  static uint32_t min(uint32_t a, uint32_t b) {
    return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b;
  }
  static uint32_t max(uint32_t a, uint32_t b) {
    return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
  }
  static uint32_t bit_and(uint32_t a, uint32_t b) { return a & b; }
  static uint32_t bit_or(uint32_t a, uint32_t b) { return a | b; }
  static uint32_t bit_xor(uint32_t a, uint32_t b) { return a ^ b; }
  static uint32_t sign_mask(uint32_t x) { return 0u - (x >> 31); }
  template <int kBits>
  static uint32_t shift_left(uint32_t x) {
    return x << kBits;
  }
  template <int kBits>
  static uint32_t shift_right(uint32_t x) {
    return x >> kBits;
  }
  static uint32_t high_half_of_product(uint32_t x, uint16_t factor) { return x * factor >> 16; }

  static float to_float(uint32_t x) { return static_cast<float>(static_cast<int32_t>(x)); }
  static uint32_t truncate(float x) { return static_cast<uint32_t>(static_cast<int32_t>(x)); }
  static float min(float a, float b) { return a < b ? a : b; }
  static float max(float a, float b) { return a > b ? a : b; }
  static uint32_t if_nan(float x, uint32_t yes, uint32_t no) { return x != x ? yes : no; }
  static uint32_t add_one_if_reached(uint32_t number, float x, float border) {
    return number + (x >= border ? 1 : 0);
  }
  static float lookup(const Table& table, uint32_t index) { return table.entries[index & 7]; }

  struct SquareSum {
    double lanes[16] = {};

    template <class T>
    void add16(const T* p) {
      for (int lane = 0; lane < 16; ++lane) {
        const double x = load(p + lane);
        lanes[lane] += x * x;  // the product is exact in fp64
      }
    }
    [[nodiscard]] double total() const {
      double sum = 0.0;
      for (const double lane : lanes) sum += lane;
      return sum;
    }
  };
};

#include "kernels/cpu/loops.inl.h"

}  // namespace
}  // namespace scalar

const Variant kScalarVariant = {scalar::adam, scalar::squared_norm, scalar::accumulate, scalar::cast};

}  // namespace peftds::kernels::cpu
