// SPDX-License-Identifier: Apache-2.0
// The checksum against the RFC's examples and against its definition, one bit at a time.
#include "base/crc32c.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string_view>

#include "check.h"

namespace {

using peftds::crc32c;
using peftds::crc32c_blocks;
using peftds::crc32c_scalar;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t size) {
  std::mt19937 random(static_cast<uint32_t>(size) + 1);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Long division as RFC 3720 defines it.
uint32_t by_definition(const Bytes& bytes) {
  uint32_t remainder = 0xffffffff;
  for (const std::byte byte : bytes) {
    remainder ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) remainder = (remainder >> 1) ^ ((remainder & 1) * 0x82f63b78);
  }
  return ~remainder;
}

void check_sum(const Bytes& bytes, uint32_t expected) {
  const uint32_t fast = crc32c(bytes.data(), bytes.size());
  const uint32_t scalar = crc32c_scalar(bytes.data(), bytes.size());
  CHECK(fast == expected, bytes.size(), " bytes: ", fast, ", not ", expected);
  CHECK(scalar == expected, bytes.size(), " bytes: ", scalar, ", not ", expected);
}

/// The memory ends with the last byte, so that the address sanitizer sees one byte read too many.
void check_at_every_offset(size_t size) {
  const Bytes original = random_bytes(size);
  const uint32_t expected = by_definition(original);
  for (size_t offset = 0; offset < 16; ++offset) {
    Bytes moved(offset + size);
    std::copy(original.begin(), original.end(), moved.begin() + static_cast<std::ptrdiff_t>(offset));
    const uint32_t fast = crc32c(moved.data() + offset, size);
    const uint32_t scalar = crc32c_scalar(moved.data() + offset, size);
    CHECK(fast == expected, size, " bytes at offset ", offset, ": ", fast, ", not ", expected);
    CHECK(scalar == expected, size, " bytes at offset ", offset, ": ", scalar, ", not ", expected);
  }
}

/// Flips every `stride`-th bit in turn.
void check_flips(size_t size, size_t stride) {
  Bytes bytes = random_bytes(size);
  const uint32_t before = crc32c(bytes.data(), size);
  for (size_t bit = 0; bit < 8 * size; bit += stride) {
    const std::byte mask{static_cast<uint8_t>(1 << (bit % 8))};
    bytes[bit / 8] ^= mask;
    CHECK(crc32c(bytes.data(), size) != before, "bit ", bit, " of ", size, " bytes");
    CHECK(crc32c_scalar(bytes.data(), size) != before, "bit ", bit, " of ", size, " bytes");
    bytes[bit / 8] ^= mask;
  }
}

void check_blocks(const Bytes& bytes, size_t block_bytes) {
  std::vector<uint32_t> expected;
  for (size_t start = 0; start < bytes.size();) {
    const size_t count = std::min(block_bytes, bytes.size() - start);
    expected.push_back(crc32c_scalar(bytes.data() + start, count));
    start += count;
  }
  for (const int threads : {-1, 0, 1, 2, 3, 8}) {
    CHECK(crc32c_blocks(bytes.data(), bytes.size(), block_bytes, threads) == expected, bytes.size(),
          " bytes in blocks of ", block_bytes, " on ", threads, " threads");
  }
}

}  // namespace

TEST(examples_of_the_rfc) {
  Bytes ascending(32);
  for (size_t i = 0; i < 32; ++i) ascending[i] = static_cast<std::byte>(i);
  check_sum(Bytes(32, std::byte{0x00}), 0x8a9136aa);
  check_sum(Bytes(32, std::byte{0xff}), 0x62a8ab43);
  check_sum(ascending, 0x46dd794e);
  check_sum(Bytes(ascending.rbegin(), ascending.rend()), 0x113fdb5c);
}

TEST(check_value_of_the_polynomial) {
  Bytes bytes;
  for (const char digit : std::string_view("123456789")) bytes.push_back(static_cast<std::byte>(digit));
  check_sum(bytes, 0xe3069283);
}

TEST(no_bytes_give_zero) {
  CHECK(crc32c(nullptr, 0) == 0);
  CHECK(crc32c_scalar(nullptr, 0) == 0);
  check_sum(random_bytes(0), 0);
}

TEST(every_small_size_at_every_offset) {
  for (size_t size = 0; size <= 300; ++size) check_at_every_offset(size);
}

// Streams are likely to be powers of two, and three or fewer; a run of them may be followed by another.
TEST(sizes_around_multiples_of_streams) {
  for (size_t stream = 128; stream <= 65536; stream *= 2) {
    for (const size_t multiple : {1, 2, 3, 6}) {
      for (const size_t less : {9, 8, 1, 0}) check_at_every_offset(multiple * stream - less);
      for (const size_t more : {1, 7, 8, 9}) check_at_every_offset(multiple * stream + more);
    }
  }
}

TEST(large_sizes_at_every_offset) {
  for (const size_t size : {100 * 1024, 3 * (65536 + 4096 + 256) + 8 * 7 + 3, 300001}) {
    check_at_every_offset(size);
  }
}

TEST(one_flipped_bit_changes_it) {
  for (size_t size = 1; size <= 40; ++size) check_flips(size, 1);
  check_flips(1000, 1);
  check_flips(3 * 4096 + 3 * 256 + 13, 61);
  check_flips(100003, 2003);
}

TEST(zeros_in_front_and_behind_count) {
  Bytes bytes = random_bytes(100);
  const uint32_t before = crc32c(bytes.data(), bytes.size());
  bytes.insert(bytes.begin(), std::byte{0});
  CHECK(crc32c(bytes.data(), bytes.size()) != before);
  bytes.erase(bytes.begin());
  bytes.push_back(std::byte{0});
  CHECK(crc32c(bytes.data(), bytes.size()) != before);
}

TEST(blocks_match_one_call_each) {
  for (const size_t size : {1, 4095, 4096, 4097, 1000003}) {
    const Bytes bytes = random_bytes(size);
    for (const size_t block_bytes : {1000, 4096, 65536, 262144, 262145, 1000003}) {
      check_blocks(bytes, block_bytes);
    }
  }
  const Bytes few = random_bytes(1001);
  for (const size_t block_bytes : {1, 2, 7, 500, 1000}) check_blocks(few, block_bytes);
}

TEST(a_block_of_any_size_may_be_the_only_one) {
  const Bytes bytes = random_bytes(1001);
  check_blocks(bytes, 1002);
  check_blocks(bytes, std::numeric_limits<size_t>::max());
}

TEST(no_bytes_make_no_blocks) { CHECK(crc32c_blocks(nullptr, 0, 4096, 2).empty()); }

TEST(blocks_of_no_bytes_are_refused) {
  const Bytes bytes = random_bytes(10);
  CHECK_THROWS(crc32c_blocks(bytes.data(), bytes.size(), 0, 2), kInvalidArgument);
  CHECK_THROWS(crc32c_blocks(nullptr, 0, 0, 2), kInvalidArgument);
}

int main() { return peftds::test::run_all(); }
