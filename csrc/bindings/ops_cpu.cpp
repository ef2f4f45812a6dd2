// SPDX-License-Identifier: Apache-2.0
// Schemas of torch.ops.peftds_ext.* and their CPU implementations. peftds_ext/ops.py documents them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bindings/adam_args.h"
#include "bindings/tensor_args.h"
#include "kernels/cpu/kernels.h"

namespace peftds::bindings {
namespace {

int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

void adamw_step(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> out,
                std::optional<Tensor> exp_avg_scale, std::optional<Tensor> exp_avg_sq_scale, double lr,
                double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
                bool adamw_mode, bool bias_correction, int64_t first_element, bool stochastic) {
  const kernels::AdamArrays arrays = adam_arrays(
      {param, grad, exp_avg, exp_avg_sq, out, exp_avg_scale, exp_avg_sq_scale}, step, first_element);
  const kernels::AdamSettings settings{.lr = lr,
                                       .beta1 = beta1,
                                       .beta2 = beta2,
                                       .eps = eps,
                                       .weight_decay = weight_decay,
                                       .grad_scale = grad_scale,
                                       .step = step,
                                       .adamw_mode = adamw_mode,
                                       .bias_correction = bias_correction,
                                       .stochastic = stochastic};
  kernels::cpu::adam_step(arrays, settings, threads());
}

Tensor double_scalar(const Tensor& like, double value) {
  Tensor result = torch::stable::new_empty(like, {}, torch::headeronly::ScalarType::Double);
  *static_cast<double*>(result.mutable_data_ptr()) = value;
  return result;
}

Tensor squared_norm(Tensor input) {
  const DType dtype = dtype_of(input, "input");
  check_contiguous(input, "input");
  const double sum = kernels::cpu::squared_norm(input.const_data_ptr(), dtype, input.numel(), threads());
  return double_scalar(input, sum);
}

Tensor accumulate(Tensor buffer, Tensor grad, bool add) {
  check_cast(grad, "grad", buffer, "buffer");
  const double sum =
      kernels::cpu::accumulate(grad.const_data_ptr(), dtype_of(grad, "grad"), buffer.mutable_data_ptr(),
                               dtype_of(buffer, "buffer"), add, buffer.numel(), threads());
  return double_scalar(buffer, sum);
}

void cast_into(Tensor input, Tensor out) {
  check_cast(input, "input", out, "out");
  kernels::cpu::cast(input.const_data_ptr(), dtype_of(input, "input"), out.mutable_data_ptr(),
                     dtype_of(out, "out"), input.numel(), threads());
}

}  // namespace

STABLE_TORCH_LIBRARY(peftds_ext, library) {
  library.def(
      "adamw_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
      "Tensor(d!)? out=None, *, Tensor(e!)? exp_avg_scale=None, Tensor(f!)? exp_avg_sq_scale=None, "
      "float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
      "float grad_scale=1.0, bool adamw_mode=True, bool bias_correction=True, int first_element=0, "
      "bool stochastic=True) -> ()");
  library.def("squared_norm(Tensor input) -> Tensor");
  library.def("accumulate_(Tensor(a!) buffer, Tensor grad, bool add) -> Tensor");
  library.def("cast_into(Tensor input, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(peftds_ext, CPU, library) {
  library.impl("adamw_step_", TORCH_BOX(&adamw_step));
  library.impl("squared_norm", TORCH_BOX(&squared_norm));
  library.impl("accumulate_", TORCH_BOX(&accumulate));
  library.impl("cast_into", TORCH_BOX(&cast_into));
}

}  // namespace peftds::bindings
