// SPDX-License-Identifier: Apache-2.0
// The arguments of adamw_step_, checked, on whatever device.
#pragma once

#include <cstdint>
#include <optional>

#include "bindings/tensor_args.h"
#include "kernels/adam_math.h"

namespace peftds::bindings {

using torch::headeronly::ScalarType;

/// The tensors of adamw_step_.
struct AdamTensors {
  const Tensor& param;
  const Tensor& grad;
  const Tensor& exp_avg;
  const Tensor& exp_avg_sq;
  const std::optional<Tensor>& out;
  const std::optional<Tensor>& exp_avg_scale;
  const std::optional<Tensor>& exp_avg_sq_scale;
};

/// Tells whether the master is split into the bf16 weight `out` and the remainder `param`.
inline bool is_split(const AdamTensors& t) {
  const ScalarType type = t.param.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Short,
                  "param must be float32, or int16 remainders, got ", torch::headeronly::toString(type));
  if (type == ScalarType::Float) return false;
  STD_TORCH_CHECK(t.out.has_value() && t.out->scalar_type() == ScalarType::BFloat16,
                  "param has int16 remainders, so out must be given and be the bfloat16 weights");
  return true;
}

/// The form of both moments, whose dtypes agree.
inline kernels::MomentFormat moment_format(const AdamTensors& t) {
  const auto format_of = [](const Tensor& moment, const char* name) {
    const ScalarType type = moment.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Byte,
                    name, " must be float32, bfloat16 or uint8, got ", torch::headeronly::toString(type));
    if (type == ScalarType::Byte) return kernels::MomentFormat::kInt8;
    return type == ScalarType::Float ? kernels::MomentFormat::kFloat32 : kernels::MomentFormat::kBFloat16;
  };
  const kernels::MomentFormat format = format_of(t.exp_avg, "exp_avg");
  STD_TORCH_CHECK(format_of(t.exp_avg_sq, "exp_avg_sq") == format,
                  "exp_avg and exp_avg_sq must have the same dtype, got ",
                  torch::headeronly::toString(t.exp_avg.scalar_type()), " and ",
                  torch::headeronly::toString(t.exp_avg_sq.scalar_type()));
  return format;
}

/// The scales of uint8 moments; null for others, which have none.
inline float* moment_scale(const std::optional<Tensor>& scale, const char* name, const AdamTensors& t,
                           kernels::MomentFormat format) {
  if (format != kernels::MomentFormat::kInt8) {
    STD_TORCH_CHECK(!scale.has_value(), name, " belongs to uint8 moments, but these are ",
                    torch::headeronly::toString(t.exp_avg.scalar_type()));
    return nullptr;
  }
  STD_TORCH_CHECK(scale.has_value(), name, " must be given with uint8 moments");
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float, name, " must be float32, got ",
                  torch::headeronly::toString(scale->scalar_type()));
  STD_TORCH_CHECK(scale->device() == t.param.device(), name, " and param must be on the same device");
  const int64_t blocks = (t.param.numel() + kernels::kMomentBlock - 1) / kernels::kMomentBlock;
  STD_TORCH_CHECK(scale->numel() == blocks, name, " has ", scale->numel(), " elements, but param has ",
                  blocks, " started blocks of ", kernels::kMomentBlock);
  check_contiguous(*scale, name);
  return static_cast<float*>(scale->mutable_data_ptr());
}

inline kernels::AdamArrays adam_arrays(const AdamTensors& t, int64_t step, int64_t first_element) {
  const bool split = is_split(t);
  const kernels::MomentFormat moments = moment_format(t);
  check_contiguous(t.param, "param");
  check_like(t.grad, "grad", t.param, "param");
  check_like(t.exp_avg, "exp_avg", t.param, "param");
  check_like(t.exp_avg_sq, "exp_avg_sq", t.param, "param");
  if (t.out.has_value()) check_like(*t.out, "out", t.param, "param");
  STD_TORCH_CHECK(step >= 1, "step counts from 1, got ", step);
  STD_TORCH_CHECK(first_element >= 0, "first_element counts from 0, got ", first_element);
  return {.param = t.param.mutable_data_ptr(),
          .grad = t.grad.const_data_ptr(),
          .grad_dtype = dtype_of(t.grad, "grad"),
          .exp_avg = t.exp_avg.mutable_data_ptr(),
          .exp_avg_sq = t.exp_avg_sq.mutable_data_ptr(),
          .out = t.out.has_value() ? t.out->mutable_data_ptr() : nullptr,
          .out_dtype = t.out.has_value() ? dtype_of(*t.out, "out") : DType::kFloat32,
          .count = t.param.numel(),
          .split = split,
          .moments = moments,
          .exp_avg_scale = moment_scale(t.exp_avg_scale, "exp_avg_scale", t, moments),
          .exp_avg_sq_scale = moment_scale(t.exp_avg_sq_scale, "exp_avg_sq_scale", t, moments),
          .first_element = first_element};
}

}  // namespace peftds::bindings
