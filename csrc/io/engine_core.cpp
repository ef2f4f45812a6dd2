// SPDX-License-Identifier: Apache-2.0
#include "io/engine_core.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "io/fault_plan.h"

namespace peftds::io {
namespace {

constexpr int kMaxThreads = 16;
constexpr int kMaxInterruptions = 1000;  // of one piece: then it counts as failed, not as slow

std::string describe(const Block& block) {
  return detail::concat(block.direction == Direction::kRead ? "read of " : "write of ", block.size,
                        " bytes at offset ", block.offset);
}

FileError system_failure(const Block& block, const File& file, int number) {
  try {
    throw_file_error(describe(block), file.path(), number);
  } catch (const FileError& error) {
    return error;
  }
}

/// Whether another try may do better. The kernel's io_uring ends with EFAULT or ECANCELED what it would have
/// gone on with in a thread that has ended meanwhile; the next try comes from a thread of the transport.
bool interrupted(int64_t result) {
  return result == -EINTR || result == -EAGAIN || result == -EFAULT || result == -ECANCELED;
}

FileError nothing_moved(const Block& block, const File& file) {
  if (block.direction == Direction::kWrite)
    return {ErrorCode::kStorage, describe(block) + " wrote nothing; the disk does not take the data",
            file.path(), 0};
  return {ErrorCode::kCorruptData,
          describe(block) +
              " met the end of the file: it is shorter than it was; restore it, or delete it and let the "
              "next run make it again",
          file.path(), 0};
}

}  // namespace

EngineCore::EngineCore(const Settings& settings)
    : process_(getpid()),
      block_bytes_(settings.block_bytes),
      transfers_(static_cast<size_t>(settings.queue_depth)) {
  for (Transfer& transfer : transfers_) idle_.push_back(&transfer);
  transport_ = make_transport(settings);
}

EngineCore::~EngineCore() { close(); }

bool EngineCore::in_own_process() const noexcept { return getpid() == process_; }

void EngineCore::check_process() const {
  PEFTDS_CHECK(in_own_process(), kInvalidArgument,
               "this storage engine was made by another process, before fork(): make one here");
}

std::unique_ptr<Transport> EngineCore::make_plain_transport(const Settings& settings, Deliver deliver) {
  if (settings.method != Method::kThreads) {
    auto transport = make_uring_transport(settings.queue_depth, deliver, why_threads_);
    if (transport) return transport;
    PEFTDS_CHECK(settings.method == Method::kAuto, kConfig, "the storage engine io_uring was asked for, but ",
                 why_threads_, ". Use the engine \"threads\", or leave the choice out");
  }
  return make_thread_transport(std::min(settings.queue_depth, kMaxThreads), std::move(deliver));
}

std::unique_ptr<Transport> EngineCore::make_transport(const Settings& settings) {
  Deliver deliver = [this](std::span<const Completion> completions) { completed(completions); };
  if (settings.faults.empty()) return make_plain_transport(settings, std::move(deliver));
  return make_faulty_transport(
      FaultPlan::parse(settings.faults),
      [&](Deliver inner) { return make_plain_transport(settings, std::move(inner)); }, std::move(deliver));
}

void EngineCore::submit(const std::shared_ptr<Request>& request) {
  {
    const std::lock_guard lock(mutex_);
    PEFTDS_CHECK(!closed_, kInvalidArgument, "the storage engine is closed");
    (request->priority == Priority::kDemand ? demand_ : read_ahead_).push_back(request);
    complete_if_over(*request);  // nothing to transfer
  }
  pump({});
}

bool EngineCore::done(const Request& request) {
  check_process();
  const std::lock_guard lock(mutex_);
  return request.finished;
}

std::chrono::steady_clock::time_point EngineCore::finished_at(const Request& request) {
  const std::lock_guard lock(mutex_);
  return request.finished_at;
}

bool EngineCore::wait_for(const std::shared_ptr<Request>& request,
                          std::optional<std::chrono::milliseconds> limit, Priority urgency) {
  check_process();
  std::unique_lock lock(mutex_);
  const auto waiting = std::find(read_ahead_.begin(), read_ahead_.end(), request);
  if (urgency == Priority::kDemand && waiting != read_ahead_.end()) {
    read_ahead_.erase(waiting);
    demand_.push_back(request);
  }
  const auto over = [&] { return request->finished; };
  if (limit)
    changed_->wait_for(lock, *limit, over);
  else
    changed_->wait(lock, over);
  if (request->finished && request->failure) throw FileError(*request->failure);
  return request->finished;
}

void EngineCore::close() {
  if (!in_own_process()) {
    static_cast<void>(transport_.release());  // its threads are not in this process: leaked, not joined
    static_cast<void>(changed_.release());    // destroying it would wait for those who wait for it
    return;
  }
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (auto* queue : {&demand_, &read_ahead_}) {
    for (const auto& request : *queue) {
      if (request->has_next())  // else all of it is over or under way, though it may still be listed
        request->failure.emplace(ErrorCode::kStorage,
                                 "the storage engine was closed before the transfer ended",
                                 request->extents.front().file->path(), 0);
      complete_if_over(*request);
    }
    queue->clear();
  }
  changed_->wait(lock, [this] { return idle_.size() == transfers_.size(); });
  const auto attached = std::move(attached_);  // closed after the transport
  const std::unique_ptr<Transport> ending = std::move(transport_);
  lock.unlock();  // its threads take the lock once more before they end
}

void EngineCore::attach(const std::shared_ptr<const File>& file) {
  check_process();
  const std::lock_guard lock(mutex_);
  if (!transport_ || std::find(attached_.begin(), attached_.end(), file) != attached_.end()) return;
  const bool buffered = transport_->offer_file(file->buffered_descriptor());
  const bool direct = file->direct() && transport_->offer_file(file->direct_descriptor());
  if (buffered || direct) attached_.push_back(file);  // the descriptors must not be reused for other files
}

void EngineCore::offer_memory(std::byte* data, int64_t size) noexcept {
  if (!in_own_process()) return;
  const std::lock_guard lock(mutex_);
  if (transport_) transport_->offer_memory(data, size);
}

void EngineCore::withdraw_memory(std::byte* data) noexcept {
  if (!in_own_process()) return;
  const std::lock_guard lock(mutex_);
  if (transport_) transport_->withdraw_memory(data);
}

std::string EngineCore::method() {
  check_process();
  const std::lock_guard lock(mutex_);
  return transport_ ? std::string(transport_->name()) : "closed";
}

void EngineCore::completed(std::span<const Completion> completions) {
  std::vector<Block*> again;
  std::vector<std::pair<Transfer*, Settled>> over;
  for (const Completion& completion : completions) {
    auto& transfer = static_cast<Transfer&>(*completion.block);
    Settled settled = settle(transfer, completion.result);
    if (settled.again)
      again.push_back(&transfer);
    else
      over.emplace_back(&transfer, std::move(settled));
  }
  {
    const std::lock_guard lock(mutex_);
    for (auto& [transfer, settled] : over) finish(*transfer, std::move(settled.failure));
  }
  pump(std::move(again));
}

/// Hands over `batch`, and as many further pieces as may be in flight.
void EngineCore::pump(std::vector<Block*> batch) {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      fill(batch);
    }
    if (batch.empty()) return;
    const auto [accepted, error] = transport_->submit(batch);
    if (accepted == batch.size()) return;
    const std::lock_guard lock(mutex_);
    for (size_t i = accepted; i < batch.size(); ++i) {
      auto& transfer = static_cast<Transfer&>(*batch[i]);
      finish(transfer, system_failure(transfer, *transfer.file, error));
    }
    batch.clear();
  }
}

