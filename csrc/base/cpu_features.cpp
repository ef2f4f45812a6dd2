// SPDX-License-Identifier: Apache-2.0
#include "base/cpu_features.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace peftds {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};
constexpr const char* kVariable = "PEFTDS_CPU_ISA";

std::string names(const std::vector<Isa>& isas) {
  std::string text;
  for (const Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(to_string(isa));
  return text;
}

Isa choose() {
  const std::vector<Isa> supported = supported_isas();
  const char* forced = std::getenv(kVariable);
  if (forced == nullptr || *forced == '\0') return supported.back();
  for (const Isa isa : kAll) {
    if (to_string(isa) != forced) continue;
    PEFTDS_CHECK(is_supported(isa), kConfig, kVariable, "=", forced,
                 " names an instruction set that this CPU lacks; it has: ", names(supported),
                 ". Unset the variable or choose one of these.");
    return isa;
  }
  PEFTDS_CHECK(false, kConfig, kVariable, "=", forced,
               " is not an instruction set; choose one of: ", names(supported), ", or unset the variable.");
  return Isa::kScalar;
}

}  // namespace

std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "unknown";
}

bool is_supported(Isa isa) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case Isa::kScalar: return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return is_supported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
  }
  return false;
#else
  return isa == Isa::kScalar;
#endif
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> found;
  for (const Isa isa : kAll) {
    if (is_supported(isa)) found.push_back(isa);
  }
  return found;
}

Isa chosen_isa() {
  static const Isa isa = choose();  // a throwing initialiser is tried again by the next call
  return isa;
}

}  // namespace peftds
