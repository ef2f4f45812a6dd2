// SPDX-License-Identifier: Apache-2.0
// Sixteen elements at a time. See avx2.cpp for why the target is a pragma and not a flag.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/cpu/variants.h"
#include "kernels/dynamic_map.h"
#include "kernels/half.h"
#include "kernels/macros.h"

// GCC's own intrinsics read a register that they leave undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")

namespace peftds::kernels::cpu {
namespace avx512 {
namespace {

struct Vec {
  using Value = __m512;
  static constexpr int64_t kWidth = 16;

  static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  static __m512 load(const BFloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m512 load(const Float16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
  static void store(BFloat16* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(x));
  }
  static void store(Float16* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_float16(x));
  }
  static void stream(float* p, __m512 x) { _mm512_stream_ps(p, x); }
  static void stream(BFloat16* p, __m512 x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bfloat16(x));
  }
  static void stream(Float16* p, __m512 x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_float16(x));
  }
  static void fence() { _mm_sfence(); }

  static __m256i to_bfloat16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(words);
  }
  static __m256i to_float16(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

  static __m512 set1(float x) { return _mm512_set1_ps(x); }
  static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 sqrt(__m512 a) { return _mm512_sqrt_ps(a); }
  static __m512 div(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }

  // ---- patterns of 32 bits: signed integers, modulo 2^32 ----

  using Bits = __m512i;

  static __m512i bits(__m512 x) { return _mm512_castps_si512(x); }
  static __m512 value(__m512i x) { return _mm512_castsi512_ps(x); }
  static __m512i set1_bits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static __m512i lane_numbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  static __m512i load_bits(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m512i load_bits(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512i load_bits(const int16_t* p) {
    return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_bits(uint8_t* p, __m512i x) {  // of 0 to 255
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  static void store_bits(uint16_t* p, __m512i x) {  // the lower halves
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  static void store_bits(int16_t* p, __m512i x) { store_bits(reinterpret_cast<uint16_t*>(p), x); }

  static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i sub(__m512i a, __m512i b) { return _mm512_sub_epi32(a, b); }
  static __m512i mul(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
  static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
  static __m512i max(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  static __m512i bit_and(__m512i a, __m512i b) { return _mm512_and_si512(a, b); }
  static __m512i bit_or(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
  static __m512i bit_xor(__m512i a, __m512i b) { return _mm512_xor_si512(a, b); }
  static __m512i sign_mask(__m512i x) { return _mm512_srai_epi32(x, 31); }
  template <int kBits>
  static __m512i shift_left(__m512i x) {
    return _mm512_slli_epi32(x, kBits);
  }
  template <int kBits>
  static __m512i shift_right(__m512i x) {
    return _mm512_srli_epi32(x, kBits);
  }
  static __m512i high_half_of_product(__m512i x, uint16_t factor) {  // of x below 2^16
    return _mm512_mulhi_epu16(x, _mm512_set1_epi32(factor));
  }

  static __m512 to_float(__m512i x) { return _mm512_cvtepi32_ps(x); }
  static __m512i truncate(__m512 x) { return _mm512_cvttps_epi32(x); }
  static __m512 min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }  // a < b ? a : b
  static __m512 max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }  // a > b ? a : b
  static __m512i if_nan(__m512 x, __m512i yes, __m512i no) {
    return _mm512_mask_mov_epi32(no, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), yes);
  }
  static __m512i add_one_if_reached(__m512i number, __m512 x, __m512 border) {
    const __mmask16 reached = _mm512_cmp_ps_mask(x, border, _CMP_GE_OQ);
    return _mm512_mask_add_epi32(number, reached, number, set1_bits(1));
  }
  static __m512 lookup(const Table& table, __m512i index) {  // of the lower 3 bits
    return _mm512_permutexvar_ps(index, _mm512_load_ps(table.entries));
  }

  struct SquareSum {
    __m512d lanes[2] = {};

    template <class T>
    void add16(const T* p) {
      const __m512 x = load(p);
      add(lanes[0], _mm512_castps512_ps256(x));
      add(lanes[1], _mm512_extractf32x8_ps(x, 1));
    }
    static void add(__m512d& lane, __m256 x) {
      const __m512d wide = _mm512_cvtps_pd(x);
      lane = _mm512_fmadd_pd(wide, wide, lane);
    }
    [[nodiscard]] double total() const {
      double stored[16];
      _mm512_storeu_pd(stored, lanes[0]);
      _mm512_storeu_pd(stored + 8, lanes[1]);
      double sum = 0.0;
      for (const double lane : stored) sum += lane;
      return sum;
    }
  };
};

#include "kernels/cpu/loops.inl.h"

}  // namespace
}  // namespace avx512
}  // namespace peftds::kernels::cpu

#pragma GCC pop_options

namespace peftds::kernels::cpu {
const Variant kAvx512Variant = {avx512::adam, avx512::squared_norm, avx512::accumulate, avx512::cast};
}  // namespace peftds::kernels::cpu

#endif  // __x86_64__
