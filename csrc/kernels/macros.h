// SPDX-License-Identifier: Apache-2.0
// Lets one formula compile for the CPU and for CUDA.
#pragma once

#if defined(__CUDACC__)
#define PEFTDS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PEFTDS_HOST_DEVICE inline __attribute__((always_inline))
#endif
