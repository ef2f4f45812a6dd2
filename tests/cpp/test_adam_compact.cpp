// SPDX-License-Identifier: Apache-2.0
// The CPU Adam step on compact states: split masters, bf16 and int8 moments.
#include <set>

#include "check.h"
#include "compact_state.h"
#include "kernels/cpu/variants.h"
#include "kernels/dynamic_map.h"

namespace {

using namespace peftds::kernels;
using peftds::test::all_forms;
using peftds::test::CompactState;
using peftds::test::for_each_out;
using peftds::test::Form;
using peftds::test::kDTypes;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

constexpr AdamSettings kAdamW = {.lr = 1e-2,
                                 .beta1 = 0.9,
                                 .beta2 = 0.999,
                                 .eps = 1e-8,
                                 .weight_decay = 0.1,
                                 .grad_scale = 0.5,
                                 .step = 3,
                                 .adamw_mode = true,
                                 .bias_correction = true};

AdamSettings settings_of(const Form& form, AdamSettings settings = kAdamW) {
  settings.stochastic = form.stochastic;
  return settings;
}

/// The moments become the gradient and its square, and the master stays.
AdamSettings forgetful(bool stochastic, int64_t step = 1) {
  AdamSettings settings = kAdamW;
  settings.lr = settings.weight_decay = settings.beta1 = settings.beta2 = 0.0;
  settings.grad_scale = 1.0;
  settings.step = step;
  settings.stochastic = stochastic;
  return settings;
}

/// The value of a code by the definition of the map: the middles of equal cells of each decade.
double value_of(bool is_signed, int code) {
  if (is_signed && code < 127) return -value_of(true, 254 - code);
  int k = is_signed ? code - 127 : code;
  if (code == 255) return 1.0;
  if (k == 0) return 0.0;
  double end = 1e-6;
  int cells = is_signed ? 1 : 2;
  for (k -= 1; k >= cells; k -= cells, cells *= 2) end *= 10.0;
  return end * (0.1 + 0.9 * (k + 0.5) / cells);
}

void step_variant(peftds::Isa isa, CompactState& state, const AdamSettings& settings, int64_t begin,
                  int64_t end) {
  cpu::variant(isa).adam(state.arrays(), adam_coefficients(settings), begin, end);
}

void check_variant(peftds::Isa isa, const CompactState& before, int64_t begin) {
  CompactState expected = before, state = before;
  const int64_t end = state.plain.param.count();
  const AdamSettings settings = settings_of(before.form);
  step_variant(peftds::Isa::kScalar, expected, settings, begin, end);
  step_variant(isa, state, settings, begin, end);
  CHECK(state.same(expected), to_string(isa), ", split ", before.form.split, ", moments ",
        static_cast<int>(before.form.moments), ", stochastic ", before.form.stochastic, ", elements ", begin,
        " to ", end);
  CHECK(state.same(before) == (begin == end), "a step changes its own elements and nothing else");
}

}  // namespace

TEST(variants_agree_bit_by_bit_in_every_form) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const Form& form : all_forms()) {
      for (const DType grad : kDTypes) {
        for (const int64_t size : {0, 1, 7, 8, 9, 15, 16, 17, 33, 255, 256, 257, 700}) {
          for (const int64_t offset : {0, 1, 3}) {
            for (const int64_t begin : {0, 256}) {
              check_variant(isa, CompactState(form, begin + size, grad, nullptr, offset), begin);
            }
          }
        }
        for_each_out([&](const DType* out) {
          if (!form.split) check_variant(isa, CompactState(form, 300, grad, out, 1), 0);
        });
      }
    }
  }
}

TEST(threads_and_pieces_do_not_change_a_bit) {
  const int64_t count = 3 * cpu::kBlock + 17;
  for (const Form& form : all_forms()) {
    CompactState expected(form, count, DType::kBFloat16, nullptr);
    expected.first_element = (int64_t{1} << 32) - 1000;  // numbers wrap inside of a vector
    CompactState threaded = expected, in_pieces = expected;
    cpu::adam_step(expected.arrays(), settings_of(form), 1);
    cpu::adam_step(threaded.arrays(), settings_of(form), 3);
    CHECK(threaded.same(expected), "threads");
    const int64_t borders[] = {0, 256, 768, 20 * 256, cpu::kBlock + 256, count};
    for (size_t i = 0; i + 1 < std::size(borders); ++i) {
      cpu::adam_step(in_pieces.piece(borders[i], borders[i + 1]), settings_of(form), 2);
    }
    CHECK(in_pieces.same(expected), "pieces");
  }
}

