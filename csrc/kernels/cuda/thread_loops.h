// SPDX-License-Identifier: Apache-2.0
// What one CUDA thread of each kernel does, given its number and the number of threads. It compiles
// for the host too, so that tests can play all threads of a grid on a machine without a GPU.
//
// A thread takes every `threads`-th group of kWidth neighbouring elements, then its share of the
// elements behind the last whole group. `kAligned` promises that all arrays are aligned to a group.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device_math.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pack.h"

namespace peftds::kernels::cuda {

#include "kernels/adam_update.inl.h"

/// Calls `body(first element, width as a constant)` for each group of the thread, then for each single.
template <int kWidth, class Body>
PEFTDS_HOST_DEVICE void for_groups(int64_t count, int64_t thread, int64_t threads, Body body) {
  const int64_t groups = count / kWidth;
  for (int64_t group = thread; group < groups; group += threads) {
    body(group * kWidth, std::integral_constant<int, kWidth>{});
  }
  for (int64_t i = groups * kWidth + thread; i < count; i += threads) {
    body(i, std::integral_constant<int, 1>{});
  }
}

// ---- Adam ---------------------------------------------------------------------------------------

/// 16 bytes of each fp32 array.
inline constexpr int kAdamWidth = 4;

template <class Grad, class Out, int kWidth, bool kAligned>
PEFTDS_HOST_DEVICE void adam_group(const AdamArrays& a, const AdamCoefficients& c, int64_t i) {
  float* param = static_cast<float*>(a.param);
  float* exp_avg = static_cast<float*>(a.exp_avg);
  float* exp_avg_sq = static_cast<float*>(a.exp_avg_sq);
  auto p = load_pack<kWidth, kAligned>(param + i);
  auto m = load_pack<kWidth, kAligned>(exp_avg + i);
  auto v = load_pack<kWidth, kAligned>(exp_avg_sq + i);
  const auto g = load_pack<kWidth, kAligned>(static_cast<const Grad*>(a.grad) + i);
  for (int k = 0; k < kWidth; ++k) {
    adam_update<DeviceMath>(to_float(g.items[k]), p.items[k], m.items[k], v.items[k], c);
  }
  store_pack<kAligned>(param + i, p);
  store_pack<kAligned>(exp_avg + i, m);
  store_pack<kAligned>(exp_avg_sq + i, v);
  if constexpr (!std::is_void_v<Out>) {
    Pack<Out, kWidth> out;
    for (int k = 0; k < kWidth; ++k) from_float(out.items[k], p.items[k]);
    store_pack<kAligned>(static_cast<Out*>(a.out) + i, out);
  }
}

/// `Out` is void when `a.out` is null.
template <class Grad, class Out, bool kAligned>
PEFTDS_HOST_DEVICE void adam_thread(const AdamArrays& a, const AdamCoefficients& c, int64_t thread,
                                    int64_t threads) {
  for_groups<kAdamWidth>(a.count, thread, threads, [&](int64_t i, auto width) {
    adam_group<Grad, Out, decltype(width)::value, kAligned>(a, c, i);
  });
}

// ---- cast ---------------------------------------------------------------------------------------

/// 16 bytes of the wider type.
template <class From, class To>
inline constexpr int kCastWidth = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

template <class From, class To, bool kAligned>
PEFTDS_HOST_DEVICE void cast_thread(const From* from, To* to, int64_t count, int64_t thread,
                                    int64_t threads) {
  for_groups<kCastWidth<From, To>>(count, thread, threads, [&](int64_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto input = load_pack<kWidth, kAligned>(from + i);
    Pack<To, kWidth> output;
    for (int k = 0; k < kWidth; ++k) from_float(output.items[k], to_float(input.items[k]));
    store_pack<kAligned>(to + i, output);
  });
}

// ---- sum of squares -----------------------------------------------------------------------------

/// 16 bytes. The same without alignment, so that the order of summation does not depend on addresses.
template <class T>
inline constexpr int kSquareWidth = 16 / sizeof(T);

/// Sum of the thread's elements in fp64: the square of an fp32 value is exact there, and no sum of
/// squares of finite fp32 values can overflow.
template <class T, bool kAligned>
PEFTDS_HOST_DEVICE double square_thread(const T* data, int64_t count, int64_t thread, int64_t threads) {
  double sum = 0.0;
  for_groups<kSquareWidth<T>>(count, thread, threads, [&](int64_t i, auto width) {
    constexpr int kWidth = decltype(width)::value;
    const auto pack = load_pack<kWidth, kAligned>(data + i);
    for (int k = 0; k < kWidth; ++k) {
      const double x = to_float(pack.items[k]);
      sum = fma(x, x, sum);
    }
  });
  return sum;
}

}  // namespace peftds::kernels::cuda
