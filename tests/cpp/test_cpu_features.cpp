// SPDX-License-Identifier: Apache-2.0
// chosen_isa() decides once per process, so each case runs in a child process of its own.
#include "base/cpu_features.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "in_child.h"

namespace {

using peftds::Isa;
using peftds::test::succeeds_in_child;

constexpr const char* kVariable = "PEFTDS_CPU_ISA";

}  // namespace

TEST(scalar_is_always_supported_and_the_list_ascends) {
  const std::vector<Isa> isas = peftds::supported_isas();
  CHECK(!isas.empty() && isas.front() == Isa::kScalar);
  CHECK(std::is_sorted(isas.begin(), isas.end()));
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    const bool listed = std::find(isas.begin(), isas.end(), isa) != isas.end();
    CHECK(listed == peftds::is_supported(isa), to_string(isa));
  }
}

TEST(without_the_variable_the_best_is_chosen) {
  CHECK(succeeds_in_child([] {
    unsetenv(kVariable);
    CHECK(peftds::chosen_isa() == peftds::supported_isas().back());
  }));
  CHECK(succeeds_in_child([] {
    setenv(kVariable, "", 1);
    CHECK(peftds::chosen_isa() == peftds::supported_isas().back());
  }));
}

TEST(the_variable_forces_each_supported_set) {
  for (const Isa isa : peftds::supported_isas()) {
    CHECK(succeeds_in_child([isa] {
            setenv(kVariable, std::string(to_string(isa)).c_str(), 1);
            CHECK(peftds::chosen_isa() == isa);
          }),
          to_string(isa));
  }
}

TEST(the_choice_stays) {
  CHECK(succeeds_in_child([] {
    setenv(kVariable, "scalar", 1);
    CHECK(peftds::chosen_isa() == Isa::kScalar);
    unsetenv(kVariable);
    CHECK(peftds::chosen_isa() == Isa::kScalar);
  }));
}

TEST(a_wrong_name_is_an_error_that_lists_the_right_ones_and_can_be_mended) {
  CHECK(succeeds_in_child([] {
    setenv(kVariable, "avx1024", 1);
    std::string message;
    try {
      static_cast<void>(peftds::chosen_isa());
    } catch (const peftds::Error& error) {
      CHECK(error.code() == peftds::ErrorCode::kConfig);
      message = error.what();
    }
    for (const char* part : {"PEFTDS_CPU_ISA", "avx1024", "scalar"}) {
      CHECK(message.find(part) != std::string::npos, part, " is not in: ", message);
    }
    setenv(kVariable, "scalar", 1);
    CHECK(peftds::chosen_isa() == Isa::kScalar);
  }));
}

TEST(a_set_that_the_cpu_lacks_is_an_error) {
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (peftds::is_supported(isa)) continue;  // nothing to refuse on this CPU
    CHECK(succeeds_in_child([isa] {
      setenv(kVariable, std::string(to_string(isa)).c_str(), 1);
      CHECK_THROWS(peftds::chosen_isa(), kConfig);
    }));
  }
}

int main() { return peftds::test::run_all(); }
