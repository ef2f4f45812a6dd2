// SPDX-License-Identifier: Apache-2.0
// The engine's inside: requests wait in two queues, their pieces are in flight as transfers.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "io/engine.h"
#include "io/piece.h"

namespace peftds::io {

struct Request {
  Direction direction = Direction::kRead;
  Priority priority = Priority::kDemand;
  std::vector<Extent> extents;
  size_t extent = 0;  // the next piece begins in this extent,
  int64_t done = 0;   // after so many of its bytes
  int in_flight = 0;
  bool finished = false;
  std::chrono::steady_clock::time_point finished_at;
  std::optional<FileError> failure;  // the first; no piece is started after it

  [[nodiscard]] bool has_next() const { return !failure && extent < extents.size(); }
};

class EngineCore {
 public:
  explicit EngineCore(const Settings& settings);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  void submit(const std::shared_ptr<Request>& request);
  bool wait_for(const std::shared_ptr<Request>& request, std::optional<std::chrono::milliseconds> limit,
                Priority urgency);
  bool done(const Request& request);
  std::chrono::steady_clock::time_point finished_at(const Request& request);
  void close();

  void attach(const std::shared_ptr<const File>& file);
  void offer_memory(std::byte* data, int64_t size) noexcept;
  void withdraw_memory(std::byte* data) noexcept;
  [[nodiscard]] std::string method();
  [[nodiscard]] const std::string& why_threads() const { return why_threads_; }
  /// Throws kInvalidArgument in a child made by fork(), which has none of the threads and perhaps a lock
  /// that nobody will release.
  void check_process() const;
  [[nodiscard]] bool in_own_process() const noexcept;

 private:
  /// A piece in flight.
  struct Transfer : Block {
    std::shared_ptr<Request> request;
    const File* file = nullptr;
    Piece piece;  // what is left of it
    int interruptions = 0;
    std::optional<Arena::Buffer> window;
  };
  struct Settled {
    bool again = false;
    std::optional<FileError> failure;
  };

  void completed(std::span<const Completion> completions);
  void pump(std::vector<Block*> batch);
  void fill(std::vector<Block*>& batch);
  std::shared_ptr<Request> next_request();
  bool start_next_piece(Transfer& transfer, std::shared_ptr<Request> owner);
  Settled settle(Transfer& transfer, int64_t result);
  Settled took(Transfer& transfer, int64_t moved);
  void finish(Transfer& transfer, std::optional<FileError> failure);
  void complete_if_over(Request& request);
  std::unique_ptr<Transport> make_transport(const Settings& settings);
  std::unique_ptr<Transport> make_plain_transport(const Settings& settings, Deliver deliver);

  const pid_t process_;
  const int64_t block_bytes_;
  std::string why_threads_;

  std::mutex mutex_;  // guards all below, but not what is in flight
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::deque<std::shared_ptr<Request>> demand_;
  std::deque<std::shared_ptr<Request>> read_ahead_;
  std::vector<Transfer> transfers_;
  std::vector<Transfer*> idle_;
  std::vector<std::shared_ptr<const File>> attached_;
  Arena windows_;
  bool closed_ = false;
  std::unique_ptr<Transport> transport_;  // null once closed; last, since its threads use the rest
};

}  // namespace peftds::io
