// SPDX-License-Identifier: Apache-2.0
// The loops behind every Variant, written once over a vector type. Each instruction set's file
// includes this inside its own namespace and target region, after defining `Vec`:
//   Value, kWidth; load, store and stream (past the caches, aligned) for float, BFloat16, Float16; fence;
//   set1, add, mul, fma, sqrt, div;
//   min and max, which return their second argument if one is a NaN;
//   Bits and the operations on them, for adam.inl.h;
//   SquareSum with add16(const T*) and total().
// No include guard: it is meant to be included more than once.

/// A vector-sized copy of the last, partial vector of an array.
template <class T>
struct Tail {
  T buffer[Vec::kWidth] = {};

  Tail(const T* data, int64_t rest) { std::memcpy(buffer, data, static_cast<size_t>(rest) * sizeof(T)); }
  void write(T* data, int64_t rest) const {
    std::memcpy(data, buffer, static_cast<size_t>(rest) * sizeof(T));
  }
};

/// Calls `function` with a value of the element type.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kBFloat16: return function(BFloat16{});
    case DType::kFloat16: return function(Float16{});
    case DType::kFloat32: break;
  }
  return function(0.0f);
}

#include "kernels/cpu/adam.inl.h"

template <class T>
void add_squares(Vec::SquareSum& sum, const T* data, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) sum.add16(data + i);
  if (i < end) {
    T rest[16] = {};
    std::memcpy(rest, data + i, static_cast<size_t>(end - i) * sizeof(T));
    sum.add16(rest);
  }
}

template <class T>
double squared_norm_range(const void* input, int64_t begin, int64_t end) {
  Vec::SquareSum sum;
  add_squares(sum, static_cast<const T*>(input), begin, end);
  return sum.total();
}

/// Elements that accumulate_range writes before it reads them again, from the nearest cache, to square them.
inline constexpr int64_t kStrip = 1024;

template <class Grad, class Buffer>
void accumulate_vector(const Grad* grad, Buffer* buffer, bool add) {
  const Vec::Value value = Vec::load(grad);
  Vec::store(buffer, add ? Vec::add(Vec::load(buffer), value) : value);
}

template <class Grad, class Buffer>
double accumulate_range(const void* grad_data, void* buffer_data, bool add, int64_t begin, int64_t end) {
  const Grad* grad = static_cast<const Grad*>(grad_data);
  Buffer* buffer = static_cast<Buffer*>(buffer_data);
  Vec::SquareSum sum;
  for (int64_t strip = begin; strip < end; strip += kStrip) {
    const int64_t stop = std::min(end, strip + kStrip);
    int64_t i = strip;
    for (; i + Vec::kWidth <= stop; i += Vec::kWidth) accumulate_vector(grad + i, buffer + i, add);
    if (const int64_t rest = stop - i; rest > 0) {
      const Tail<Grad> g(grad + i, rest);
      Tail<Buffer> b(buffer + i, rest);
      accumulate_vector(g.buffer, b.buffer, add);
      b.write(buffer + i, rest);
    }
    add_squares(sum, buffer, strip, stop);
  }
  return sum.total();
}

template <class From, class To>
void cast_range(const void* input, void* output, int64_t begin, int64_t end) {
  const From* from = static_cast<const From*>(input);
  To* to = static_cast<To*>(output);
  int64_t i = begin;
  for (; i + Vec::kWidth <= end; i += Vec::kWidth) Vec::store(to + i, Vec::load(from + i));
  const int64_t rest = end - i;
  if (rest == 0) return;
  const Tail<From> tail(from + i, rest);
  Tail<To> converted(to + i, rest);
  Vec::store(converted.buffer, Vec::load(tail.buffer));
  converted.write(to + i, rest);
}

double squared_norm(const void* input, DType dtype, int64_t begin, int64_t end) {
  return with_type(dtype, [&](auto t) { return squared_norm_range<decltype(t)>(input, begin, end); });
}

double accumulate(const void* grad, DType grad_dtype, void* buffer, DType buffer_dtype, bool add,
                  int64_t begin, int64_t end) {
  return with_type(grad_dtype, [&](auto g) {
    return with_type(buffer_dtype, [&](auto b) {
      return accumulate_range<decltype(g), decltype(b)>(grad, buffer, add, begin, end);
    });
  });
}

void cast(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t begin,
          int64_t end) {
  with_type(input_dtype, [&](auto from) {
    with_type(output_dtype,
              [&](auto to) { cast_range<decltype(from), decltype(to)>(input, output, begin, end); });
  });
}
