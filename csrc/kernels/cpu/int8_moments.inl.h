// SPDX-License-Identifier: Apache-2.0
// Moments as codes of the dynamic map. Part of moments.inl.h.

inline Vec::Bits magnitude_bits(Vec::Value x) {
  return Vec::bit_and(Vec::bits(x), Vec::set1_bits(0x7fffffffu));
}

/// Values in [0, 1] of q, which dynamic_map.h explains.
inline Vec::Value value_of(const DynamicMap& map, Vec::Value q) {
  const Vec::Bits entry = Vec::shift_right<23>(Vec::bits(q));
  return Vec::fma(q, Vec::lookup(map.step, entry), Vec::lookup(map.start, entry));
}

inline Vec::Value decode_signed(Vec::Bits code) {
  const Vec::Value k = Vec::add(Vec::to_float(code), Vec::set1(-127.0f));
  const Vec::Value value = value_of(kSignedMap, Vec::add(Vec::value(magnitude_bits(k)), Vec::set1(0.5f)));
  const Vec::Bits sign = Vec::bit_and(Vec::bits(k), Vec::set1_bits(0x80000000u));
  return Vec::value(Vec::bit_or(Vec::bits(value), sign));
}

inline Vec::Value decode_unsigned(Vec::Bits code) {
  return value_of(kUnsignedMap, Vec::add(Vec::to_float(code), Vec::set1(1.0f)));
}

/// The decade of x in [0, 1], or 7 in the gap below 1. The leading bits of a number are a rough logarithm,
/// which decides between two neighbours; the border between these then decides exactly.
inline Vec::Bits decade_of(const DynamicMap& map, Vec::Value x) {
  constexpr float kMiddle = 3e-7f;     // in decade 0, as ten times this is in decade 1, and so on
  constexpr uint16_t kLog10Of2 = 154;  // 2^9 * log10(2): `above` counts in units of 2^-7 of log2
  const Vec::Bits above =
      Vec::sub(Vec::bits(Vec::max(x, Vec::set1(kMiddle))), Vec::set1_bits(bits_of(kMiddle)));
  const Vec::Bits lower = Vec::high_half_of_product(Vec::shift_right<16>(above), kLog10Of2);
  return Vec::add_one_if_reached(lower, x, Vec::lookup(map.end, lower));
}

/// k of the magnitudes x in [0, 1], rounded after adding to its lower 16 bits. If x is a NaN, any k.
inline Vec::Bits encode(const DynamicMap& map, Vec::Value x, Vec::Bits added) {
  const Vec::Bits decade = decade_of(map, x);
  // Not fused, so that tensor operations can compute the same.
  const Vec::Value scaled = Vec::mul(x, Vec::lookup(map.slope, decade));
  Vec::Value k = Vec::add(scaled, Vec::lookup(map.intercept, decade));
  k = Vec::min(k, Vec::mul(x, Vec::set1(map.slope_to_zero)));
  k = Vec::min(k, Vec::set1(map.last));  // which a NaN becomes
  return Vec::shift_right<16>(Vec::add(Vec::truncate(k), added));
}

/// k with the sign of m; -1 becomes the most negative value.
inline Vec::Bits signed_code(Vec::Bits k, Vec::Value m) {
  const Vec::Bits sign = Vec::sign_mask(Vec::bits(m));
  const Vec::Bits with_sign = Vec::sub(Vec::bit_xor(k, sign), sign);
  return Vec::max(Vec::add(with_sign, Vec::set1_bits(127)), Vec::set1_bits(0));
}

/// What the block's codes are relative to.
struct BlockScale {
  float absmax;   // NaN if an element is not finite, which spoils the block in the next step
  float inverse;  // 0 if there is nothing to divide by

  /// `largest` are the bits of magnitudes; as integers they ascend with them, and NaNs are above all.
  explicit BlockScale(Vec::Bits largest) {
    float lanes[Vec::kWidth];
    Vec::store(lanes, Vec::value(largest));
    uint32_t bits = 0;
    for (const float lane : lanes) bits = std::max(bits, bits_of(lane));
    // A subnormal's inverse could overflow; relative to the least normal number it is held as well.
    absmax = bits == 0 ? 0.0f : std::max(float_of(bits), std::numeric_limits<float>::min());
    if (bits >= kInfinity) absmax = std::numeric_limits<float>::quiet_NaN();
    inverse = bits == 0 || bits >= kInfinity ? 0.0f : 1.0f / absmax;
  }

