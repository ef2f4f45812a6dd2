// SPDX-License-Identifier: Apache-2.0
#include "stream/executor.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "io/piece.h"
#include "kernels/cpu/kernels.h"

namespace peftds::stream {
namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

int64_t now() { return nanoseconds(Clock::now()); }

int64_t size_in_memory(const Source& source) {
  if (!source.cast) return source.size;
  return source.size / kernels::size_of(source.cast->from) * kernels::size_of(source.cast->to);
}

void check(const Source& source) {
  PEFTDS_CHECK(source.file && source.offset >= 0 && source.size >= 0, kInvalidArgument,
               "a source needs a file, and an offset and a size that are not negative; got offset ",
               source.offset, " and size ", source.size);
  const int64_t item = source.cast ? kernels::size_of(source.cast->from) : 1;
  PEFTDS_CHECK(source.offset % item == 0 && source.size % item == 0, kInvalidArgument,
               "a source that is converted must consist of whole elements; got offset ", source.offset,
               " and size ", source.size, " for elements of ", item, " bytes");
  PEFTDS_CHECK(source.room >= size_in_memory(source), kInvalidArgument, "a tensor of ",
               size_in_memory(source), " bytes does not fit ", source.room);
}

/// The whole pages around a source, as far as the file goes: what direct I/O reads without a copy.
struct Pages {
  int64_t offset = 0;
  int64_t size = 0;
  int64_t before = 0;  // bytes of them before the source
};

Pages pages_of(const Source& source) {
  Pages pages;
  pages.offset = io::round_down(source.offset, Arena::kPage);
  pages.before = source.offset - pages.offset;
  const int64_t end = source.offset + source.size;
  pages.size = std::max(end, std::min(io::round_up(end, Arena::kPage), source.file->size())) - pages.offset;
  return pages;
}

}  // namespace

/// What a layer is made of. A tensor that needs no conversion lies in its block as far from a page's
/// beginning as in its file.
struct Executor::Definition {
  std::vector<Source> sources;
  std::vector<Pages> pages;
  Layout layout;
  int64_t read_bytes = 0;
};

/// A layer on its way. `block` is written by the storage engine, and by whoever has `claimed` the load.
struct Executor::Load {
  std::shared_ptr<const Definition> definition;
  int layer = 0;
  std::shared_ptr<const Arena::Buffer> block;
  std::vector<std::optional<Arena::Buffer>> staged;  // by source, where it is converted
  std::optional<io::Ticket> ticket;
  int64_t started = 0;
  bool claimed = false;
  bool ready = false;
  bool demanded = false;
  bool looked_at = false;  // somebody asked for it already, and it was not there
  std::exception_ptr failure;
};

Executor::Executor(std::shared_ptr<io::Engine> engine, Arena arena, int threads)
    : process_(getpid()), engine_(std::move(engine)), arena_(std::move(arena)), threads_(threads) {}

Executor::~Executor() { close(); }

std::unique_lock<std::mutex> Executor::locked() const {
  PEFTDS_CHECK(getpid() == process_, kInvalidArgument,  // before the lock, which may be held for ever
               "this executor was made by another process, before fork(): make one here");
  std::unique_lock lock(mutex_);
  PEFTDS_CHECK(!closed_, kInvalidArgument, "the executor is closed");
  return lock;
}

Layout Executor::define(int layer, std::vector<Source> sources) {
  PEFTDS_CHECK(layer >= 0, kInvalidArgument, "a layer's number must not be negative, got ", layer);
  auto made = std::make_shared<Definition>();
  for (const Source& source : sources) {
    check(source);
    const Pages pages = pages_of(source);
    const int64_t before = source.cast ? 0 : pages.before;
    made->layout.offsets.push_back(made->layout.bytes + before);
    const int64_t end = std::max(before + source.room, source.cast ? 0 : pages.size);
    made->layout.bytes += io::round_up(end, Arena::kPage);
    made->pages.push_back(pages);
    if (source.cast && source.size > 0) made->layout.staged += io::round_up(pages.size, Arena::kPage);
    made->read_bytes += source.size == 0 ? 0 : pages.size;
  }
  made->sources = std::move(sources);
  const auto lock = locked();
  const auto needed = static_cast<size_t>(layer) + 1;
  if (definitions_.size() < needed) {
    definitions_.resize(needed);
    loads_.resize(needed);
  }
  discard(layer);
  definitions_[static_cast<size_t>(layer)] = made;
  return made->layout;
}

