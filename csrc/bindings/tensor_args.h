// SPDX-License-Identifier: Apache-2.0
// Turns torch tensors into raw arrays, with every check that the kernels rely on. The only code
// that sees torch, through its stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>

#include "kernels/dtype.h"

namespace peftds::bindings {

using kernels::DType;
using torch::stable::Tensor;

/// The element type, for fp32, bf16 and fp16; raises for any other.
inline DType dtype_of(const Tensor& tensor, const char* name) {
  using torch::headeronly::ScalarType;
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                  " must be float32, bfloat16 or float16, got ", torch::headeronly::toString(type));
  if (type == ScalarType::BFloat16) return DType::kBFloat16;
  return type == ScalarType::Half ? DType::kFloat16 : DType::kFloat32;
}

inline void check_contiguous(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous; pass it through .contiguous() and ",
                  "copy the result back, or store it contiguously");
}

/// `tensor` is on the device of `first`, has as many elements, and is contiguous.
inline void check_like(const Tensor& tensor, const char* name, const Tensor& first, const char* first_name) {
  STD_TORCH_CHECK(tensor.device() == first.device(), name, " and ", first_name,
                  " must be on the same device");
  STD_TORCH_CHECK(tensor.numel() == first.numel(), name, " has ", tensor.numel(), " elements, but ",
                  first_name, " has ", first.numel());
  check_contiguous(tensor, name);
}

/// Two arrays that an element-wise conversion goes between.
inline void check_cast(const Tensor& from, const char* from_name, const Tensor& to, const char* to_name) {
  check_contiguous(from, from_name);
  check_like(to, to_name, from, from_name);
  dtype_of(from, from_name);
  dtype_of(to, to_name);
}

}  // namespace peftds::bindings
