// SPDX-License-Identifier: Apache-2.0
// Loads and stores of several neighbouring elements.
#pragma once

#include <cstdint>

#include "kernels/half.h"
#include "kernels/macros.h"

namespace peftds::kernels::cuda {

/// `kWidth` elements that one instruction can move.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T items[kWidth];
};

/// True if a Pack can be read or written at `pointer` as a whole; null counts as aligned.
template <class T, int kWidth>
[[nodiscard]] bool is_aligned(const void* pointer) noexcept {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Pack<T, kWidth>) == 0;
}

/// Reads kWidth elements: at once if `kAligned` promises that is_aligned(p), else one by one.
template <int kWidth, bool kAligned, class T>
PEFTDS_HOST_DEVICE Pack<T, kWidth> load_pack(const T* p) {
  if constexpr (kAligned) {
    return *reinterpret_cast<const Pack<T, kWidth>*>(p);
  } else {
    Pack<T, kWidth> pack;
    for (int i = 0; i < kWidth; ++i) pack.items[i] = p[i];
    return pack;
  }
}

/// Writes kWidth elements, as load_pack reads them.
template <bool kAligned, class T, int kWidth>
PEFTDS_HOST_DEVICE void store_pack(T* p, const Pack<T, kWidth>& pack) {
  if constexpr (kAligned) {
    *reinterpret_cast<Pack<T, kWidth>*>(p) = pack;
  } else {
    for (int i = 0; i < kWidth; ++i) p[i] = pack.items[i];
  }
}

// One element to fp32 and back; see half.h.
PEFTDS_HOST_DEVICE float to_float(float value) { return value; }
PEFTDS_HOST_DEVICE float to_float(BFloat16 value) { return widen(value); }
PEFTDS_HOST_DEVICE float to_float(Float16 value) { return widen(value); }
PEFTDS_HOST_DEVICE void from_float(float& to, float value) { to = value; }
PEFTDS_HOST_DEVICE void from_float(BFloat16& to, float value) { to = to_bfloat16(value); }
PEFTDS_HOST_DEVICE void from_float(Float16& to, float value) { to = to_float16(value); }

}  // namespace peftds::kernels::cuda