const Executor::Definition& Executor::definition_of(int layer) const {
  const auto index = static_cast<size_t>(layer);
  PEFTDS_CHECK(layer >= 0 && index < definitions_.size() && definitions_[index], kInvalidArgument, "layer ",
               layer, " was not defined");
  return *definitions_[index];
}

void Executor::follow(std::vector<Use> order) {
  const auto lock = locked();
  for (const Use& use : order)
    if (use.reads) static_cast<void>(definition_of(use.layer));
  order_ = std::move(order);
}

void Executor::advance(const Step& step) {
  const auto lock = locked();
  PEFTDS_CHECK(!step.position || *step.position < order_.size(), kInvalidArgument,
               "there is no such position in an order of ", order_.size());
  if (step.demanded >= 0) static_cast<void>(definition_of(step.demanded));
  const std::vector<Use> next = coming(step);
  for (size_t layer = 0; layer < loads_.size(); ++layer) {
    const auto number = static_cast<int>(layer);
    const bool wanted =
        std::any_of(next.begin(), next.end(), [&](const Use& use) { return use.layer == number; });
    if (number != step.demanded && (number == step.resident || !wanted)) discard(number);
  }
  sweep();
  if (!discarded_.empty()) return;
  if (step.demanded >= 0 && !loads_[static_cast<size_t>(step.demanded)])
    start(step.demanded, true, step.position && order_[*step.position].counted);
  read_ahead(next);
}

/// The uses that must be read within the reach of a step, in their order.
std::vector<Use> Executor::coming(const Step& step) const {
  std::vector<Use> uses;
  if (!step.position) return uses;
  auto most = static_cast<size_t>(step.most);
  if (step.between && order_[*step.position].reads) {
    uses.push_back(order_[*step.position]);
    most += uses.size();
  }
  for (int ahead = 1; ahead <= order_[*step.position].reach; ++ahead) {
    const Use& use = order_[(*step.position + static_cast<size_t>(ahead)) % order_.size()];
    if (use.reads && uses.size() < most) uses.push_back(use);
  }
  return uses;
}

void Executor::read_ahead(const std::vector<Use>& uses) {
  for (size_t i = 0; i < uses.size(); ++i) {
    if (loads_[static_cast<size_t>(uses[i].layer)]) continue;
    try {
      start(uses[i].layer, false, uses[i].counted || i > 0);
    } catch (const std::exception&) {  // no memory, or no thread: who needs the layer asks again, and is told
      return;
    }
  }
}

/// The memory that a block may take. A layer that is not `counted` lies in one of the two places for the
/// layer in use and the next one, which are as large as the largest layer.
int64_t Executor::most_memory(const Definition& definition, bool counted) const {
  int64_t most = definition.layout.bytes;
  for (const auto& other : definitions_)
    if (other && !counted) most = std::max(most, other->layout.bytes);
  return most;
}

