// SPDX-License-Identifier: Apache-2.0
// The reference: one element at a time, any CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/variants.h"
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
