// SPDX-License-Identifier: Apache-2.0
// The CPU Adam step: against a loop in double arithmetic, and every variant against the scalar one.
#include "arrays.h"
#include "check.h"
#include "kernels/cpu/variants.h"

namespace {

using namespace peftds::kernels;
using peftds::test::AdamState;
using peftds::test::for_each_out;
using peftds::test::kDTypes;
using peftds::test::name_of;

const AdamSettings kAdamW = {.lr = 1e-2,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .grad_scale = 0.5,
                             .step = 3,
                             .adamw_mode = true,
                             .bias_correction = true};

/// AdamW and Adam, each with and without decay and bias correction.
std::vector<AdamSettings> all_modes() {
  std::vector<AdamSettings> modes;
  for (const bool adamw : {true, false}) {
    for (const double decay : {0.1, 0.0}) {
      for (const bool correction : {true, false}) {
        AdamSettings settings = kAdamW;
        settings.adamw_mode = adamw;
        settings.weight_decay = decay;
        settings.bias_correction = correction;
        modes.push_back(settings);
      }
    }
  }
  return modes;
}

/// The textbook update of one element, in double.
void textbook(double g, double& p, double& m, double& v, const AdamSettings& s) {
  g *= s.grad_scale;
  if (!s.adamw_mode) g += s.weight_decay * p;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const double m_hat = s.bias_correction ? m / (1 - std::pow(s.beta1, static_cast<double>(s.step))) : m;
  const double v_hat = s.bias_correction ? v / (1 - std::pow(s.beta2, static_cast<double>(s.step))) : v;
  if (s.adamw_mode) p -= s.lr * s.weight_decay * p;
  p -= s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
}

void check_close(double got, double expected, double scale, const char* what, int64_t i) {
  CHECK(std::fabs(got - expected) <= 1e-6 * scale, what, " of element ", i, " is ", got, ", not ", expected);
}

void check_against_textbook(AdamSettings settings, DType grad_dtype) {
  constexpr int64_t kCount = 1000;
  const DType out_dtype = DType::kBFloat16;
  AdamState state(kCount, grad_dtype, &out_dtype);
  std::vector<double> p(kCount), m(kCount), v(kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    p[i] = state.param.get(i), m[i] = state.exp_avg.get(i), v[i] = state.exp_avg_sq.get(i);
  }
  for (settings.step = 1; settings.step <= 5; ++settings.step) {
    cpu::adam_step(state.arrays(), settings, 1);
    for (int64_t i = 0; i < kCount; ++i) textbook(state.grad.get(i), p[i], m[i], v[i], settings);
  }
  for (int64_t i = 0; i < kCount; ++i) {
    // Sums may cancel, so the errors are measured by the size of the terms.
    check_close(state.param.get(i), p[i], std::fabs(p[i]) + 1.0, "param", i);
    check_close(state.exp_avg.get(i), m[i], std::fabs(m[i]) + std::fabs(state.grad.get(i)) + 0.1, "exp_avg",
                i);
    check_close(state.exp_avg_sq.get(i), v[i], v[i], "exp_avg_sq", i);
    CHECK(state.out.get(i) == widen(to_bfloat16(state.param.get(i))), "out of element ", i);
  }
}

/// The variant's step on elements [begin, count), compared bit by bit with the scalar one.
void check_variant(peftds::Isa isa, AdamState state, const AdamSettings& settings, int64_t begin) {
  AdamState expected = state;
  const AdamState before = state;
  const AdamCoefficients coefficients = adam_coefficients(settings);
  const int64_t end = state.param.count();
  cpu::kScalarVariant.adam(expected.arrays(), coefficients, begin, end);
  cpu::variant(isa).adam(state.arrays(), coefficients, begin, end);
  CHECK(state == expected, to_string(isa), ", grad ", name_of(state.grad.dtype()), ", out ",
        state.has_out ? name_of(state.out.dtype()) : "none", ", elements ", begin, " to ", end);
  CHECK((state == before) == (begin == end), "a step changes its own elements and nothing else");
}

}  // namespace

TEST(the_step_is_the_textbook_one) {
  for (const AdamSettings& settings : all_modes()) {
    for (const DType grad : kDTypes) check_against_textbook(settings, grad);
  }
}

TEST(variants_agree_bit_by_bit_at_any_size_and_offset) {
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType grad : kDTypes) {
      for_each_out([&](const DType* out) {
        for (const int64_t size : {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 100}) {
          for (const int64_t begin : {0, 1, 5}) {
            for (const int64_t offset : {0, 1, 3}) {
              check_variant(isa, AdamState(begin + size, grad, out, offset), kAdamW, begin);
            }
          }
        }
      });
    }
  }
}

TEST(variants_agree_bit_by_bit_in_every_mode) {
  const DType out = DType::kFloat16;
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const AdamSettings& settings : all_modes()) {
      for (const DType grad : kDTypes) check_variant(isa, AdamState(1000, grad, &out), settings, 0);
    }
  }
}

TEST(variants_agree_on_subnormal_huge_and_infinite_gradients) {
  const float values[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 1e-30f, 1e30f, 3e38f, -3e38f, INFINITY, -INFINITY};
  for (const peftds::Isa isa : peftds::supported_isas()) {
    for (const DType grad : kDTypes) {
      AdamState state(1000, grad, nullptr);
      for (int64_t i = 0; i < 1000; ++i) state.grad.set(i, values[i % std::size(values)]);
      AdamState expected = state;
      const AdamCoefficients coefficients = adam_coefficients(kAdamW);
      cpu::kScalarVariant.adam(expected.arrays(), coefficients, 0, 1000);
      cpu::variant(isa).adam(state.arrays(), coefficients, 0, 1000);
      for (int64_t i = 0; i < 1000; ++i) {
        const float got = state.param.get(i);
        const float right = expected.param.get(i);
        CHECK(bits_of(got) == bits_of(right) || (std::isnan(got) && std::isnan(right)), to_string(isa),
              ": element ", i, " is ", got, ", not ", right);
      }
    }
  }
}

TEST(the_number_of_threads_does_not_change_a_bit) {
  const DType out = DType::kBFloat16;
  const int64_t count = 3 * cpu::kBlock + 17;
  AdamState expected(count, DType::kFloat32, &out);
  cpu::adam_step(expected.arrays(), kAdamW, 1);
  for (const int threads : {2, 3, 8}) {
    AdamState state(count, DType::kFloat32, &out);
    cpu::adam_step(state.arrays(), kAdamW, threads);
    CHECK(state == expected, threads, " threads");
  }
}

TEST(an_unknown_instruction_set_is_refused) {
  CHECK_THROWS(cpu::variant(static_cast<peftds::Isa>(99)), kInvalidArgument);
}

int main() { return peftds::test::run_all(); }
