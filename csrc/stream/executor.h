// SPDX-License-Identifier: Apache-2.0
// The executor: reads layers from files ahead of their use, as a plan says, and makes them ready.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "io/engine.h"
#include "kernels/dtype.h"

namespace peftds::stream {

using Block = std::shared_ptr<const Arena::Buffer>;

/// From the element type in the file to that in memory.
struct Cast {
  kernels::DType from;
  kernels::DType to;
};

/// One tensor of a layer: where its bytes lie, and what becomes of them.
struct Source {
  std::shared_ptr<const io::File> file;
  int64_t offset = 0;  // bytes; a multiple of the element's size where there is a cast
  int64_t size = 0;    // bytes in the file
  int64_t room = 0;    // bytes in memory, at least those of the tensor; what follows it is zeros
  std::optional<Cast> cast;
  bool read_only = false;  // a change of the file since it was opened is an error
};

/// The memory that a layer takes, in bytes, and where its tensors begin in its block.
struct Layout {
  int64_t bytes = 0;   // of the block
  int64_t staged = 0;  // beside it, until what needs conversion is converted
  std::vector<int64_t> offsets;
};

/// One use of a layer, in the order of a pass that repeats.
struct Use {
  int layer = 0;
  bool reads = false;    // when its turn comes it must have been read
  int reach = 0;         // during it, those of the next so many uses that must be read may be under way
  bool counted = false;  // its memory is not one of the two places for the layer in use and the next one
};

/// Where a pass is in the order.
struct Step {
  std::optional<size_t> position;              // the use that begins; none where the pass is in no order
  int demanded = -1;                           // a layer to read before all others, which is taken next
  int resident = -1;                           // the layer of this use, if it is in memory already
  int most = std::numeric_limits<int>::max();  // layers that may be on their way
  bool between = false;  // no layer is in use, and the use at `position` comes next: it is read ahead, too
};

/// What happened, for statistics and traces. Times are nanoseconds of the steady clock.
struct Event {
  enum class Kind { kRead, kDecode, kWait };
  Kind kind;
  int layer;
  int64_t bytes;
  bool background;  // on the executor's own thread
  int64_t start;
  int64_t end;
};

struct Counts {
  int64_t ready = 0;     // layers that were there when they were wanted
  int64_t waited = 0;    // those that were under way
  int64_t demanded = 0;  // those whose read began only then
  int64_t vain = 0;      // those that were read and not used
  int64_t bytes = 0;     // read from files
};

/// Reads go to the storage engine from whichever thread calls; conversion of what is read ahead runs on
/// one thread of the executor's own, made when first needed. A layer's memory is new at each read and
/// belongs to whoever took it, so that nothing is reused while somebody holds a view of it, and no read
/// ever waits for memory.
///
/// Thread-safe, except that one layer is not used by two threads at once. After fork() the child's copy
/// refuses every use.
class Executor {
 public:
  /// `threads`: for conversions that somebody waits for.
  Executor(std::shared_ptr<io::Engine> engine, Arena arena, int threads);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Says what a layer is made of, and drops what was read of it before. Throws kInvalidArgument.
  Layout define(int layer, std::vector<Source> sources);

  /// The order that is followed from now on; an empty one foretells nothing.
  void follow(std::vector<Use> order);

  /// Starts the reads that the reach of a use allows, and drops what nobody is going to use.
  void advance(const Step& step);

  /// Returns a layer's block when it is ready, or null after `limit`. Throws what went wrong (FileError),
  /// once; the next call reads anew.
  [[nodiscard]] Block take(int layer, std::chrono::milliseconds limit);

  /// Whether a layer was read, and take() would return it without waiting, or throw what went wrong. Not
  /// before it is converted, which for a layer that was demanded is part of take(). Starts nothing.
  [[nodiscard]] bool ready(int layer) const;

  /// What was read of a layer is out of date.
  void drop(int layer);

  /// Returns the events since the last call, oldest first; of more than `kEvents` the latest.
  [[nodiscard]] std::vector<Event> drain();
  [[nodiscard]] Counts counts() const;

  /// Waits for what is under way and ends the thread. Idempotent.
  void close();

  static constexpr size_t kEvents = 1 << 16;

 private:
  struct Definition;
  struct Load;
  using LoadPointer = std::shared_ptr<Load>;

  [[nodiscard]] std::unique_lock<std::mutex> locked() const;
  const Definition& definition_of(int layer) const;
  [[nodiscard]] int64_t most_memory(const Definition& definition, bool counted) const;
  LoadPointer start(int layer, bool demanded, bool counted);
  [[nodiscard]] std::vector<Use> coming(const Step& step) const;
  void read_ahead(const std::vector<Use>& uses);
  void discard(int layer);
  void sweep();
  bool arrives(const Load& load, std::unique_lock<std::mutex>& lock,
               std::chrono::steady_clock::time_point deadline);
  bool wait_for_memory(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point deadline);
  void decode_in_background(const LoadPointer& load);
  void run();
  void complete(Load& load, bool background);
  void decode(Load& load, int threads) const;
  void note(const Event& event);

  const pid_t process_;
  const std::shared_ptr<io::Engine> engine_;
  Arena arena_;
  const int threads_;

  mutable std::mutex mutex_;  // guards all below, and the state of loads
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::vector<std::shared_ptr<const Definition>> definitions_;  // by layer
  std::vector<LoadPointer> loads_;                              // by layer
  std::vector<LoadPointer> discarded_;                          // whose reads may be under way
  std::vector<Use> order_;
  std::deque<LoadPointer> to_decode_;
  std::deque<Event> events_;
  Counts counts_;
  bool closed_ = false;
  std::unique_ptr<std::thread> decoder_;
};

}  // namespace peftds::stream