void EngineCore::fill(std::vector<Block*>& batch) {
  while (!idle_.empty()) {
    std::shared_ptr<Request> request = next_request();
    if (!request) return;
    Transfer& transfer = *idle_.back();
    idle_.pop_back();
    if (start_next_piece(transfer, std::move(request))) batch.push_back(&transfer);
  }
}

/// The request whose piece is next, or null; those with none left leave their queue.
std::shared_ptr<Request> EngineCore::next_request() {
  for (auto* queue : {&demand_, &read_ahead_}) {
    while (!queue->empty()) {
      if (queue->front()->has_next()) return queue->front();
      queue->pop_front();
    }
  }
  return nullptr;
}

/// Returns false if there is no memory for it: then its request has failed.
bool EngineCore::start_next_piece(Transfer& transfer, std::shared_ptr<Request> owner) {
  Request& request = *owner;
  const Extent& extent = request.extents[request.extent];
  const Piece piece = next_piece(extent, request.done, request.direction, block_bytes_);
  request.done += piece.size;
  ++request.in_flight;
  transfer.request = std::move(owner);
  transfer.interruptions = 0;
  transfer.file = extent.file.get();
  transfer.piece = piece;
  transfer.direction = request.direction;
  transfer.offset = piece.offset;
  transfer.size = piece.size;
  transfer.data = piece.data;
  transfer.descriptor = piece.way == Piece::Way::kBuffered ? extent.file->buffered_descriptor()
                                                           : extent.file->direct_descriptor();
  if (piece.way == Piece::Way::kWindow) {
    const int64_t alignment = extent.file->alignment();
    try {
      if (!transfer.window) transfer.window.emplace(windows_.allocate(block_bytes_ + 2 * alignment));
    } catch (const Error&) {
      finish(transfer, system_failure(transfer, *transfer.file, ENOMEM));
      return false;
    }
    transfer.offset = round_down(piece.offset, alignment);
    transfer.size = round_up(piece.offset + piece.size, alignment) - transfer.offset;
    transfer.data = transfer.window->data();
  }
  while (request.extent < request.extents.size() && request.done == request.extents[request.extent].size) {
    ++request.extent;
    request.done = 0;
  }
  return true;
}

