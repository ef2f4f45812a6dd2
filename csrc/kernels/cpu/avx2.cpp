// SPDX-License-Identifier: Apache-2.0
// Eight elements at a time. The instruction set is switched on for the code of this file's own
// namespace only, never by a compiler flag: a flag would also apply to inline functions of the
// standard library, and the linker might keep that copy for every CPU.
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

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace peftds::kernels::cpu {
namespace avx2 {
namespace {

struct Vec {
  using Value = __m256;
  static constexpr int64_t kWidth = 8;

  static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
  static __m256 load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256 load(const Float16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store(float* p, __m256 x) { _mm256_storeu_ps(p, x); }
  static void store(BFloat16* p, __m256 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(x));
  }
  static void store(Float16* p, __m256 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_float16(x)); }
  static void stream(float* p, __m256 x) { _mm256_stream_ps(p, x); }
  static void stream(BFloat16* p, __m256 x) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bfloat16(x));
  }
  static void stream(Float16* p, __m256 x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_float16(x)); }
  static void fence() { _mm_sfence(); }

  static __m128i to_bfloat16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
    const __m256i packed = _mm256_packus_epi32(words, words);  // per 128-bit half
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
    return _mm256_castsi256_si128(ordered);
  }
  static __m128i to_float16(__m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

  static __m256 set1(float x) { return _mm256_set1_ps(x); }
  static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 sqrt(__m256 a) { return _mm256_sqrt_ps(a); }
  static __m256 div(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }

  // ---- patterns of 32 bits: signed integers, modulo 2^32 ----

  using Bits = __m256i;

  static __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
  static __m256 value(__m256i x) { return _mm256_castsi256_ps(x); }
  static __m256i set1_bits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static __m256i load_bits(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256i load_bits(const uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256i load_bits(const int16_t* p) {
    return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_bits(uint8_t* p, __m256i x) {  // of 0 to 255
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
  static void store_bits(uint16_t* p, __m256i x) {  // the lower halves
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
  }
  static void store_bits(int16_t* p, __m256i x) { store_bits(reinterpret_cast<uint16_t*>(p), x); }

  static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
  static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi32(a, b); }
  static __m256i mul(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
  static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
  static __m256i max(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
  static __m256i bit_and(__m256i a, __m256i b) { return _mm256_and_si256(a, b); }
  static __m256i bit_or(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
  static __m256i bit_xor(__m256i a, __m256i b) { return _mm256_xor_si256(a, b); }
  static __m256i sign_mask(__m256i x) { return _mm256_srai_epi32(x, 31); }
  template <int kBits>
  static __m256i shift_left(__m256i x) {
    return _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  static __m256i shift_right(__m256i x) {
    return _mm256_srli_epi32(x, kBits);
  }
  static __m256i high_half_of_product(__m256i x, uint16_t factor) {  // of x below 2^16
    return _mm256_mulhi_epu16(x, _mm256_set1_epi32(factor));
  }

  static __m256 to_float(__m256i x) { return _mm256_cvtepi32_ps(x); }
  static __m256i truncate(__m256 x) { return _mm256_cvttps_epi32(x); }
  static __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }  // a < b ? a : b
  static __m256 max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }  // a > b ? a : b
  static __m256i if_nan(__m256 x, __m256i yes, __m256i no) {
    return _mm256_blendv_epi8(no, yes, bits(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static __m256i add_one_if_reached(__m256i number, __m256 x, __m256 border) {
    return sub(number, bits(_mm256_cmp_ps(x, border, _CMP_GE_OQ)));
  }
  static __m256 lookup(const Table& table, __m256i index) {  // of the lower 3 bits
    return _mm256_permutevar8x32_ps(_mm256_load_ps(table.entries), index);
  }

  struct SquareSum {
    __m256d lanes[4] = {};

    template <class T>
    void add16(const T* p) {
      for (int half = 0; half < 2; ++half) {
        const __m256 x = load(p + 8 * half);
        add(lanes[2 * half], _mm256_castps256_ps128(x));
        add(lanes[2 * half + 1], _mm256_extractf128_ps(x, 1));
      }
    }
    static void add(__m256d& lane, __m128 x) {
      const __m256d wide = _mm256_cvtps_pd(x);
      lane = _mm256_fmadd_pd(wide, wide, lane);
    }
    [[nodiscard]] double total() const {
      double stored[16];
      for (int i = 0; i < 4; ++i) _mm256_storeu_pd(stored + 4 * i, lanes[i]);
      double sum = 0.0;
      for (const double lane : stored) sum += lane;
      return sum;
    }
  };
};

#include "kernels/cpu/loops.inl.h"

}  // namespace
}  // namespace avx2
}  // namespace peftds::kernels::cpu

#pragma GCC pop_options

namespace peftds::kernels::cpu {
const Variant kAvx2Variant = {avx2::adam, avx2::squared_norm, avx2::accumulate, avx2::cast};
}  // namespace peftds::kernels::cpu

#endif  // __x86_64__
