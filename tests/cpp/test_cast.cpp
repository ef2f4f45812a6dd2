// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"
#include "check.h"
#include "kernels/cpu/variants.h"

namespace {

using namespace peftds::kernels;
using peftds::test::Array;
using peftds::test::kDTypes;
using peftds::test::name_of;

/// Elements with every kind of bits: all patterns of a 16-bit type, random ones of fp32.
Array any_bits(DType dtype, int64_t offset = 0) {
  Array array(dtype, 65536 + 5, offset);
  std::mt19937 random(1);
  for (int64_t i = 0; i < array.count(); ++i) {
    if (dtype == DType::kFloat32) {
      const uint32_t bits = static_cast<uint32_t>(random());
      std::memcpy(array.floats() + i, &bits, sizeof bits);
    } else {
      static_cast<uint16_t*>(array.data())[i] = static_cast<uint16_t>(i);
    }
  }
  return array;
}

}  // namespace

TEST(variants_agree_on_every_pattern) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType from : kDTypes) {
      for (const DType to : kDTypes) {
        if (from == to) continue;
        Array input = any_bits(from);
        Array output(to, input.count());
        Array expected(to, input.count());
        cpu::kScalarVariant.cast(input.data(), from, expected.data(), to, 0, input.count());
        cpu::variant(isa).cast(input.data(), from, output.data(), to, 0, input.count());
        CHECK(output == expected, to_string(isa), ", ", name_of(from), " to ", name_of(to));
      }
    }
  }
}

TEST(values_are_converted_at_any_size_and_offset_and_nothing_else_is_written) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType from : kDTypes) {
      for (const DType to : kDTypes) {
        for (const int64_t count : {0, 1, 7, 8, 9, 15, 16, 17, 33}) {
          for (const int64_t begin : {0, 1, 3}) {
            Array input(from, begin + count + 4, 1);
            input.fill(1, -3, 3);
            Array output(to, begin + count + 4, 1);
            Array expected = output;
            for (int64_t i = begin; i < begin + count; ++i) expected.set(i, input.get(i));
            cpu::variant(isa).cast(input.data(), from, output.data(), to, begin, begin + count);
            CHECK(output == expected, to_string(isa), ", ", name_of(from), " to ", name_of(to), ", ", count,
                  " elements from ", begin);
          }
        }
      }
    }
  }
}

TEST(a_cast_to_the_same_type_keeps_every_bit) {
  for (const DType dtype : kDTypes) {
    Array input = any_bits(dtype, 1);
    Array output(dtype, input.count(), 1);
    cpu::cast(input.data(), dtype, output.data(), dtype, input.count(), 2);
    CHECK(output == input, name_of(dtype));
  }
}

TEST(the_number_of_threads_does_not_change_a_bit) {
  Array input = any_bits(DType::kFloat32);
  Array expected(DType::kBFloat16, input.count());
  cpu::cast(input.data(), input.dtype(), expected.data(), expected.dtype(), input.count(), 1);
  for (const int threads : {2, 3, 8}) {
    Array output(DType::kBFloat16, input.count());
    cpu::cast(input.data(), input.dtype(), output.data(), output.dtype(), input.count(), threads);
    CHECK(output == expected, threads, " threads");
  }
}

int main() { return peftds::test::run_all(); }
