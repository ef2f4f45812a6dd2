// SPDX-License-Identifier: Apache-2.0
// Conversions between fp32 and the 16-bit formats, on bits. Narrowing rounds to nearest even;
// infinities and signed zeros survive, a NaN stays a NaN with its sign and leading payload bits
// (what the x86 F16C and AVX512-BF16 instructions do).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/dtype.h"
#include "kernels/macros.h"

namespace peftds::kernels {

PEFTDS_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PEFTDS_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

PEFTDS_HOST_DEVICE float widen(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

PEFTDS_HOST_DEVICE BFloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

PEFTDS_HOST_DEVICE float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity or NaN; a signalling NaN becomes quiet
    const uint32_t payload = (magnitude & 0x3ffu) << 13;
    return float_of(sign | 0x7f800000u | payload | (payload != 0 ? 0x400000u : 0u));
  }
  if (magnitude < 0x400u) {  // zero or subnormal: a multiple of 2^-24, exact in fp32
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
  }
  return float_of(sign | ((magnitude << 13) + (112u << 23)));
}

PEFTDS_HOST_DEVICE Float16 to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above rounds to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal in fp16
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: adding 0.5, whose ulp is 2^-24, makes the hardware round
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace peftds::kernels