TEST(random_numbers_depend_on_the_step_and_on_the_place) {
  for (const MomentFormat moments : {MomentFormat::kBFloat16, MomentFormat::kInt8}) {
    const CompactState start({false, moments, true}, 1000, DType::kFloat32, nullptr);
    CompactState one = start, again = start, moved = start, later = start;
    moved.first_element = 256;
    cpu::adam_step(one.arrays(), forgetful(true, 1), 1);
    cpu::adam_step(again.arrays(), forgetful(true, 1), 1);
    cpu::adam_step(moved.arrays(), forgetful(true, 1), 1);
    cpu::adam_step(later.arrays(), forgetful(true, 2), 1);
    CHECK(again.same(one), "a step repeats");
    CHECK(!moved.same(one), "first_element");
    CHECK(!later.same(one), "step");
  }
}

TEST(a_split_master_is_stepped_as_a_whole_one) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    const int64_t count = 1003;
    CompactState split({true, MomentFormat::kFloat32, false}, count, DType::kFloat32, nullptr);
    CompactState whole({false, MomentFormat::kFloat32, false}, count, DType::kFloat32, nullptr);
    for (int64_t i = 0; i < count; ++i) whole.plain.param.set(i, float_of(split.master_bits(i)));
    AdamSettings settings = kAdamW;
    for (settings.step = 1; settings.step <= 20; ++settings.step) {
      step_variant(isa, split, settings, 0, count);
      step_variant(isa, whole, settings, 0, count);
    }
    for (int64_t i = 0; i < count; ++i) {
      CHECK(split.master_bits(i) == whole.master_bits(i), to_string(isa), ": element ", i);
    }
  }
}

TEST(splitting_keeps_every_pattern_and_makes_nans_quiet) {
  constexpr uint32_t kLows[] = {0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
  const int64_t count = 65536 * std::size(kLows);
  CompactState start({true, MomentFormat::kFloat32, false}, count, DType::kFloat32, nullptr);
  const auto pattern = [&](int64_t i) {
    return static_cast<uint32_t>(i / std::size(kLows) << 16) | kLows[i % std::size(kLows)];
  };
  for (int64_t i = 0; i < count; ++i) {
    start.set_split_master(i, pattern(i));
    start.plain.grad.set(i, 0.0f);
    CHECK(start.master_bits(i) == pattern(i), "the test's own encoding");
  }
  for (const peftds::Isa isa : peftds::supported_isas()) {
    CompactState state = start;
    step_variant(isa, state, forgetful(false), 0, count);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = pattern(i);
      const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
      const uint32_t right = nan ? (bits & 0x80000000u) | 0x7fc00000u : bits;
      CHECK(state.master_bits(i) == right, to_string(isa), ": ", bits, " became ", state.master_bits(i));
      const float weight = state.plain.out.get(i);
      CHECK(std::isnan(weight) == nan, "weight of ", bits);
      const bool tie = (bits & 0xffffu) == 0x8000u;
      CHECK(nan || tie || bits_of(weight) == bits_of(widen(to_bfloat16(float_of(bits)))), "weight of ", bits);
    }
  }
}

TEST(every_code_has_the_value_of_the_definition) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    CompactState state({false, MomentFormat::kInt8, false}, 256, DType::kFloat32, nullptr);
    for (int i = 0; i < 256; ++i) {
      state.m8.data()[i] = state.v8.data()[i] = static_cast<uint8_t>(i);
      state.plain.grad.set(i, 0.0f);
      state.plain.param.set(i, 0.0f);
    }
    state.m_scale.data()[0] = state.v_scale.data()[0] = 1.0f;
    AdamSettings settings =
        forgetful(false);  // moments stay, and the parameter becomes -m / (sqrt(v) + 1e-3)
    settings.lr = settings.beta1 = settings.beta2 = 1.0;
    settings.bias_correction = false;
    settings.eps = 1e-3;
    CompactState after = state;
    step_variant(isa, after, settings, 0, 256);
    for (int i = 0; i < 256; ++i) {
      const double right = -value_of(true, i) / (std::sqrt(value_of(false, i)) + 1e-3);
      const double got = after.plain.param.get(i);
      CHECK(std::fabs(got - right) <= 1e-6 * std::fabs(right), to_string(isa), ": code ", i, " gives ", got,
            ", not ", right);
    }
    CHECK(after.m8 == state.m8, "values are codes of their own");
    CHECK(after.v8 == state.v8, "values are codes of their own");
  }
}

