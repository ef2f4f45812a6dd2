// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels' bodies, with all threads of a grid played one after the other on the CPU, against
// the CPU kernels. What is left for a GPU to show: launches, shared memory, and the intrinsics.
#include "kernels/cuda/thread_loops.h"

#include "arrays.h"
#include "check.h"

namespace {

using namespace peftds::kernels;
using peftds::test::AdamState;
using peftds::test::Array;
using peftds::test::for_each_out;
using peftds::test::kDTypes;
using peftds::test::name_of;

constexpr int64_t kSizes[] = {0, 1, 3, 4, 5, 7, 8, 9, 63, 64, 65, 1000};
constexpr int64_t kGrids[] = {1, 3, 16, 512};  // threads in all: fewer and more than there are groups
constexpr AdamSettings kSettings = {.lr = 1e-2,
                                    .beta1 = 0.9,
                                    .beta2 = 0.999,
                                    .eps = 1e-8,
                                    .weight_decay = 0.1,
                                    .grad_scale = 0.5,
                                    .step = 3,
                                    .adamw_mode = true,
                                    .bias_correction = true};

template <class Function>
void with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat32: return function(0.0f);
    case DType::kBFloat16: return function(BFloat16{});
    case DType::kFloat16: return function(Float16{});
  }
}

/// Arrays at offset 0 are aligned as `kAligned` promises; at offset 1 they are not.
template <class Grad, class Out>
void play_adam(AdamState& state, const AdamSettings& settings, int64_t offset, int64_t threads) {
  const auto arrays = state.arrays();
  const AdamCoefficients coefficients = adam_coefficients(settings);
  for (int64_t thread = 0; thread < threads; ++thread) {
    if (offset == 0) {
      cuda::adam_thread<Grad, Out, true>(arrays, coefficients, thread, threads);
    } else {
      cuda::adam_thread<Grad, Out, false>(arrays, coefficients, thread, threads);
    }
  }
}

void play_adam(AdamState& state, const AdamSettings& settings, int64_t offset, int64_t threads) {
  with_type(state.grad.dtype(), [&](auto grad) {
    using Grad = decltype(grad);
    if (!state.has_out) return play_adam<Grad, void>(state, settings, offset, threads);
    with_type(state.out.dtype(),
              [&](auto out) { play_adam<Grad, decltype(out)>(state, settings, offset, threads); });
  });
}

void play_cast(Array& input, Array& output, int64_t offset, int64_t threads) {
  with_type(input.dtype(), [&](auto from_type) {
    with_type(output.dtype(), [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      const auto* from = static_cast<const From*>(input.data());
      auto* to = static_cast<To*>(output.data());
      for (int64_t thread = 0; thread < threads; ++thread) {
        if (offset == 0) {
          cuda::cast_thread<From, To, true>(from, to, input.count(), thread, threads);
        } else {
          cuda::cast_thread<From, To, false>(from, to, input.count(), thread, threads);
        }
      }
    });
  });
}

double play_squares(Array& input, int64_t offset, int64_t threads) {
  double sum = 0;
  with_type(input.dtype(), [&](auto type) {
    using T = decltype(type);
    const auto* data = static_cast<const T*>(input.data());
    for (int64_t thread = 0; thread < threads; ++thread) {
      sum += offset == 0 ? cuda::square_thread<T, true>(data, input.count(), thread, threads)
                         : cuda::square_thread<T, false>(data, input.count(), thread, threads);
    }
  });
  return sum;
}

}  // namespace

TEST(adam_has_the_bits_of_the_cpu_kernel) {
  AdamSettings adam = kSettings;
  adam.adamw_mode = false;
  for (const DType grad : kDTypes) {
    for_each_out([&](const DType* out) {
      for (const AdamSettings& settings : {kSettings, adam}) {
        for (const int64_t offset : {0, 1}) {
          for (const int64_t size : kSizes) {
            AdamState expected(size, grad, out, offset);
            cpu::adam_step(expected.arrays(), settings, 1);
            for (const int64_t threads : kGrids) {
              AdamState state(size, grad, out, offset);
              play_adam(state, settings, offset, threads);
              CHECK(state == expected, name_of(grad), ", ", size, " elements at ", offset, ", ", threads,
                    " threads");
            }
          }
        }
      }
    });
  }
}

TEST(cast_has_the_bits_of_the_cpu_kernel) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t offset : {0, 1}) {
        for (const int64_t size : kSizes) {
          Array input(from, size, offset);
          input.fill(1, -6, 6);
          Array expected(to, size, offset);
          cpu::cast(input.data(), from, expected.data(), to, size, 1);
          for (const int64_t threads : kGrids) {
            Array output(to, size, offset);
            play_cast(input, output, offset, threads);
            CHECK(output == expected, name_of(from), " to ", name_of(to), ", ", size, " elements at ",
                  offset);
          }
        }
      }
    }
  }
}

TEST(squares_count_each_element_once) {
  for (const DType dtype : kDTypes) {
    for (const int64_t offset : {0, 1}) {
      for (const int64_t size : kSizes) {
        Array input(dtype, size, offset);
        double expected = 0;
        for (int64_t i = 0; i < size; ++i) {
          input.set(i, static_cast<float>(i % 13));
          expected += static_cast<double>((i % 13) * (i % 13));
        }
        for (const int64_t threads : kGrids) {
          CHECK(play_squares(input, offset, threads) == expected, name_of(dtype), ", ", size, " elements");
        }
      }
    }
  }
}

TEST(squares_do_not_depend_on_the_alignment) {
  for (const DType dtype : kDTypes) {
    Array aligned(dtype, 1003, 0);
    Array shifted(dtype, 1003, 1);
    aligned.fill(1, -6, 4);
    shifted.fill(1, -6, 4);
    const double sum = play_squares(aligned, 0, 16);
    CHECK(sum == play_squares(shifted, 1, 16), name_of(dtype));
    const double expected = cpu::squared_norm(aligned.data(), dtype, 1003, 1);
    CHECK(std::fabs(sum - expected) <= 1e-13 * expected, name_of(dtype));
  }
}

TEST(alignment_is_that_of_a_whole_group) {
  alignas(16) char memory[32];
  CHECK((cuda::is_aligned<float, 4>(memory) && cuda::is_aligned<float, 4>(memory + 16)));
  for (const int shift : {4, 8, 12}) CHECK((!cuda::is_aligned<float, 4>(memory + shift)), shift);
  CHECK((cuda::is_aligned<BFloat16, 4>(memory + 8) && !cuda::is_aligned<BFloat16, 4>(memory + 2)));
  CHECK((cuda::is_aligned<float, 4>(nullptr)));
}

int main() { return peftds::test::run_all(); }