  static constexpr uint32_t kInfinity = 0x7f800000u;
};

/// The codes of both moments.
struct MomentCodes {
  uint8_t* m;
  uint8_t* v;

  /// Encodes elements from i on; the inverses are those of their block's scales.
  template <class Part>
  void put(Part part, int64_t i, Vec::Value new_m, Vec::Value new_v, float m_inverse, float v_inverse,
           Vec::Bits random) const {
    const Vec::Value m_size = Vec::mul(Vec::value(magnitude_bits(new_m)), Vec::set1(m_inverse));
    const Vec::Bits m_k = encode(kSignedMap, m_size, RandomBits::lower(random));
    part.store_bits(m + i, signed_code(m_k, new_m));
    const Vec::Bits v_bits = magnitude_bits(new_v);
    const Vec::Value v_size = Vec::mul(Vec::value(v_bits), Vec::set1(v_inverse));
    const Vec::Bits v_k = encode(kUnsignedMap, v_size, RandomBits::upper(random));
    // A second moment that became 0 would make the element's next update m / eps.
    part.store_bits(v + i, Vec::max(v_k, Vec::min(v_bits, Vec::set1_bits(1))));
  }
};

/// The largest magnitude is known only after the last element of a block, so new moments wait in buffers.
struct Int8Moments {
  static constexpr int64_t kBlock = kMomentBlock;
  struct Block {
    int64_t start;
    Vec::Value m_scale, v_scale;
    Vec::Bits m_largest, v_largest;
  };

  MomentCodes codes;
  float* m_scales;
  float* v_scales;
  RandomBits random;
  bool stochastic;
  alignas(64) float m_new[kBlock];
  alignas(64) float v_new[kBlock];

  Int8Moments(const AdamArrays& a, const AdamCoefficients& c)
      : codes{static_cast<uint8_t*>(a.exp_avg), static_cast<uint8_t*>(a.exp_avg_sq)},
        m_scales(a.exp_avg_scale),
        v_scales(a.exp_avg_sq_scale),
        random(a, c),
        stochastic(c.stochastic) {}

  [[nodiscard]] Block open(int64_t start) const {
    const int64_t number = start / kBlock;
    return {.start = start,
            .m_scale = Vec::set1(m_scales[number]),
            .v_scale = Vec::set1(v_scales[number]),
            .m_largest = Vec::set1_bits(0),
            .v_largest = Vec::set1_bits(0)};
  }

  template <class Part>
  void load(Part part, int64_t i, const Block& block, Vec::Value& m, Vec::Value& v) const {
    m = Vec::mul(decode_signed(part.load_bits(codes.m + i)), block.m_scale);
    v = Vec::mul(decode_unsigned(part.load_bits(codes.v + i)), block.v_scale);
  }

  template <class Part>
  void store(Part part, int64_t i, Block& block, Vec::Value m, Vec::Value v) {
    block.m_largest = keep(part, m_new + (i - block.start), m, block.m_largest);
    block.v_largest = keep(part, v_new + (i - block.start), v, block.v_largest);
  }

  void close(int64_t start, int64_t stop, Block block) const {
    const BlockScale m(block.m_largest), v(block.v_largest);
    m_scales[start / kBlock] = m.absmax;
    v_scales[start / kBlock] = v.absmax;
    const auto put = [this, start, m, v, to = codes, numbers = random, chance = stochastic](auto part,
                                                                                            int64_t i) {
      const Vec::Bits halves = Vec::set1_bits(0x80008000u);  // to nearest
      to.put(part, i, Vec::load(m_new + (i - start)), Vec::load(v_new + (i - start)), m.inverse, v.inverse,
             chance ? numbers.at(i) : halves);
    };
    int64_t i = start;
    for (; i + Vec::kWidth <= stop; i += Vec::kWidth) put(Whole{}, i);
    if (i < stop) put(Rest{stop - i}, i);
  }

 private:
  /// Puts x into a buffer, elements that do not exist as 0, and returns the larger magnitudes.
  template <class Part>
  static Vec::Bits keep(Part part, float* buffer, Vec::Value x, Vec::Bits largest) {
    if constexpr (!std::is_same_v<Part, Whole>) {
      Vec::store(buffer, Vec::set1(0.0f));
      part.store(buffer, x);
      x = Vec::load(buffer);
    } else {
      Vec::store(buffer, x);
    }
    return Vec::max(largest, magnitude_bits(x));
  }
};
