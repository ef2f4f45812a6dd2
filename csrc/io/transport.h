// SPDX-License-Identifier: Apache-2.0
// What moves single blocks between memory and files; the engine above it knows about extents,
// alignment, resumption and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace peftds::io {

enum class Direction : uint8_t { kRead, kWrite };

/// One transfer, started as a whole. Owned by the engine, which does not touch it while in flight.
struct Block {
  int descriptor = -1;
  Direction direction = Direction::kRead;
  int64_t offset = 0;
  std::byte* data = nullptr;
  int64_t size = 0;
};

/// `result`: bytes transferred, possibly fewer than asked for, or a negated errno.
struct Completion {
  Block* block;
  int64_t result;
};

/// Called on the transport's own threads, which may call submit() from inside.
using Deliver = std::function<void(std::span<const Completion>)>;

/// Thread-safe, except that the destructor needs every submitted block to be completed.
class Transport {
 public:
  struct Submitted {
    size_t accepted;  // the first so many blocks are going to be completed; the others never are
    int error;        // why not all: an errno
  };

  Transport() = default;
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Starts blocks. Does not wait for them and does not deliver from inside.
  [[nodiscard]] virtual Submitted submit(std::span<Block* const> blocks) = 0;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// Offer what repeated transfers use, so that the kernel need not look it up each time. Optional:
  /// return false, and nothing changes but the cost. Memory and files offered must stay valid until
  /// withdrawn, or until the transport is destroyed.
  virtual bool offer_memory(std::byte* /*data*/, int64_t /*size*/) noexcept { return false; }
  virtual void withdraw_memory(std::byte* /*data*/) noexcept {}
  virtual bool offer_file(int /*descriptor*/) noexcept { return false; }
};

/// Blocking pread and pwrite on at most `threads` threads, made as they are needed.
[[nodiscard]] std::unique_ptr<Transport> make_thread_transport(int threads, Deliver deliver);

/// io_uring for at most `depth` blocks at once. Null, with the reason, where it was not built in or
/// the system does not allow it.
[[nodiscard]] std::unique_ptr<Transport> make_uring_transport(int depth, Deliver deliver,
                                                              std::string& reason);

}  // namespace peftds::io
