// SPDX-License-Identifier: Apache-2.0
// CUDA implementations of torch.ops.peftds_ext.*; ops_cpu.cpp holds the schemas. They queue work on the
// current stream of the tensors' device and do not wait for it.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bindings/adam_args.h"
#include "bindings/tensor_args.h"
#include "kernels/cuda/launch.h"

namespace peftds::bindings {
namespace {

/// While it lives, the device of `tensor` is the current one.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}

  /// The stream that torch uses on that device now.
  [[nodiscard]] kernels::cuda::Stream stream() const {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &stream));
    return static_cast<kernels::cuda::Stream>(stream);
  }

 private:
  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

void adamw_step(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> out,
                std::optional<Tensor> exp_avg_scale, std::optional<Tensor> exp_avg_sq_scale, double lr,
                double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
                bool adamw_mode, bool bias_correction, int64_t first_element, bool stochastic) {
  const kernels::AdamArrays arrays = adam_arrays(
      {param, grad, exp_avg, exp_avg_sq, out, exp_avg_scale, exp_avg_sq_scale}, step, first_element);
  STD_TORCH_CHECK(!arrays.split && arrays.moments == kernels::MomentFormat::kFloat32,
                  "compact states are stepped in host memory only: on CUDA, param, exp_avg and exp_avg_sq ",
                  "must be float32");
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
  const OnDevice device(param);
  kernels::cuda::launch_adam_step(arrays, kernels::adam_coefficients(settings), device.stream());
}

Tensor squared_norm(Tensor input) {
  const DType dtype = dtype_of(input, "input");
  check_contiguous(input, "input");
  const OnDevice device(input);
  const auto new_doubles = [&input](std::initializer_list<int64_t> shape) {
    return torch::stable::new_empty(input, shape, torch::headeronly::ScalarType::Double);
  };
  // Freed on return, while the work may still run: torch's allocator reuses it in stream order.
  Tensor scratch = new_doubles({kernels::cuda::kSquaredNormScratch});
  Tensor result = new_doubles({});
  kernels::cuda::launch_squared_norm(input.const_data_ptr(), dtype, input.numel(),
                                     static_cast<double*>(scratch.mutable_data_ptr()),
                                     static_cast<double*>(result.mutable_data_ptr()), device.stream());
  return result;
}

void cast_into(Tensor input, Tensor out) {
  check_cast(input, "input", out, "out");
  const OnDevice device(input);
  kernels::cuda::launch_cast(input.const_data_ptr(), dtype_of(input, "input"), out.mutable_data_ptr(),
                             dtype_of(out, "out"), input.numel(), device.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(peftds_ext, CUDA, library) {
  library.impl("adamw_step_", TORCH_BOX(&adamw_step));
  library.impl("squared_norm", TORCH_BOX(&squared_norm));
  library.impl("cast_into", TORCH_BOX(&cast_into));
}

}  // namespace peftds::bindings
