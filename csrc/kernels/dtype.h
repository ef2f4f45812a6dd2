// SPDX-License-Identifier: Apache-2.0
// The element types that kernels read and write.
#pragma once

#include <cstdint>

namespace peftds::kernels {

enum class DType { kFloat32, kBFloat16, kFloat16 };

/// Bytes of one element.
[[nodiscard]] constexpr int64_t size_of(DType dtype) noexcept { return dtype == DType::kFloat32 ? 4 : 2; }

// Storage types: same size and bits as the element, distinct so that overloads can tell them apart.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace peftds::kernels