namespace {

/// Means of the stored moments after many elements got the same gradient, by the definition of the codes,
/// and how often each value occurs. The first element of each block sets the scale to 1.
struct Sample {
  static constexpr int64_t kCount = 256 * 400;
  double m_mean = 0.0, v_mean = 0.0;
  std::set<double> m_values, v_values;

  Sample(MomentFormat format, float gradient) {
    CompactState state({false, format, true}, kCount, DType::kFloat32, nullptr);
    for (int64_t i = 0; i < kCount; ++i) state.plain.grad.set(i, i % 256 == 0 ? 1.0f : gradient);
    cpu::adam_step(state.arrays(), forgetful(true), 2);
    for (int64_t i = 0; i < kCount; ++i) {
      if (i % 256 == 0) continue;
      const bool int8 = format == MomentFormat::kInt8;
      const double m = int8 ? value_of(true, state.m8.data()[i]) : state.m16.get(i);
      const double v = int8 ? value_of(false, state.v8.data()[i]) : state.v16.get(i);
      m_mean += m / (kCount - kCount / 256), v_mean += v / (kCount - kCount / 256);
      m_values.insert(m), v_values.insert(v);
    }
  }
};

void check_unbiased(double mean, const std::set<double>& values, double exact, const char* what) {
  CHECK(values.size() <= 2, what, " of ", exact, " is rounded to ", values.size(), " values");
  const double low = *values.begin(), high = *values.rbegin();
  CHECK(low <= exact * (1 + 1e-6) || exact < 0, what, ": ", low, " is above ", exact);
  const double share = high == low ? 0.0 : (exact - low) / (high - low);
  const double sigma = (high - low) * std::sqrt(std::fabs(share * (1 - share)) / Sample::kCount);
  CHECK(std::fabs(mean - exact) <= 5 * sigma + 1e-5 * std::fabs(exact), what, ": mean ", mean, " of ", exact,
        ", which is ", std::fabs(mean - exact) / sigma, " sigma");
}

}  // namespace

TEST(stochastic_rounding_has_the_right_expectation) {
  // Inside of decades for both moments, near and far from a code, and in the last gap.
  for (const float gradient : {0.5f, -0.7123f, 0.034567f, -0.0061f, 0.996f, 0.9999f}) {
    for (const MomentFormat format : {MomentFormat::kBFloat16, MomentFormat::kInt8}) {
      const Sample sample(format, gradient);
      check_unbiased(sample.m_mean, sample.m_values, gradient, "exp_avg");
      const float square = gradient * gradient;
      check_unbiased(sample.v_mean, sample.v_values, square, "exp_avg_sq");
    }
  }
}

TEST(small_moments_become_the_nearest_codes_and_a_second_moment_not_zero) {
  CompactState state({false, MomentFormat::kInt8, false}, 300, DType::kFloat32, nullptr);
  const float gradients[] = {1.0f, 0.0f, -0.0f, 1e-20f, -1e-30f, 2.7e-7f, 2.8e-7f, -1.0f};
  const int m_codes[] = {255, 127, 127, 127, 127, 127, 128, 0};
  for (int64_t i = 0; i < 300; ++i) state.plain.grad.set(i, gradients[i % 8]);
  for (const peftds::Isa isa : peftds::supported_isas()) {
    step_variant(isa, state, forgetful(false), 0, 300);
    for (int64_t i = 0; i < 300; ++i) {
      const float v = gradients[i % 8] * gradients[i % 8];
      CHECK(state.m8.data()[i] == m_codes[i % 8], to_string(isa), ": exp_avg of ", gradients[i % 8], " is ",
            static_cast<int>(state.m8.data()[i]));
      const int v_code = v == 0.0f ? 0 : v == 1.0f ? 255 : 1;
      CHECK(state.v8.data()[i] == v_code, to_string(isa), ": exp_avg_sq of ", gradients[i % 8]);
    }
  }
}

