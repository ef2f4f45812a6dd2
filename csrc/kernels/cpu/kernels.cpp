// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set and spreads the loops over the thread pool.
#include "kernels/cpu/kernels.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/cpu/variants.h"

namespace peftds::kernels::cpu {
namespace {

/// Elements that a thread takes at a time: long runs suit the memory, but threads should end together.
int64_t grain_for(int64_t count, int threads) {
  const int64_t fair = count / (std::max(threads, 1) * int64_t{16});
  return std::clamp(fair / kBlock * kBlock, kBlock, 8 * kBlock);
}

/// Adds block(begin, end) over blocks of kBlock in their order, whichever thread ran them.
template <class Block>
double sum_of_blocks(int64_t count, int threads, const Block& block) {
  std::vector<double> partial(static_cast<size_t>((count + kBlock - 1) / kBlock));
  ThreadPool::instance().parallel_for(count, kBlock, threads, [&](int64_t begin, int64_t end) {
    partial[static_cast<size_t>(begin / kBlock)] = block(begin, end);
  });
  double sum = 0.0;
  for (const double part : partial) sum += part;
  return sum;
}

}  // namespace

const Variant& variant(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return kScalarVariant;
#if defined(__x86_64__)
    case Isa::kAvx2: return kAvx2Variant;
    case Isa::kAvx512: return kAvx512Variant;
#endif
    default: break;
  }
  PEFTDS_CHECK(false, kInvalidArgument, "this build has no kernels for ", to_string(isa));
  return kScalarVariant;
}

void adam_step(const AdamArrays& arrays, const AdamSettings& settings, int threads) {
  const Variant& loops = variant(chosen_isa());
  const AdamCoefficients coefficients = adam_coefficients(settings);
  ThreadPool::instance().parallel_for(
      arrays.count, grain_for(arrays.count, threads), threads,
      [&](int64_t begin, int64_t end) { loops.adam(arrays, coefficients, begin, end); });
}

double squared_norm(const void* input, DType dtype, int64_t count, int threads) {
  const Variant& loops = variant(chosen_isa());
  return sum_of_blocks(count, threads, [&](int64_t begin, int64_t end) {
    return loops.squared_norm(input, dtype, begin, end);
  });
}

double accumulate(const void* grad, DType grad_dtype, void* buffer, DType buffer_dtype, bool add,
                  int64_t count, int threads) {
  const Variant& loops = variant(chosen_isa());
  return sum_of_blocks(count, threads, [&](int64_t begin, int64_t end) {
    return loops.accumulate(grad, grad_dtype, buffer, buffer_dtype, add, begin, end);
  });
}

void cast(const void* input, DType input_dtype, void* output, DType output_dtype, int64_t count,
          int threads) {
  const Variant& loops = variant(chosen_isa());
  ThreadPool::instance().parallel_for(count, grain_for(count, threads), threads,
                                      [&](int64_t begin, int64_t end) {
                                        if (input_dtype == output_dtype) {  // bits as they are, NaNs included
                                          const int64_t size = size_of(input_dtype);
                                          std::memcpy(static_cast<char*>(output) + begin * size,
                                                      static_cast<const char*>(input) + begin * size,
                                                      static_cast<size_t>((end - begin) * size));
                                        } else {
                                          loops.cast(input, input_dtype, output, output_dtype, begin, end);
                                        }
                                      });
}

}  // namespace peftds::kernels::cpu
