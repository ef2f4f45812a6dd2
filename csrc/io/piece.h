// SPDX-License-Identifier: Apache-2.0
// How an extent is cut into blocks, and the way that each of them takes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "io/engine.h"

namespace peftds::io {

struct Piece {
  enum class Way {
    kDirect,    // between the caller's memory and the disk
    kWindow,    // direct read of the aligned range around it into an aligned window, then a copy
    kBuffered,  // through the kernel's page cache
  };
  Way way = Way::kBuffered;
  int64_t offset = 0;
  int64_t size = 0;
  std::byte* data = nullptr;
};

[[nodiscard]] constexpr int64_t round_down(int64_t value, int64_t multiple) {
  return value / multiple * multiple;
}
[[nodiscard]] constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return round_down(value + multiple - 1, multiple);
}

/// Returns the piece of `extent` that follows its first `done` bytes (fewer than its size). Pieces end a
/// multiple of `block_bytes` after the aligned offset at or before the extent's start, so that all but
/// the outer ones are aligned.
[[nodiscard]] inline Piece next_piece(const Extent& extent, int64_t done, Direction direction,
                                      int64_t block_bytes) {
  const int64_t alignment = extent.file->alignment();
  Piece piece;
  piece.offset = extent.offset + done;
  piece.data = extent.data + done;
  const int64_t start = round_down(extent.offset, alignment);
  const int64_t border = start + round_down(piece.offset - start, block_bytes) + block_bytes;
  piece.size = std::min(extent.offset + extent.size, border) - piece.offset;
  if (!extent.file->direct()) return piece;
  const bool aligned = piece.offset % alignment == 0 && piece.size % alignment == 0 &&
                       reinterpret_cast<uintptr_t>(piece.data) % static_cast<uintptr_t>(alignment) == 0;
  if (aligned)
    piece.way = Piece::Way::kDirect;
  else if (direction == Direction::kRead)
    piece.way = Piece::Way::kWindow;
  return piece;
}

}  // namespace peftds::io
