// SPDX-License-Identifier: Apache-2.0
// Host memory that CUDA copies from and to at full rate and asynchronously.
#pragma once

#include "base/page_lock.h"

namespace peftds::kernels::cuda {

/// Registers memory for all devices. Locking needs a CUDA context: a thread that has chosen no device gets
/// one on device 0. In a process made by fork() after CUDA was used the functions fail. Codes are those of
/// cudaError_t; a failure leaves nothing for cudaGetLastError().
[[nodiscard]] const PageLock& page_lock();

}  // namespace peftds::kernels::cuda
