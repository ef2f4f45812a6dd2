// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "arrays.h"
#include "check.h"
#include "kernels/cpu/variants.h"

namespace {

using namespace peftds::kernels;
using peftds::test::Array;
using peftds::test::kDTypes;
using peftds::test::name_of;

long double exact_sum(Array& array) {
  long double sum = 0;
  for (int64_t i = 0; i < array.count(); ++i) sum += static_cast<long double>(array.get(i)) * array.get(i);
  return sum;
}

double norm(Array& array, int threads = 1) {
  return cpu::squared_norm(array.data(), array.dtype(), array.count(), threads);
}

}  // namespace

TEST(nothing_sums_to_zero) {
  for (const DType dtype : kDTypes) {
    Array empty(dtype, 0);
    CHECK(norm(empty) == 0.0);
  }
}

TEST(small_integers_sum_exactly_at_any_size_and_offset) {
  for (const DType dtype : kDTypes) {
    for (const int64_t count : {1, 7, 15, 16, 17, 31, 33, 1000, 40000, 70001}) {
      for (const int64_t offset : {0, 1, 3}) {
        Array array(dtype, count, offset);
        double expected = 0;
        for (int64_t i = 0; i < count; ++i) {
          const int value = static_cast<int>(i % 7) - 3;
          array.set(i, static_cast<float>(value));
          expected += value * value;
        }
        CHECK(norm(array) == expected, name_of(dtype), ", ", count, " elements at offset ", offset);
      }
    }
  }
}

TEST(the_sum_is_exact_to_fp64_rounding) {
  for (const DType dtype : kDTypes) {
    Array array(dtype, 100003);
    array.fill(1, -6, 4);
    const double expected = static_cast<double>(exact_sum(array));
    CHECK(std::fabs(norm(array) - expected) <= 1e-13 * expected, name_of(dtype));
  }
}

TEST(variants_agree_bit_by_bit) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType dtype : kDTypes) {
      for (const int64_t count : {0, 1, 15, 16, 17, 1000, 32768}) {
        for (const int64_t begin : {0, 1}) {
          Array array(dtype, begin + count, 1);
          array.fill(1, -6, 4);
          const double expected = cpu::kScalarVariant.squared_norm(array.data(), dtype, begin, array.count());
          const double got = cpu::variant(isa).squared_norm(array.data(), dtype, begin, array.count());
          CHECK(got == expected, to_string(isa), ", ", name_of(dtype), ", ", count, " elements");
        }
      }
    }
  }
}

TEST(the_number_of_threads_does_not_change_a_bit) {
  Array array(DType::kBFloat16, 5 * cpu::kBlock + 3);
  array.fill(1, -6, 4);
  for (const int threads : {2, 3, 8}) CHECK(norm(array, threads) == norm(array, 1), threads, " threads");
}

TEST(finite_elements_cannot_overflow) {
  for (const DType dtype : kDTypes) {
    Array array(dtype, 100000);
    const float largest = dtype == DType::kFloat16 ? 65504.0f : 3.38e38f;
    for (int64_t i = 0; i < array.count(); ++i) array.set(i, i % 2 == 0 ? largest : -largest);
    CHECK(std::isfinite(norm(array)) && norm(array) > 0, name_of(dtype));
  }
}

TEST(one_element_that_is_not_finite_shows_wherever_it_stands) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType dtype : kDTypes) {
      for (const float bad : {inf, -inf, nan, -nan}) {
        for (int64_t place = 0; place < 50; ++place) {
          Array array(dtype, 50);
          array.fill(1, -6, 4);
          array.set(place, bad);
          CHECK(!std::isfinite(cpu::variant(isa).squared_norm(array.data(), dtype, 0, 50)), to_string(isa),
                ", ", name_of(dtype), ", place ", place);
        }
      }
    }
  }
}

TEST(subnormal_elements_count) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    Array array(DType::kFloat32, 3);
    array.set(1, std::numeric_limits<float>::denorm_min());
    CHECK(cpu::variant(isa).squared_norm(array.data(), array.dtype(), 0, 3) == std::ldexp(1.0, -298));
  }
}

int main() { return peftds::test::run_all(); }
