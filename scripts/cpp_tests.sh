#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the C++ code without Python and torch, and runs its tests: optimised, under the address and
# undefined-behaviour sanitizers, and, for the threaded ones, under the thread sanitizer. The optimised
# build also compiles the CUDA kernels where nvcc is found.
#
# usage: scripts/cpp_tests.sh [PRESET...]    presets: release asan tsan (default: all)
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in cmake ctest ninja; do
  if ! command -v "$tool" >/dev/null; then
    echo "cpp_tests: $tool is not on the PATH; install the development tools: pip install cmake ninja" >&2
    exit 1
  fi
done

mkdir -p build
presets=("$@")
[ ${#presets[@]} -gt 0 ] || presets=(release asan tsan)
for preset in "${presets[@]}"; do
  echo "== $preset"
  cmake --preset "$preset" >"build/cpp-$preset.log" 2>&1 || { cat "build/cpp-$preset.log" >&2; exit 1; }
  cmake --build --preset "$preset"
  ctest --preset "$preset"
  if [ "$preset" = release ]; then
    grep -h '^-- peftds:' "build/cpp-$preset.log" || echo "CUDA kernels: compiled without warnings for sm_80 and sm_90"
  fi
done
