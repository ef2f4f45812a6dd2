// SPDX-License-Identifier: Apache-2.0
// The storage engine: transfers of any offset, size and alignment between memory and files.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/page_lock.h"
#include "io/file.h"
#include "io/transport.h"

namespace peftds::io {

enum class Method { kAuto, kUring, kThreads };

/// Demand is what somebody waits for now; it overtakes read-ahead that has not started.
enum class Priority { kDemand, kReadAhead };

struct Settings {
  Method method = Method::kAuto;  // kAuto: io_uring where it is allowed, else threads
  int queue_depth = 8;            // blocks in flight at once
  int64_t block_bytes = 1 << 20;  // largest transfer; a multiple of 4096
  std::string faults;             // a FaultPlan's text; empty: none
};

/// One contiguous piece of a file and the memory that it is read into or written from.
struct Extent {
  std::shared_ptr<const File> file;
  int64_t offset = 0;
  std::byte* data = nullptr;
  int64_t size = 0;
};

class EngineCore;
struct Request;

/// A submitted vector of extents, and its outcome.
///
/// The memory must stay valid until the ticket is done. The destructor waits for that, so a ticket
/// that goes out of scope leaves nothing behind that writes into memory.
class Ticket {
 public:
  Ticket(Ticket&&) noexcept;
  Ticket& operator=(Ticket&&) = delete;
  ~Ticket();

  /// Whether the outcome is there. Thread-safe, does not block.
  [[nodiscard]] bool done() const;

  /// Waits until the outcome is there; with the priority of demand from now on, unless `urgency` says that
  /// its turn is soon enough. Throws what went wrong (FileError: kStorage, kStorageFull, kCorruptData), the
  /// same to every call.
  void wait(Priority urgency = Priority::kDemand) const;

  /// The same for at most `limit`; returns whether it is done.
  bool wait_for(std::chrono::milliseconds limit) const;

  /// When the outcome was there; meaningless before.
  [[nodiscard]] std::chrono::steady_clock::time_point finished_at() const;

 private:
  friend class Engine;
  Ticket(std::shared_ptr<EngineCore> core, std::shared_ptr<Request> request);

  std::shared_ptr<EngineCore> core_;
  std::shared_ptr<Request> request_;
};

/// Thread-safe. Closing it fails requests that have not started and waits for what is under way; no
/// thread is left. The destructor closes. After fork() the child's copy refuses every use.
class Engine {
 public:
  /// Throws kInvalidArgument, and kConfig when `method` names what is not to be had or the faults are
  /// not understood.
  explicit Engine(const Settings& settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Starts the transfer of extents, in the order of their offsets. Direct I/O is used as far as the file
  /// allows it: reads go through an aligned window where offset, size or memory are not
  /// aligned, writes through the buffered descriptor. Short transfers are resumed.
  [[nodiscard]] Ticket submit(Direction direction, std::vector<Extent> extents,
                              Priority priority = Priority::kDemand);

  void close();

  /// Tells the system about a file that is going to be used often.
  void attach(const std::shared_ptr<const File>& file);

  /// An arena whose memory the system is told about in the same way, and is page-locked if that is given.
  [[nodiscard]] Arena make_arena(std::optional<PageLock> page_lock = std::nullopt);

  /// "io_uring" or "threads", and why not io_uring if that was left to choose.
  [[nodiscard]] std::string method() const;
  [[nodiscard]] const std::string& why_threads() const;

 private:
  std::shared_ptr<EngineCore> core_;
};

}  // namespace peftds::io