TEST(a_block_of_zeros_stays_zero_and_finite) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const bool stochastic : {false, true}) {
      CompactState state({true, MomentFormat::kInt8, stochastic}, 600, DType::kFloat32, nullptr);
      for (int64_t i = 0; i < 600; ++i) state.plain.grad.set(i, 0.0f);
      for (int64_t i = 0; i < 3; ++i) state.m_scale.data()[i] = state.v_scale.data()[i] = 0.0f;  // any codes
      AdamSettings settings = settings_of(state.form);
      settings.weight_decay = 0.0;
      CompactState after = state;
      step_variant(isa, after, settings, 0, 600);
      CHECK(after.m_scale == state.m_scale && after.v_scale == state.v_scale, "scales");
      for (int64_t i = 0; i < 600; ++i) {
        CHECK(after.m8.data()[i] == 127 && after.v8.data()[i] == 0, "codes of element ", i);
        CHECK(after.master_bits(i) == state.master_bits(i), "master of element ", i);
      }
    }
  }
}

TEST(tiny_and_huge_blocks_keep_their_scale) {
  for (const float size : {1e-45f, 1e-40f, 1.2e-38f, 1e-30f, 1e18f, 3e38f}) {
    CompactState state({false, MomentFormat::kInt8, false}, 256, DType::kFloat32, nullptr);
    for (int64_t i = 0; i < 256; ++i) state.plain.grad.set(i, size);
    cpu::adam_step(state.arrays(), forgetful(false), 1);
    CHECK(state.m_scale.data()[0] == std::max(size, std::numeric_limits<float>::min()), size);
    const double stored = value_of(true, state.m8.data()[9]) * static_cast<double>(state.m_scale.data()[0]);
    CHECK(size < 1e-44f || std::fabs(stored - size) <= 0.4 * size, size, " is stored as ", stored);
  }
}

TEST(what_is_not_finite_spoils_its_own_block_only) {
  for (const float bad : {kNaN, -kNaN, INFINITY, -INFINITY}) {
    for (const peftds::Isa isa : peftds::supported_isas()) {
      for (const bool stochastic : {false, true}) {
        CompactState state({false, MomentFormat::kInt8, stochastic}, 700, DType::kFloat32, nullptr);
        state.plain.grad.set(300, bad);
        step_variant(isa, state, settings_of(state.form), 0, 700);
        for (int64_t i = 0; i < 3; ++i) {
          CHECK(std::isnan(state.m_scale.data()[i]) == (i == 1), "scale ", i);
          CHECK(std::isnan(state.v_scale.data()[i]) == (i == 1), "scale ", i);
        }
        state.plain.grad.set(300, 0.0f);
        step_variant(isa, state, settings_of(state.form), 0, 700);
        for (int64_t i = 0; i < 700; ++i) {
          CHECK(std::isnan(state.plain.param.get(i)) == (i / 256 == 1), bad, ": element ", i);
        }
      }
    }
  }
}

TEST(bfloat16_moments_keep_infinities_and_nans) {
  const uint32_t patterns[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u,
                               0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff80ffffu};
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const bool stochastic : {false, true}) {
      CompactState state({false, MomentFormat::kBFloat16, stochastic}, 4099, DType::kFloat32, nullptr);
      for (int64_t i = 0; i < 4099; ++i) state.plain.grad.set(i, float_of(patterns[i % 8]));
      for (int64_t i = 0; i < 4099; ++i) state.m16.set(i, 0.0f), state.v16.set(i, 0.0f);
      step_variant(isa, state, forgetful(stochastic), 0, 4099);
      for (int64_t i = 0; i < 4099; ++i) {
        const float gradient = float_of(patterns[i % 8]);
        const float m = state.m16.get(i), v = state.v16.get(i);
        CHECK(std::isnan(gradient) ? std::isnan(m) && std::isnan(v) : m == gradient && v == INFINITY,
              to_string(isa), ": ", patterns[i % 8], " became ", m, " and ", v);
      }
    }
  }
}

int main() { return peftds::test::run_all(); }
