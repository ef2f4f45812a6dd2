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

constexpr int64_t kAlike = 64;  // sizes that differ by less than one part in so many

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

void Executor::advance(std::optional<size_t> position, int demanded, int resident, int most) {
  const auto lock = locked();
  PEFTDS_CHECK(!position || *position < order_.size(), kInvalidArgument,
               "there is no such position in an order of ", order_.size());
  if (demanded >= 0) {
    static_cast<void>(definition_of(demanded));
    if (!loads_[static_cast<size_t>(demanded)]) start(demanded, true);
  }
  const std::vector<int> next = position ? coming(*position, most) : std::vector<int>{};
  for (size_t layer = 0; layer < loads_.size(); ++layer) {
    const auto number = static_cast<int>(layer);
    const bool wanted = std::find(next.begin(), next.end(), number) != next.end();
    if (number != demanded && (number == resident || !wanted)) discard(number);
  }
  sweep();
  read_ahead(next);
}

/// The layers that must be read for the uses within the reach of one, in their order, at most so many.
std::vector<int> Executor::coming(size_t position, int most) const {
  std::vector<int> layers;
  for (int step = 1; step <= order_[position].reach; ++step) {
    const Use& use = order_[(position + static_cast<size_t>(step)) % order_.size()];
    if (use.reads && layers.size() < static_cast<size_t>(most)) layers.push_back(use.layer);
  }
  return layers;
}

/// What was dropped holds its memory until its reads are over, which the plan has not counted on: as long as
/// there is such, nothing is started.
void Executor::read_ahead(const std::vector<int>& layers) {
  for (const int layer : layers) {
    if (!discarded_.empty()) return;
    if (loads_[static_cast<size_t>(layer)]) continue;
    try {
      start(layer, false);
    } catch (const Error&) {  // no memory: who needs the layer asks again, and is told
      return;
    }
  }
}

/// The size of a layer's block: that of the largest layer which is hardly larger. Layers that are alike
/// differ by where their tensors begin in a page, and memory is used again only by what has its size.
int64_t Executor::block_size(const Definition& definition) const {
  const int64_t least = std::max<int64_t>(definition.layout.bytes, 1);
  int64_t size = least;
  for (const auto& other : definitions_)
    if (other && other->layout.bytes - least <= least / kAlike) size = std::max(size, other->layout.bytes);
  return size;
}

Executor::LoadPointer Executor::start(int layer, bool demanded) {
  auto load = std::make_shared<Load>();
  load->definition = definitions_[static_cast<size_t>(layer)];
  load->layer = layer;
  load->demanded = demanded;
  const Definition& definition = *load->definition;
  auto block = std::make_shared<Arena::Buffer>(arena_.allocate(block_size(definition)));
  std::vector<io::Extent> extents;
  for (size_t i = 0; i < definition.sources.size(); ++i) {
    const Source& source = definition.sources[i];
    const Pages& pages = definition.pages[i];
    load->staged.emplace_back();
    if (source.size == 0) continue;
    if (source.cast) load->staged.back().emplace(arena_.allocate(pages.size));
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
  const LoadPointer load = loads_[index] ? loads_[index] : start(layer, true);
  // Where nothing is converted, all is there when the transfer is over.
  const bool waits = !load->ready && (load->definition->layout.staged > 0 || !load->ticket->done());
  if (!load->ready && !load->claimed) {
    lock.unlock();
    bool arrived = true;
    try {
      arrived = load->ticket->wait_for(limit);
    } catch (const Error&) {  // complete() keeps it
    }
    lock.lock();
    if (arrived && !load->claimed) {
      load->claimed = true;
      std::erase(to_decode_, load);
      lock.unlock();
      complete(*load, false);
      lock.lock();
    }
  }
  changed_.wait_until(lock, deadline, [&] { return load->ready; });
  if (waits) note({Event::Kind::kWait, layer, 0, false, asked, now()});
  if (!load->ready) {
    load->looked_at = true;
    return nullptr;
  }
  if (loads_[index] == load) loads_[index] = nullptr;
  if (load->failure) std::rethrow_exception(load->failure);
  ++(load->demanded ? counts_.demanded : waits || load->looked_at ? counts_.waited : counts_.ready);
  return load->block;
}

void Executor::decode_in_background(const LoadPointer& load) {
  to_decode_.push_back(load);
  if (!decoder_) decoder_ = std::make_unique<std::thread>([this] { run(); });
  changed_.notify_all();
}

void Executor::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !to_decode_.empty(); });
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
  changed_.notify_all();
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
    return;
  }
  std::unique_lock lock(mutex_);
  closed_ = true;
  changed_.notify_all();
  const std::unique_ptr<std::thread> decoder = std::move(decoder_);
  const auto loads = std::exchange(loads_, {});
  const auto discarded = std::exchange(discarded_, {});
  to_decode_.clear();
  lock.unlock();
  if (decoder) decoder->join();
  // Tickets that go wait for their transfers.
}

}  // namespace peftds::stream
