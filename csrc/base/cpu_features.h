// SPDX-License-Identifier: Apache-2.0
// Which instruction sets this CPU has, and which one the kernels use.
#pragma once

#include <string_view>
#include <vector>

namespace peftds {

/// In ascending order of preference.
enum class Isa { kScalar, kAvx2, kAvx512 };

[[nodiscard]] std::string_view to_string(Isa isa) noexcept;

/// True if this CPU and its operating system can run kernels of `isa`.
[[nodiscard]] bool is_supported(Isa isa) noexcept;

/// All supported sets, ascending; never empty.
[[nodiscard]] std::vector<Isa> supported_isas();

/// The set that the kernels use: the one that PEFTDS_CPU_ISA names, else the best supported.
/// Decided once per process, on the first call that succeeds. Throws Error(kConfig) when the
/// variable names an unknown set or one that this CPU lacks.
[[nodiscard]] Isa chosen_isa();

}  // namespace peftds