Executor::LoadPointer Executor::start(int layer, bool demanded, bool counted) {
  auto load = std::make_shared<Load>();
  load->definition = definitions_[static_cast<size_t>(layer)];
  load->layer = layer;
  load->demanded = demanded;
  const Definition& definition = *load->definition;
  auto block = std::make_shared<Arena::Buffer>(
      arena_.allocate(std::max<int64_t>(definition.layout.bytes, 1), most_memory(definition, counted)));
  std::vector<io::Extent> extents;
  for (size_t i = 0; i < definition.sources.size(); ++i) {
    const Source& source = definition.sources[i];
    const Pages& pages = definition.pages[i];
    load->staged.emplace_back();
    if (source.size == 0) continue;
    if (source.cast) load->staged.back().emplace(arena_.allocate(pages.size, pages.size + Arena::kPage));
    std::byte* to = source.cast ? load->staged.back()->data()
                                : block->data() + definition.layout.offsets[i] - pages.before;
    extents.push_back({source.file, pages.offset, to, pages.size});
  }
  load->block = std::move(block);
  load->started = now();
  load->ticket.emplace(engine_->submit(io::Direction::kRead, std::move(extents),
                                       demanded ? io::Priority::kDemand : io::Priority::kReadAhead));
  loads_[static_cast<size_t>(layer)] = load;
  if (definition.layout.staged > 0 && !demanded) decode_in_background(load);
  return load;
}

/// A layer that nobody is going to use. Its memory goes back when its reads are over.
void Executor::discard(int layer) {
  LoadPointer& load = loads_[static_cast<size_t>(layer)];
  if (!load) return;
  ++counts_.vain;
  std::erase(to_decode_, load);
  discarded_.push_back(std::move(load));
  load = nullptr;
}

void Executor::sweep() {
  std::erase_if(discarded_, [](const LoadPointer& load) {
    return load->ticket->done() && (load->ready || !load->claimed);  // else it is being converted
  });
}

void Executor::drop(int layer) {
  const auto lock = locked();
  if (layer >= 0 && static_cast<size_t>(layer) < loads_.size()) discard(layer);
}

Block Executor::take(int layer, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  const int64_t asked = now();
  auto lock = locked();
  static_cast<void>(definition_of(layer));
  const auto index = static_cast<size_t>(layer);
  if (!loads_[index] && !wait_for_memory(lock, deadline)) return nullptr;
  const LoadPointer load = loads_[index] ? loads_[index] : start(layer, true, true);
  // Where nothing is converted, all is there when the transfer is over.
  const bool waits = !load->ready && (load->definition->layout.staged > 0 || !load->ticket->done());
  if (!load->ready && !load->claimed && arrives(*load, lock, deadline) && !load->claimed) {
    load->claimed = true;
    std::erase(to_decode_, load);
    lock.unlock();
    complete(*load, false);
    lock.lock();
  }
  changed_->wait_until(lock, deadline, [&] { return load->ready; });
  if (waits) note({Event::Kind::kWait, layer, 0, false, asked, now()});
  if (!load->ready) {
    load->looked_at = true;
    return nullptr;
  }
  PEFTDS_CHECK(!closed_, kInvalidArgument, "the executor was closed");
  if (loads_[index] == load) loads_[index] = nullptr;
  if (load->failure) std::rethrow_exception(load->failure);
  ++(load->demanded ? counts_.demanded : waits || load->looked_at ? counts_.waited : counts_.ready);
  return load->block;
}

bool Executor::ready(int layer) const {
  const auto lock = locked();
  if (layer < 0 || static_cast<size_t>(layer) >= loads_.size()) return false;
  const LoadPointer& load = loads_[static_cast<size_t>(layer)];
  return load && (load->ready || (load->definition->layout.staged == 0 && load->ticket->done()));
}

/// Waits for a load's transfer without the lock; returns whether it is over, well or not.
bool Executor::arrives(const Load& load, std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
  lock.unlock();
  bool arrived = true;
  try {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    arrived = load.ticket->wait_for(std::max(left, std::chrono::milliseconds(0)));
  } catch (const Error&) {  // complete() keeps it
  }
  lock.lock();
  return arrived;
}