EngineCore::Settled EngineCore::settle(Transfer& transfer, int64_t result) {
  if (interrupted(result) && ++transfer.interruptions < kMaxInterruptions)
    return {.again = true, .failure = {}};
  if (result == -EINVAL && transfer.piece.way != Piece::Way::kBuffered) {
    transfer.file->give_up_direct();  // opened for direct I/O, and refuses it all the same
    return took(transfer, 0);
  }
  if (result < 0)
    return {.again = false, .failure = system_failure(transfer, *transfer.file, static_cast<int>(-result))};
  if (result == 0) return {.again = false, .failure = nothing_moved(transfer, *transfer.file)};
  return took(transfer, result);
}

/// Accounts for the first `moved` bytes of a transfer. What is missing goes through the buffered
/// descriptor, since it may begin anywhere.
EngineCore::Settled EngineCore::took(Transfer& transfer, int64_t moved) {
  Piece& piece = transfer.piece;
  int64_t useful = moved;
  if (piece.way == Piece::Way::kWindow) {
    const int64_t before = piece.offset - transfer.offset;
    useful = std::clamp<int64_t>(moved - before, 0, piece.size);
    std::memcpy(piece.data, transfer.data + before, static_cast<size_t>(useful));
  }
  if (useful == piece.size) return {};
  piece = {Piece::Way::kBuffered, piece.offset + useful, piece.size - useful, piece.data + useful};
  transfer.descriptor = transfer.file->buffered_descriptor();
  transfer.offset = piece.offset;
  transfer.size = piece.size;
  transfer.data = piece.data;
  return {.again = true, .failure = {}};
}

void EngineCore::finish(Transfer& transfer, std::optional<FileError> failure) {
  const std::shared_ptr<Request> request = std::move(transfer.request);
  if (failure && !request->failure) request->failure = std::move(failure);
  --request->in_flight;
  idle_.push_back(&transfer);
  complete_if_over(*request);
  if (closed_) changed_->notify_all();
}

void EngineCore::complete_if_over(Request& request) {
  if (request.finished || request.in_flight > 0 || request.has_next()) return;
  request.finished = true;
  request.finished_at = std::chrono::steady_clock::now();
  changed_->notify_all();
}

}  // namespace peftds::io
