// SPDX-License-Identifier: Apache-2.0
// A state is the remainder of the bytes so far as a polynomial over GF(2), lowest power in the highest
// bit. RFC 3720 starts with all bits set and inverts the last state.
#include "base/crc32c.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "base/error.h"
#include "base/thread_pool.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace peftds {
namespace {

using Bytes = std::span<const std::byte>;
using Table = std::array<uint32_t, 256>;

constexpr uint32_t kGenerator = 0x82f63b78;
constexpr uint32_t kInverted = 0xffffffff;
constexpr size_t kThreadBytes = 256 * 1024;  // that a thread takes at a time, at least

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kGenerator : 0); }

/// Table k maps a byte to its remainder with k zero bytes behind it.
constexpr std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t state = byte;
    for (Table& table : tables) {
      for (int bit = 0; bit < 8; ++bit) state = times_x(state);
      table[byte] = state;
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kByteTables = byte_tables();

/// Eight bytes at a time: their remainders do not depend on each other.
uint32_t update_scalar(uint32_t state, Bytes data) noexcept {
  const auto look_up = [](size_t table, std::byte byte) {
    return kByteTables[table][std::to_integer<size_t>(byte)];
  };
  for (; data.size() >= 8; data = data.subspan(8)) {
    uint32_t next = 0;
    for (size_t i = 4; i < 8; ++i) next ^= look_up(7 - i, data[i]);
    for (size_t i = 0; i < 4; ++i) next ^= look_up(7 - i, data[i] ^ static_cast<std::byte>(state >> (8 * i)));
    state = next;
  }
  for (const std::byte byte : data) state = (state >> 8) ^ look_up(0, byte ^ static_cast<std::byte>(state));
  return state;
}

#if defined(__x86_64__)

#define PEFTDS_SSE42 __attribute__((target("sse4.2")))

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t power = uint32_t{1} << 31; power != 0; power >>= 1) {
    if ((a & power) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

/// Maps each byte of a state to its part of the state after `zero_bytes` zero bytes.
constexpr std::array<Table, 4> advance_tables(size_t zero_bytes) {
  uint32_t factor = uint32_t{1} << 23;  // x^8, for one byte
  for (size_t bytes = 1; bytes < zero_bytes; bytes *= 2) factor = multiply(factor, factor);
  std::array<Table, 4> tables{};
  for (uint32_t i = 0; i < 4; ++i) {
    for (uint32_t byte = 0; byte < 256; ++byte) tables[i][byte] = multiply(byte << (8 * i), factor);
  }
  return tables;
}

template <size_t kZeroBytes>
constexpr std::array<Table, 4> kAdvanceTables = advance_tables(kZeroBytes);

template <size_t kZeroBytes>
uint32_t advance(uint32_t state) noexcept {
  static_assert(std::has_single_bit(kZeroBytes));
  const std::array<Table, 4>& tables = kAdvanceTables<kZeroBytes>;
  return tables[0][state & 0xff] ^ tables[1][(state >> 8) & 0xff] ^ tables[2][(state >> 16) & 0xff] ^
         tables[3][state >> 24];
}

uint64_t load(const std::byte* p) noexcept {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

/// Takes as many runs of three streams from the front of `data` as there are. One instruction takes three
/// cycles, but one may start in every cycle, so three streams side by side are three times as fast.
template <size_t kStream>
PEFTDS_SSE42 uint32_t update_streams(uint32_t state, Bytes& data) noexcept {
  for (; data.size() >= 3 * kStream; data = data.subspan(3 * kStream)) {
    uint64_t first = state;
    uint64_t second = 0;
    uint64_t third = 0;
    for (const std::byte *p = data.data(), *end = p + kStream; p != end; p += 8) {
      first = _mm_crc32_u64(first, load(p));
      second = _mm_crc32_u64(second, load(p + kStream));
      third = _mm_crc32_u64(third, load(p + 2 * kStream));
    }
    const uint32_t both = advance<kStream>(static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
    state = advance<kStream>(both) ^ static_cast<uint32_t>(third);
  }
  return state;
}

PEFTDS_SSE42 uint32_t update_sse42(uint32_t state, Bytes data) noexcept {
  state = update_streams<65536>(state, data);  // long streams suit the hardware's prefetch from memory
  state = update_streams<4096>(state, data);
  state = update_streams<256>(state, data);
  for (; data.size() >= 8; data = data.subspan(8)) {
    state = static_cast<uint32_t>(_mm_crc32_u64(state, load(data.data())));
  }
  for (const std::byte byte : data) state = _mm_crc32_u8(state, std::to_integer<uint8_t>(byte));
  return state;
}

#undef PEFTDS_SSE42

using Update = uint32_t (*)(uint32_t state, Bytes data) noexcept;

Update best_update() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") ? update_sse42 : update_scalar;
}

uint32_t update(uint32_t state, Bytes data) noexcept {
  static const Update best = best_update();
  return best(state, data);
}

#else

uint32_t update(uint32_t state, Bytes data) noexcept { return update_scalar(state, data); }

#endif

}  // namespace

uint32_t crc32c(const std::byte* data, size_t size) noexcept {
  return update(kInverted, {data, size}) ^ kInverted;
}

uint32_t crc32c_scalar(const std::byte* data, size_t size) noexcept {
  return update_scalar(kInverted, {data, size}) ^ kInverted;
}

std::vector<uint32_t> crc32c_blocks(const std::byte* data, size_t size, size_t block_bytes, int threads) {
  PEFTDS_CHECK(block_bytes > 0, kInvalidArgument, "crc32c_blocks: block_bytes must be positive, got 0");
  const size_t blocks = size / block_bytes + (size % block_bytes != 0 ? 1 : 0);
  const size_t grain = std::max<size_t>(kThreadBytes / block_bytes, 1);
  std::vector<uint32_t> sums(blocks);
  ThreadPool::instance().parallel_for(
      static_cast<int64_t>(blocks), static_cast<int64_t>(grain), threads, [&](int64_t begin, int64_t end) {
        for (size_t i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          const size_t start = i * block_bytes;
          sums[i] = crc32c(data + start, std::min(block_bytes, size - start));
        }
      });
  return sums;
}

}  // namespace peftds
