// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "io/fault_plan.h"

namespace peftds::io {
namespace {

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(FaultPlan plan, const std::function<std::unique_ptr<Transport>(Deliver)>& make_inner,
                  Deliver deliver)
      : plan_(std::move(plan)),
        deliver_(std::move(deliver)),
        inner_(make_inner([this](std::span<const Completion> done) { completed(done); })) {}

  Submitted submit(std::span<Block* const> blocks) override {
    {
      const std::lock_guard lock(mutex_);
      for (Block* block : blocks) plan_for(*block);
    }
    const Submitted submitted = inner_->submit(blocks);
    if (submitted.accepted < blocks.size()) {
      const std::lock_guard lock(mutex_);
      for (Block* block : blocks.subspan(submitted.accepted)) forget(*block);
    }
    return submitted;
  }

  [[nodiscard]] std::string_view name() const noexcept override { return inner_->name(); }
  bool offer_memory(std::byte* data, int64_t size) noexcept override {
    return inner_->offer_memory(data, size);
  }
  void withdraw_memory(std::byte* data) noexcept override { inner_->withdraw_memory(data); }
  bool offer_file(int descriptor) noexcept override { return inner_->offer_file(descriptor); }

 private:
  static constexpr int64_t kSector = 4096;  // direct transfers cannot be cut elsewhere

  struct Planned {
    std::optional<Fault> fault;
    int64_t size;  // before a short transfer cut it
  };

  void plan_for(Block& block) {
    const auto fault = plan_.next(block.direction);
    planned_[&block] = {fault, block.size};
    if (fault && fault->kind == Fault::Kind::kShort && block.size >= 2 * kSector)
      block.size = block.size / 2 / kSector * kSector;
  }

  void forget(Block& block) {
    block.size = planned_.at(&block).size;
    planned_.erase(&block);
  }

  void completed(std::span<const Completion> done) {
    std::vector<Completion> ready;
    int delay = 0;
    {
      const std::lock_guard lock(mutex_);
      for (const Completion& completion : done) {
        const auto fault = planned_.at(completion.block).fault;
        forget(*completion.block);
        if (fault && fault->kind == Fault::Kind::kReorder) {
          held_.push_back(completion);
          continue;
        }
        if (fault && fault->kind == Fault::Kind::kDelay) delay = std::max(delay, fault->value);
        ready.push_back({completion.block, result_with(fault, completion)});
      }
      // What was held back comes after what is ready now, and at the latest when nothing else is under way.
      if (!ready.empty() || planned_.empty()) {
        ready.insert(ready.end(), held_.begin(), held_.end());
        held_.clear();
      }
    }
    if (delay > 0) std::this_thread::sleep_for(std::chrono::milliseconds(delay));
    if (!ready.empty()) deliver_(ready);
  }

  static int64_t result_with(std::optional<Fault> fault, const Completion& completion) {
    if (!fault || completion.result < 0) return completion.result;
    switch (fault->kind) {
      case Fault::Kind::kErrno: return -fault->value;
      case Fault::Kind::kEnd: return 0;
      case Fault::Kind::kShort:  // too small to cut: at least report it so
        return completion.result == completion.block->size ? std::max<int64_t>(1, completion.result / 2)
                                                           : completion.result;
      default: return completion.result;
    }
  }

  std::mutex mutex_;  // guards all that changes below
  FaultPlan plan_;
  std::map<Block*, Planned> planned_;  // blocks under way
  std::vector<Completion> held_;
  const Deliver deliver_;
  std::unique_ptr<Transport> inner_;  // last: its threads use all of the above until it is gone
};

}  // namespace

std::unique_ptr<Transport> make_faulty_transport(
    FaultPlan plan, const std::function<std::unique_ptr<Transport>(Deliver)>& make_inner, Deliver deliver) {
  return std::make_unique<FaultyTransport>(std::move(plan), make_inner, std::move(deliver));
}

}  // namespace peftds::io
