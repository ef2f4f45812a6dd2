// SPDX-License-Identifier: Apache-2.0
// The checksum of stored bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace peftds {

/// CRC-32C (Castagnoli, RFC 3720 appendix B.4) of `size` bytes, which may start anywhere.
/// Thread-safe. Uses the CPU's instruction for it, where there is one; PEFTDS_CPU_ISA has no say here.
[[nodiscard]] uint32_t crc32c(const std::byte* data, size_t size) noexcept;

/// The same, bit-identical, without special instructions.
[[nodiscard]] uint32_t crc32c_scalar(const std::byte* data, size_t size) noexcept;

/// Checksums of consecutive blocks of `block_bytes`, in order; the last block may be shorter, and no
/// bytes make no block. Computed on at most `threads` threads of the process's ThreadPool.
/// Throws Error(kInvalidArgument) when `block_bytes` is 0.
[[nodiscard]] std::vector<uint32_t> crc32c_blocks(const std::byte* data, size_t size, size_t block_bytes,
                                                  int threads);

}  // namespace peftds
