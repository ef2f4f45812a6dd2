// SPDX-License-Identifier: Apache-2.0
// The arrays of one Adam step in every form that the CPU kernel knows, for tests.
#pragma once

#include <vector>

#include "arrays.h"
#include "kernels/adam_math.h"

namespace peftds::test {

using kernels::MomentFormat;

/// How a state is stored.
struct Form {
  bool split;
  MomentFormat moments;
  bool stochastic;
};

inline std::vector<Form> all_forms() {
  std::vector<Form> forms;
  for (const bool split : {false, true}) {
    for (const auto moments : {MomentFormat::kFloat32, MomentFormat::kBFloat16, MomentFormat::kInt8}) {
      for (const bool stochastic : {false, true}) forms.push_back({split, moments, stochastic});
    }
  }
  return forms;
}

/// `count` elements of T, the first of which lies `offset` elements behind a 64-byte border.
template <class T>
struct Elements {
  int64_t offset;
  std::vector<T, AlignedAllocator<T>> storage;

  explicit Elements(int64_t count, int64_t offset_ = 0)
      : offset(offset_), storage(static_cast<size_t>(count + offset_)) {}
  [[nodiscard]] T* data() { return storage.data() + offset; }
  bool operator==(const Elements&) const = default;
};

/// A state with seeded contents: any remainders, any codes, scales of many magnitudes.
struct CompactState {
  Form form;
  AdamState plain;  // the arrays that are not compact
  Elements<int16_t> remainder;
  Array m16, v16;
  Elements<uint8_t> m8, v8;
  Elements<float> m_scale, v_scale;
  int64_t first_element = 0;

  CompactState(const Form& form_, int64_t count, DType grad, const DType* out, int64_t offset = 0)
      : form(form_),
        plain(count, grad, out, offset),
        remainder(count, offset),
        m16(DType::kBFloat16, count, offset),
        v16(DType::kBFloat16, count, offset),
        m8(count, offset),
        v8(count, offset),
        m_scale(blocks(count)),
        v_scale(blocks(count)) {
    if (form.split) plain.out = Array(DType::kBFloat16, count, offset), plain.out.fill(5, -3, 1);
    m16.fill(6, -4, 0);
    v16.fill(7, -8, 0, true);
    std::mt19937 random(8);
    for (int64_t i = 0; i < count; ++i) {
      remainder.data()[i] = static_cast<int16_t>(random());
      m8.data()[i] = static_cast<uint8_t>(random());
      v8.data()[i] = static_cast<uint8_t>(random());
    }
    for (int64_t i = 0; i < blocks(count); ++i) {
      m_scale.data()[i] = std::pow(10.0f, static_cast<float>(random() % 5) - 4.0f);
      v_scale.data()[i] = std::pow(10.0f, static_cast<float>(random() % 9) - 8.0f);
    }
  }

  static int64_t blocks(int64_t count) { return (count + kernels::kMomentBlock - 1) / kernels::kMomentBlock; }

  [[nodiscard]] kernels::AdamArrays arrays() {
    kernels::AdamArrays a = plain.arrays();
    a.split = form.split;
    a.moments = form.moments;
    a.first_element = first_element;
    if (form.split) {
      a.param = remainder.data();
      a.out = plain.out.data();
      a.out_dtype = DType::kBFloat16;
    }
    if (form.moments == MomentFormat::kBFloat16) {
      a.exp_avg = m16.data();
      a.exp_avg_sq = v16.data();
    } else if (form.moments == MomentFormat::kInt8) {
      a.exp_avg = m8.data();
      a.exp_avg_sq = v8.data();
      a.exp_avg_scale = m_scale.data();
      a.exp_avg_sq_scale = v_scale.data();
    }
    return a;
  }

  /// The arrays from element `begin` on, which is a multiple of kMomentBlock.
  [[nodiscard]] kernels::AdamArrays piece(int64_t begin, int64_t end) {
    const kernels::AdamArrays whole = arrays();
    const auto later = [begin](auto* data, int64_t size) -> void* {
      return data == nullptr ? nullptr : (char*)data + begin * size;
    };
    const int64_t moment_size = form.moments == MomentFormat::kInt8       ? 1
                                : form.moments == MomentFormat::kBFloat16 ? 2
                                                                          : 4;
    kernels::AdamArrays a = whole;
    a.count = end - begin;
    a.param = later(whole.param, form.split ? 2 : 4);
    a.grad = later(whole.grad, kernels::size_of(whole.grad_dtype));
    a.exp_avg = later(whole.exp_avg, moment_size);
    a.exp_avg_sq = later(whole.exp_avg_sq, moment_size);
    a.out = later(whole.out, kernels::size_of(whole.out_dtype));
    if (a.exp_avg_scale != nullptr) {
      a.exp_avg_scale += begin / kernels::kMomentBlock;
      a.exp_avg_sq_scale += begin / kernels::kMomentBlock;
    }
    a.first_element = whole.first_element + begin;
    return a;
  }

  /// Bits of the master; the split one joined in 64-bit arithmetic.
  [[nodiscard]] uint32_t master_bits(int64_t i) {
    if (!form.split) return kernels::bits_of(plain.param.get(i));
    const int64_t high = static_cast<kernels::BFloat16*>(plain.out.data())[i].bits;
    return static_cast<uint32_t>(high * 65536 + remainder.data()[i]);
  }
  /// Makes `bits` the split master of element i.
  void set_split_master(int64_t i, uint32_t bits) {
    const int64_t rest = bits & 0xffffu;
    const int64_t signed_rest = rest >= 0x8000 ? rest - 0x10000 : rest;
    const int64_t weight = (static_cast<int64_t>(bits) - signed_rest) / 65536;
    static_cast<kernels::BFloat16*>(plain.out.data())[i].bits = static_cast<uint16_t>(weight);
    remainder.data()[i] = static_cast<int16_t>(signed_rest);
  }

  /// Same bits everywhere.
  [[nodiscard]] bool same(const CompactState& other) const {
    return plain == other.plain && remainder == other.remainder && m16 == other.m16 && v16 == other.v16 &&
           m8 == other.m8 && v8 == other.v8 && m_scale == other.m_scale && v_scale == other.v_scale;
  }
};

}  // namespace peftds::test
