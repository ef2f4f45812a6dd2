// SPDX-License-Identifier: Apache-2.0
#include "io/engine.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "io/engine_core.h"

namespace peftds::io {
namespace {

constexpr int kMaxDepth = 1024;
constexpr int64_t kMaxBlock = int64_t{1} << 30;
// Where extents may end, so that offsets can be rounded up.
constexpr int64_t kMaxEnd = std::numeric_limits<int64_t>::max() - 2 * kMaxBlock;

void check(const Settings& settings) {
  PEFTDS_CHECK(settings.queue_depth > 0 && settings.queue_depth <= kMaxDepth, kInvalidArgument,
               "io.queue_depth must be from 1 to ", kMaxDepth, ", got ", settings.queue_depth);
  PEFTDS_CHECK(settings.block_bytes > 0 && settings.block_bytes <= kMaxBlock &&
                   settings.block_bytes % Arena::kPage == 0,
               kInvalidArgument, "io.block_bytes must be a multiple of ", Arena::kPage, " of at most ",
               kMaxBlock, ", got ", settings.block_bytes);
}

/// Tells the engine's transport about an arena's memory, as long as the engine is there.
class Offer final : public Arena::Listener {
 public:
  explicit Offer(std::weak_ptr<EngineCore> core) : core_(std::move(core)) {}
  void mapped(std::byte* data, int64_t size) noexcept override {
    if (const auto core = core_.lock()) core->offer_memory(data, size);
  }
  void unmapping(std::byte* data) noexcept override {
    if (const auto core = core_.lock()) core->withdraw_memory(data);
  }

 private:
  std::weak_ptr<EngineCore> core_;
};

}  // namespace

Ticket::Ticket(std::shared_ptr<EngineCore> core, std::shared_ptr<Request> request)
    : core_(std::move(core)), request_(std::move(request)) {}
Ticket::Ticket(Ticket&&) noexcept = default;

Ticket::~Ticket() {
  if (!request_ || !core_->in_own_process()) return;
  try {
    core_->wait_for(request_, std::nullopt, Priority::kDemand);
  } catch (const FileError&) {  // who did not ask for the outcome does not want it
  }
}

bool Ticket::done() const { return core_->done(*request_); }
void Ticket::wait(Priority urgency) const { core_->wait_for(request_, std::nullopt, urgency); }
bool Ticket::wait_for(std::chrono::milliseconds limit) const {
  return core_->wait_for(request_, limit, Priority::kDemand);
}
std::chrono::steady_clock::time_point Ticket::finished_at() const { return core_->finished_at(*request_); }

Engine::Engine(const Settings& settings) {
  check(settings);
  core_ = std::make_shared<EngineCore>(settings);
}

Engine::~Engine() { core_->close(); }
void Engine::close() { core_->close(); }

Ticket Engine::submit(Direction direction, std::vector<Extent> extents, Priority priority) {
  core_->check_process();
  for (const Extent& extent : extents)
    PEFTDS_CHECK(extent.file && extent.offset >= 0 && extent.size >= 0 &&
                     extent.size <= kMaxEnd - extent.offset && (extent.data != nullptr || extent.size == 0),
                 kInvalidArgument,
                 "an extent needs a file, memory, and an offset and a size that are not negative nor too "
                 "large; got offset ",
                 extent.offset, " and size ", extent.size);
  std::erase_if(extents, [](const Extent& extent) { return extent.size == 0; });
  std::stable_sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return std::tuple(a.file.get(), a.offset) < std::tuple(b.file.get(), b.offset);
  });
  auto request = std::make_shared<Request>();
  request->direction = direction;
  request->priority = priority;
  request->extents = std::move(extents);
  core_->submit(request);
  return {core_, std::move(request)};
}

void Engine::attach(const std::shared_ptr<const File>& file) { core_->attach(file); }
Arena Engine::make_arena(std::optional<PageLock> page_lock) {
  return Arena(std::make_shared<Offer>(core_), page_lock);
}
std::string Engine::method() const { return core_->method(); }
const std::string& Engine::why_threads() const { return core_->why_threads(); }

}  // namespace peftds::io
