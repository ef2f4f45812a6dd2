// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"
#include "check.h"
#include "kernels/cpu/variants.h"

namespace {

using namespace peftds::kernels;
using peftds::test::Array;
using peftds::test::kDTypes;
using peftds::test::name_of;

/// Calls `body` with every pair of types and with copying and adding.
template <class Body>
void for_each_case(Body body) {
  for (const DType grad : kDTypes) {
    for (const DType buffer : kDTypes) {
      for (const bool add : {false, true}) body(grad, buffer, add);
    }
  }
}

Array filled(DType dtype, int64_t count, uint32_t seed, int64_t offset = 0) {
  Array array(dtype, count, offset);
  array.fill(seed, -4, 2);
  return array;
}

double norm(Array& array) { return cpu::squared_norm(array.data(), array.dtype(), array.count(), 1); }

double run(Array& grad, Array& buffer, bool add, int threads) {
  return cpu::accumulate(grad.data(), grad.dtype(), buffer.data(), buffer.dtype(), add, grad.count(),
                         threads);
}

}  // namespace

TEST(each_element_is_copied_or_added_with_one_rounding_and_the_norm_is_that_of_the_result) {
  for_each_case([](DType grad_dtype, DType buffer_dtype, bool add) {
    for (const int64_t count : {0, 1, 15, 16, 17, 1000, 1023, 1024, 1025, 2500}) {
      for (const int64_t offset : {0, 1}) {
        Array grad = filled(grad_dtype, count, 1, offset);
        Array buffer = filled(buffer_dtype, count, 2, offset);
        Array expected = buffer;
        for (int64_t i = 0; i < count; ++i) expected.set(i, add ? buffer.get(i) + grad.get(i) : grad.get(i));
        const double got = run(grad, buffer, add, 1);
        CHECK(buffer == expected, name_of(grad_dtype), " to ", name_of(buffer_dtype), ", add ", add, ", ",
              count, " elements");
        CHECK(got == norm(buffer), got, " is not ", norm(buffer));
      }
    }
  });
}

TEST(variants_agree_bit_by_bit_and_write_nothing_else) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for_each_case([isa](DType grad_dtype, DType buffer_dtype, bool add) {
      for (const int64_t begin : {0, 1, 5}) {
        constexpr int64_t kEnd = 1500;
        Array grad = filled(grad_dtype, kEnd + 4, 1);
        Array buffer = filled(buffer_dtype, kEnd + 4, 2);
        Array expected = buffer;
        const double right = cpu::kScalarVariant.accumulate(grad.data(), grad_dtype, expected.data(),
                                                            buffer_dtype, add, begin, kEnd);
        const double got = cpu::variant(isa).accumulate(grad.data(), grad_dtype, buffer.data(), buffer_dtype,
                                                        add, begin, kEnd);
        CHECK(buffer == expected && got == right, to_string(isa), ", ", name_of(grad_dtype), " to ",
              name_of(buffer_dtype), ", add ", add, ", from ", begin);
        for (const int64_t i : {begin - 1, kEnd}) {
          if (i >= 0) CHECK(buffer.get(i) == filled(buffer_dtype, kEnd + 4, 2).get(i), "element ", i);
        }
      }
    });
  }
}

TEST(the_number_of_threads_does_not_change_a_bit) {
  const int64_t count = 3 * cpu::kBlock + 17;
  Array grad = filled(DType::kBFloat16, count, 1);
  Array expected = filled(DType::kFloat32, count, 2);
  const double right = run(grad, expected, true, 1);
  CHECK(right == norm(expected));
  for (const int threads : {2, 3, 8}) {
    Array buffer = filled(DType::kFloat32, count, 2);
    CHECK(run(grad, buffer, true, threads) == right && buffer == expected, threads, " threads");
  }
}

TEST(what_is_not_finite_shows_in_the_norm) {
  for_each_case([](DType grad_dtype, DType buffer_dtype, bool add) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      Array grad = filled(grad_dtype, 40, 1);
      Array buffer = filled(buffer_dtype, 40, 2);
      grad.set(33, bad);
      CHECK(!std::isfinite(run(grad, buffer, add, 1)), name_of(grad_dtype), " to ", name_of(buffer_dtype));
    }
  });
}

int main() { return peftds::test::run_all(); }
