// SPDX-License-Identifier: Apache-2.0
// Arrays of any element type with seeded contents, for the kernels' tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/half.h"

namespace peftds::test {

using kernels::DType;

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float32";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFloat16: return "float16";
  }
  return "unknown";
}

/// Memory that starts on a 64-byte border and, for the address sanitizer, ends with the last element.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{64}); }
  bool operator==(const AlignedAllocator&) const = default;
};

/// `count` elements, the first of which lies `offset` elements behind a 64-byte border.
class Array {
 public:
  Array(DType dtype, int64_t count, int64_t offset = 0)
      : dtype_(dtype),
        count_(count),
        offset_(offset),
        storage_(static_cast<size_t>((count + offset) * kernels::size_of(dtype))) {}

  [[nodiscard]] void* data() { return storage_.data() + offset_ * kernels::size_of(dtype_); }
  [[nodiscard]] float* floats() { return static_cast<float*>(data()); }
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] int64_t count() const { return count_; }

  [[nodiscard]] float get(int64_t i) {
    switch (dtype_) {
      case DType::kBFloat16: return kernels::widen(static_cast<kernels::BFloat16*>(data())[i]);
      case DType::kFloat16: return kernels::widen(static_cast<kernels::Float16*>(data())[i]);
      case DType::kFloat32: break;
    }
    return floats()[i];
  }
  void set(int64_t i, float value) {
    switch (dtype_) {
      case DType::kBFloat16: static_cast<kernels::BFloat16*>(data())[i] = kernels::to_bfloat16(value); return;
      case DType::kFloat16: static_cast<kernels::Float16*>(data())[i] = kernels::to_float16(value); return;
      case DType::kFloat32: break;
    }
    floats()[i] = value;
  }

  /// Sign times 10 to a uniform power, so that magnitudes vary.
  void fill(uint32_t seed, double min_power, double max_power, bool positive = false) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> power(min_power, max_power);
    for (int64_t i = 0; i < count_; ++i) {
      const double magnitude = std::pow(10.0, power(random));
      set(i, static_cast<float>(!positive && random() % 2 == 0 ? -magnitude : magnitude));
    }
  }

  /// Same bits, in the elements before the offset too.
  [[nodiscard]] bool operator==(const Array& other) const = default;

 private:
  DType dtype_;
  int64_t count_;
  int64_t offset_;
  std::vector<char, AlignedAllocator<char>> storage_;
};

/// All that one Adam step reads and writes.
struct AdamState {
  Array param, grad, exp_avg, exp_avg_sq, out;
  bool has_out;

  /// `out_dtype` null: without a low-precision output. Every array starts at `offset`.
  AdamState(int64_t count, DType grad_dtype, const DType* out_dtype, int64_t offset = 0)
      : param(DType::kFloat32, count, offset),
        grad(grad_dtype, count, offset),
        exp_avg(DType::kFloat32, count, offset),
        exp_avg_sq(DType::kFloat32, count, offset),
        out(out_dtype != nullptr ? *out_dtype : DType::kFloat32, count, offset),
        has_out(out_dtype != nullptr) {
    param.fill(1, -3, 1);
    grad.fill(2, -4, 0);
    exp_avg.fill(3, -4, 0);
    exp_avg_sq.fill(4, -8, 0, true);
  }

  [[nodiscard]] kernels::AdamArrays arrays() {
    return {.param = param.floats(),
            .grad = grad.data(),
            .grad_dtype = grad.dtype(),
            .exp_avg = exp_avg.floats(),
            .exp_avg_sq = exp_avg_sq.floats(),
            .out = has_out ? out.data() : nullptr,
            .out_dtype = out.dtype(),
            .count = param.count()};
  }

  [[nodiscard]] bool operator==(const AdamState& other) const = default;
};

/// Calls `body` with null and with each DType: the possible outputs of an Adam step.
template <class Body>
void for_each_out(Body body) {
  body(static_cast<const DType*>(nullptr));
  for (const DType& dtype : kDTypes) body(&dtype);
}

}  // namespace peftds::test
