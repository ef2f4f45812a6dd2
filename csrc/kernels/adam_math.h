// SPDX-License-Identifier: Apache-2.0
// The arrays and settings of an Adam or AdamW step, and the coefficients that adam_update.inl.h
// computes with.
//
// Sources: Kingma and Ba, "Adam" (arXiv 1412.6980), algorithm 1; Loshchilov and Hutter, "Decoupled
// Weight Decay Regularization" (arXiv 1711.05101), algorithm 2. Order of operations and the meaning
// of eps, weight_decay and bias_correction follow DeepSpeed's CPU Adam
// (ops/csrc/includes/cpu_adam.h), so that
//   denominator = sqrt(v) / sqrt(1 - beta2^step) + eps
// and AdamW's decay uses lr * weight_decay. Coefficients are computed in double and rounded once.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/dtype.h"

namespace peftds::kernels {

/// How both moments are stored.
enum class MomentFormat {
  kFloat32,
  kBFloat16,
  kInt8,  // codes of dynamic_map.h, and the largest magnitude of every kMomentBlock elements
};

/// Elements that share one scale in MomentFormat::kInt8, counted from the array's first.
inline constexpr int64_t kMomentBlock = 256;

/// What one step of `count` elements reads and writes. The arrays must not overlap.
struct AdamArrays {
  void* param;       // fp32, updated in place; if `split`, the int16 remainders of split_master.inl.h
  const void* grad;  // only read
  DType grad_dtype;
  void* exp_avg;     // updated in place, stored as `moments` says; likewise exp_avg_sq
  void* exp_avg_sq;  // is not negative
  void* out;         // unless null, receives the new parameter, rounded to nearest even; if `split`,
                     // the master's bf16 weights, updated in place
  DType out_dtype;
  int64_t count;
  // Compact formats, which the CPU has.
  bool split = false;
  MomentFormat moments = MomentFormat::kFloat32;
  float* exp_avg_scale = nullptr;  // kInt8: one per started kMomentBlock; likewise exp_avg_sq_scale
  float* exp_avg_sq_scale = nullptr;
  int64_t first_element = 0;  // where the arrays start in a larger one: chooses the random numbers
};

/// What the caller sets.
struct AdamSettings {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;  // gradients are multiplied by this first (unscale and clip)
  int64_t step;       // 1 for the first step
  bool adamw_mode;    // decoupled decay; false adds weight_decay * parameter to the gradient
  bool bias_correction;
  bool stochastic = true;  // compact moments are rounded up or down by chance; else to nearest
};

/// What the inner loop needs.
struct AdamCoefficients {
  float grad_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float inv_sqrt_correction2;
  float negative_step_size;
  float l2;              // Adam mode: weight_decay, else 0
  float negative_decay;  // AdamW mode: -lr * weight_decay, else 0
  uint32_t seed;         // of the step's random numbers
  bool stochastic;
};

/// A mixer of 32 bits: "lowbias32" of C. Wellons, "Prospecting for Hash Functions" (2018, public domain).
[[nodiscard]] constexpr uint32_t mix_bits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

[[nodiscard]] inline AdamCoefficients adam_coefficients(const AdamSettings& s) {
  const double step = static_cast<double>(s.step);
  const double correction1 = s.bias_correction ? 1.0 - std::pow(s.beta1, step) : 1.0;
  const double correction2 = s.bias_correction ? 1.0 - std::pow(s.beta2, step) : 1.0;
  return {
      .grad_scale = static_cast<float>(s.grad_scale),
      .beta1 = static_cast<float>(s.beta1),
      .one_minus_beta1 = static_cast<float>(1.0 - s.beta1),
      .beta2 = static_cast<float>(s.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - s.beta2),
      .eps = static_cast<float>(s.eps),
      .inv_sqrt_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
      .negative_step_size = static_cast<float>(-s.lr / correction1),
      .l2 = static_cast<float>(s.adamw_mode ? 0.0 : s.weight_decay),
      .negative_decay = static_cast<float>(s.adamw_mode ? -s.lr * s.weight_decay : 0.0),
      .seed = mix_bits(static_cast<uint32_t>(s.step) ^ mix_bits(static_cast<uint32_t>(s.step >> 32))),
      .stochastic = s.stochastic,
  };
}

}  // namespace peftds::kernels
