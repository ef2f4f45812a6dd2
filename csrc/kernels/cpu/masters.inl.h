// SPDX-License-Identifier: Apache-2.0
// How the Adam step stores the master parameter. Part of adam.inl.h.

// Where the new parameter goes besides: nowhere, through the caches, or past them.

struct Nowhere {
  template <class Part>
  static void put(Part, int64_t, Vec::Value) {}
  static void finish() {}
};

template <class T>
struct Cached {
  T* out;

  template <class Part>
  void put(Part part, int64_t i, Vec::Value value) const {
    part.store(out + i, value);
  }
  static void finish() {}
};

/// Saves reading the lines that are about to be written whole. `out` must be aligned to a whole vector.
template <class T>
struct Streamed {
  T* out;

  template <class Part>
  void put(Part part, int64_t i, Vec::Value value) const {
    part.stream(out + i, value);
  }
  static void finish() { Vec::fence(); }
};

template <class Sink>
struct Float32Master {
  float* param;
  Sink sink;

  template <class Part>
  Vec::Value load(Part part, int64_t i) const {
    return part.load(param + i);
  }
  template <class Part>
  void store(Part part, int64_t i, Vec::Value p) const {
    part.store(param + i, p);
    sink.put(part, i, p);
  }
  static void finish() { Sink::finish(); }
};

/// The master is kept as its bf16 weight and what that lacks:
///   bits of the master = (bits of the weight << 16) + remainder, modulo 2^32
/// The weight is the master rounded to nearest, a tie away from zero. With ties to even, the two masters
/// that tie into one weight from either side would have remainders 2^15 and -2^15, which are one 16-bit
/// pattern. As it is, every pattern of 32 bits has a pair of its own, and only NaNs are replaced, by the
/// quiet NaN of their sign, so that their weight is a NaN too.
struct SplitMaster {
  int16_t* remainder;
  uint16_t* weight;

  template <class Part>
  Vec::Value load(Part part, int64_t i) const {
    const Vec::Bits high = Vec::shift_left<16>(part.load_bits(weight + i));
    return Vec::value(Vec::add(high, part.load_bits(remainder + i)));
  }
  template <class Part>
  void store(Part part, int64_t i, Vec::Value p) const {
    const Vec::Bits sign = Vec::bit_and(Vec::bits(p), Vec::set1_bits(0x80000000u));
    const Vec::Bits nan = Vec::bit_or(sign, Vec::set1_bits(0x7fc00000u));
    const Vec::Bits bits = Vec::if_nan(p, nan, Vec::bits(p));
    part.store_bits(weight + i, Vec::shift_right<16>(Vec::add(bits, Vec::set1_bits(0x8000u))));
    part.store_bits(remainder + i, bits);
  }
  static void finish() {}
};

/// Below this an output may still be in a cache when it is read, and is better written there.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20;

template <class T>
bool is_streamed(const AdamArrays& a) {
  return a.count * static_cast<int64_t>(sizeof(T)) >= kStreamBytes &&
         reinterpret_cast<uintptr_t>(a.out) % (sizeof(T) * Vec::kWidth) == 0;
}

/// Calls `function(master)`.
template <class Function>
void with_master(const AdamArrays& a, int64_t begin, Function function) {
  if (a.split) {
    return function(SplitMaster{static_cast<int16_t*>(a.param), static_cast<uint16_t*>(a.out)});
  }
  float* param = static_cast<float*>(a.param);
  if (a.out == nullptr) return function(Float32Master<Nowhere>{param, {}});
  with_type(a.out_dtype, [&](auto type) {
    using T = decltype(type);
    T* out = static_cast<T*>(a.out);
    if (is_streamed<T>(a) && begin % Vec::kWidth == 0) {
      function(Float32Master<Streamed<T>>{param, {out}});
    } else {
      function(Float32Master<Cached<T>>{param, {out}});
    }
  });
}
