// SPDX-License-Identifier: Apache-2.0
// How the Adam step stores the moments. Part of adam.inl.h. Of every kBlock elements, open is called
// first, then load and store for each vector, then close; what they share is kept in a Block.

struct Float32Moments {
  static constexpr int64_t kBlock = std::numeric_limits<int64_t>::max();
  struct Block {};

  float* m_data;
  float* v_data;

  Float32Moments(const AdamArrays& a, const AdamCoefficients&)
      : m_data(static_cast<float*>(a.exp_avg)), v_data(static_cast<float*>(a.exp_avg_sq)) {}

  static Block open(int64_t) { return {}; }
  template <class Part>
  void load(Part part, int64_t i, const Block&, Vec::Value& m, Vec::Value& v) const {
    m = part.load(m_data + i);
    v = part.load(v_data + i);
  }
  template <class Part>
  void store(Part part, int64_t i, Block&, Vec::Value m, Vec::Value v) const {
    part.store(m_data + i, m);
    part.store(v_data + i, v);
  }
  static void close(int64_t, int64_t, Block) {}
};

/// Random bits of elements, the same whatever vectors and calls they are in: a hash of the step and of the
/// element's number, modulo 2^32. The lower half is for the first moment, the upper one for the second.
struct RandomBits {
  uint32_t seed;
  uint32_t first_element;

  RandomBits(const AdamArrays& a, const AdamCoefficients& c)
      : seed(c.seed), first_element(static_cast<uint32_t>(a.first_element)) {}

  [[nodiscard]] Vec::Bits at(int64_t i) const {
    const Vec::Bits element =
        Vec::add(Vec::set1_bits(first_element + static_cast<uint32_t>(i)), Vec::lane_numbers());
    Vec::Bits x = Vec::bit_xor(element, Vec::set1_bits(seed));  // then as mix_bits
    x = Vec::mul(Vec::bit_xor(x, Vec::shift_right<16>(x)), Vec::set1_bits(0x7feb352du));
    x = Vec::mul(Vec::bit_xor(x, Vec::shift_right<15>(x)), Vec::set1_bits(0x846ca68bu));
    return Vec::bit_xor(x, Vec::shift_right<16>(x));
  }
  static Vec::Bits lower(Vec::Bits x) { return Vec::bit_and(x, Vec::set1_bits(0xffffu)); }
  static Vec::Bits upper(Vec::Bits x) { return Vec::shift_right<16>(x); }
};

/// bf16 patterns of `x` after adding to the bits that are cut off. A NaN stays one, with its sign.
inline Vec::Bits cut_to_bfloat16(Vec::Value x, Vec::Bits added) {
  const Vec::Bits quiet = Vec::bit_or(Vec::shift_right<16>(Vec::bits(x)), Vec::set1_bits(0x40u));
  return Vec::if_nan(x, quiet, Vec::shift_right<16>(Vec::add(Vec::bits(x), added)));
}

struct BFloat16Moments {
  static constexpr int64_t kBlock = Float32Moments::kBlock;
  struct Block {};

  BFloat16* m_data;
  BFloat16* v_data;
  RandomBits random;
  bool stochastic;

  BFloat16Moments(const AdamArrays& a, const AdamCoefficients& c)
      : m_data(static_cast<BFloat16*>(a.exp_avg)),
        v_data(static_cast<BFloat16*>(a.exp_avg_sq)),
        random(a, c),
        stochastic(c.stochastic) {}

  static Block open(int64_t) { return {}; }
  template <class Part>
  void load(Part part, int64_t i, const Block&, Vec::Value& m, Vec::Value& v) const {
    m = part.load(m_data + i);
    v = part.load(v_data + i);
  }
  template <class Part>
  void store(Part part, int64_t i, Block&, Vec::Value m, Vec::Value v) const {
    if (!stochastic) {
      part.store(m_data + i, m);
      part.store(v_data + i, v);
      return;
    }
    const Vec::Bits bits = random.at(i);
    part.store_bits(&m_data[i].bits, cut_to_bfloat16(m, RandomBits::lower(bits)));
    part.store_bits(&v_data[i].bits, cut_to_bfloat16(v, RandomBits::upper(bits)));
  }
  static void close(int64_t, int64_t, Block) {}
};

#include "kernels/cpu/int8_moments.inl.h"
