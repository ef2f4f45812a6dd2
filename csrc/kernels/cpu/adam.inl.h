// SPDX-License-Identifier: Apache-2.0
// The loop of the Adam step, written once over a vector type and over the forms in which the master
// parameter and the moments are stored. Part of loops.inl.h, which see.

#include "kernels/adam_update.inl.h"

// How many elements of a vector exist: all, or the first few of an array's last one.

struct Whole {
  template <class T>
  static Vec::Value load(const T* p) {
    return Vec::load(p);
  }
  template <class T>
  static Vec::Bits load_bits(const T* p) {
    return Vec::load_bits(p);
  }
  template <class T>
  static void store(T* p, Vec::Value x) {
    Vec::store(p, x);
  }
  template <class T>
  static void stream(T* p, Vec::Value x) {
    Vec::stream(p, x);
  }
  template <class T>
  static void store_bits(T* p, Vec::Bits x) {
    Vec::store_bits(p, x);
  }
};

struct Rest {
  int64_t count;

  template <class T>
  [[nodiscard]] Vec::Value load(const T* p) const {
    return Vec::load(Tail<T>(p, count).buffer);
  }
  template <class T>
  [[nodiscard]] Vec::Bits load_bits(const T* p) const {
    return Vec::load_bits(Tail<T>(p, count).buffer);
  }
  template <class T>
  void store(T* p, Vec::Value x) const {
    Tail<T> tail(p, count);
    Vec::store(tail.buffer, x);
    tail.write(p, count);
  }
  template <class T>
  void stream(T* p, Vec::Value x) const {
    store(p, x);
  }
  template <class T>
  void store_bits(T* p, Vec::Bits x) const {
    Tail<T> tail(p, count);
    Vec::store_bits(tail.buffer, x);
    tail.write(p, count);
  }
};

#include "kernels/cpu/masters.inl.h"
#include "kernels/cpu/moments.inl.h"

template <class Grad, class Moments, class Master>
void adam_range(const AdamArrays& a, const AdamCoefficients& coefficients, const Master master, int64_t begin,
                int64_t end) {
  const AdamCoefficients c = coefficients;  // a local copy stays in registers
  const Grad* grad = static_cast<const Grad*>(a.grad);
  Moments moments(a, c);
  const auto step = [&](auto part, int64_t i, typename Moments::Block& block) {
    Vec::Value p = master.load(part, i);
    Vec::Value m, v;
    moments.load(part, i, block, m, v);
    adam_update<Vec>(part.load(grad + i), p, m, v, c);
    master.store(part, i, p);
    moments.store(part, i, block, m, v);
  };
  for (int64_t start = begin; start < end;) {
    const int64_t stop = start + std::min(end - start, Moments::kBlock);
    typename Moments::Block block = moments.open(start);
    int64_t i = start;
    for (; i + Vec::kWidth <= stop; i += Vec::kWidth) step(Whole{}, i, block);
    if (const int64_t rest = stop - i; rest > 0) step(Rest{rest}, i, block);
    moments.close(start, stop, block);
    start = stop;
  }
  Master::finish();
}

void adam(const AdamArrays& a, const AdamCoefficients& c, int64_t begin, int64_t end) {
  with_type(a.grad_dtype, [&](auto grad) {
    with_master(a, begin, [&](auto master) {
      using Grad = decltype(grad);
      switch (a.moments) {
        case MomentFormat::kFloat32: return adam_range<Grad, Float32Moments>(a, c, master, begin, end);
        case MomentFormat::kBFloat16: return adam_range<Grad, BFloat16Moments>(a, c, master, begin, end);
        case MomentFormat::kInt8: return adam_range<Grad, Int8Moments>(a, c, master, begin, end);
      }
    });
  });
}