/// What was dropped holds its memory until its reads are over, and the plan has not counted on that: before
/// then nothing more is read. Returns whether that time has come.
bool Executor::wait_for_memory(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
  while (!discarded_.empty()) {
    const LoadPointer load = discarded_.front();
    if (!arrives(*load, lock, deadline)) return false;
    if (load->claimed && !changed_->wait_until(lock, deadline, [&] { return load->ready; })) return false;
    PEFTDS_CHECK(!closed_, kInvalidArgument, "the executor was closed");
    sweep();
  }
  return true;
}

void Executor::decode_in_background(const LoadPointer& load) {
  to_decode_.push_back(load);
  if (!decoder_) decoder_ = std::make_unique<std::thread>([this] { run(); });
  changed_->notify_all();
}

void Executor::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_->wait(lock, [this] { return closed_ || !to_decode_.empty(); });
    if (closed_) return;
    const LoadPointer load = to_decode_.front();
    lock.unlock();
    try {
      load->ticket->wait(io::Priority::kReadAhead);
    } catch (const Error&) {  // complete() keeps it
    }
    lock.lock();
    if (std::erase(to_decode_, load) == 0) continue;  // dropped, or claimed by who needs it
    load->claimed = true;
    lock.unlock();
    complete(*load, true);
    lock.lock();
  }
}

/// Makes a claimed load ready, whose transfer is over.
void Executor::complete(Load& load, bool background) {
  std::exception_ptr failure;
  int64_t arrived = 0;
  int64_t begun = 0;
  try {
    load.ticket->wait();
    arrived = nanoseconds(load.ticket->finished_at());
    for (const Source& source : load.definition->sources)
      if (source.read_only) source.file->check_unchanged();
    begun = now();
    decode(load, background ? 1 : threads_);
  } catch (...) {
    failure = std::current_exception();
  }
  const int64_t decoded = now();
  load.staged.clear();
  const std::lock_guard lock(mutex_);
  load.failure = failure;
  load.ready = true;
  if (!failure) {
    const int64_t bytes = load.definition->read_bytes;
    counts_.bytes += bytes;
    note({Event::Kind::kRead, load.layer, bytes, false, load.started, arrived});
    if (load.definition->layout.staged > 0)
      note({Event::Kind::kDecode, load.layer, load.definition->layout.bytes, background, begun, decoded});
  }
  changed_->notify_all();
}

void Executor::decode(Load& load, int threads) const {
  const Definition& definition = *load.definition;
  for (size_t i = 0; i < definition.sources.size(); ++i) {
    const Source& source = definition.sources[i];
    std::byte* tensor = load.block->data() + definition.layout.offsets[i];
    if (source.cast && source.size > 0)
      kernels::cpu::cast(load.staged[i]->data() + definition.pages[i].before, source.cast->from, tensor,
                         source.cast->to, source.size / kernels::size_of(source.cast->from), threads);
    const int64_t used = size_in_memory(source);
    std::memset(tensor + used, 0, static_cast<size_t>(source.room - used));
  }
}

/// The lock is held.
void Executor::note(const Event& event) {
  if (events_.size() == kEvents) events_.pop_front();
  events_.push_back(event);
}

std::vector<Event> Executor::drain() {
  const auto lock = locked();
  std::vector<Event> drained(events_.begin(), events_.end());
  events_.clear();
  return drained;
}

Counts Executor::counts() const {
  const auto lock = locked();
  return counts_;
}

void Executor::close() {
  if (getpid() != process_) {  // the thread is not in this process, nor are the transfers
    static_cast<void>(decoder_.release());
    static_cast<void>(changed_.release());  // destroying it would wait for those who wait for it
    return;
  }
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_->notify_all();
  const std::unique_ptr<std::thread> decoder = std::move(decoder_);
  const auto loads = std::exchange(loads_, {});
  const auto discarded = std::exchange(discarded_, {});
  to_decode_.clear();
  lock.unlock();
  if (decoder) decoder->join();
  // Tickets that go wait for their transfers.
}

}  // namespace peftds::stream
