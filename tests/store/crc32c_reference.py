# SPDX-License-Identifier: Apache-2.0
"""CRC-32C bit by bit: reflected polynomial 0x82f63b78, all ones first and last. Slow; for small data."""

from __future__ import annotations

from collections.abc import Iterable


def crc32c(data: Iterable[int]) -> int:
    """Return the checksum of ``data``."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def crc32c_blocks(data: bytes | bytearray | memoryview, block_bytes: int) -> list[int]:
    """Return one checksum for each block of ``data``, the last of which may be shorter."""
    return [crc32c(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
