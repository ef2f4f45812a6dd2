// SPDX-License-Identifier: Apache-2.0
// The executor: layers have the bytes of their files whatever the plan, errors reach who needs the layer, and
// nothing is left behind.
#include "stream/executor.h"

#include <numeric>
#include <set>

#include "in_child.h"
#include "io_tools.h"

namespace {

using namespace peftds::stream;
using namespace peftds::test;
using peftds::Arena;
using peftds::ErrorCode;
using peftds::io::Direct;
using peftds::io::Engine;
using peftds::kernels::DType;
using std::chrono::milliseconds;

constexpr milliseconds kLong{60'000};
constexpr int kAll = 1'000;

/// Some layers of random bytes in one file, each of two tensors at odd offsets.
struct Model {
  explicit Model(int layers, peftds::io::Method method = peftds::io::Method::kThreads,
                 const std::string& faults = "", bool read_only = false)
      : bytes(random_bytes(static_cast<size_t>(layers) * kStride + 100, 7)),
        file(file_with(folder / "file", bytes)),
        engine(std::make_shared<Engine>(settings_of(method, 4, 4096, faults))),
        arena(engine->make_arena()) {
    for (int layer = 0; layer < layers; ++layer) sources.push_back(sources_of(layer, read_only));
  }

  [[nodiscard]] std::vector<Source> sources_of(int layer, bool read_only) const {
    const int64_t start = int64_t{layer} * kStride;
    return {{file, start + 12, 5000, 5000, std::nullopt, read_only},
            {file, start + 8192, 3000 + 500 * (layer % 3), 4096, std::nullopt, read_only}};
  }

  std::unique_ptr<Executor> executor() const {
    auto made = std::make_unique<Executor>(engine, arena, 2);
    for (size_t layer = 0; layer < sources.size(); ++layer)
      layouts[layer] = made->define(static_cast<int>(layer), sources[layer]);
    return made;
  }

  void check(int layer, const Block& block) const {
    CHECK(block, "no block of layer ", layer);
    const auto& parts = sources[static_cast<size_t>(layer)];
    const auto& layout = layouts[static_cast<size_t>(layer)];
    for (size_t i = 0; i < parts.size(); ++i) {
      const std::byte* at = block->data() + layout.offsets[i];
      CHECK(std::memcmp(at, bytes.data() + parts[i].offset, static_cast<size_t>(parts[i].size)) == 0,
            "layer ", layer, ", tensor ", i, " has other bytes");
      for (int64_t rest = parts[i].size; rest < parts[i].room; ++rest)
        CHECK(at[rest] == std::byte{0}, "layer ", layer, ": what follows tensor ", i, " is not zero");
    }
  }

  static constexpr int64_t kStride = 12'300;
  Folder folder;
  Bytes bytes;
  FilePointer file;
  std::shared_ptr<Engine> engine;
  Arena arena;
  std::vector<std::vector<Source>> sources;
  mutable std::vector<Layout> layouts = std::vector<Layout>(64);
};

std::vector<Use> sweep(int layers, int reach) {
  std::vector<Use> order;
  for (int layer = 0; layer < layers; ++layer) order.push_back({layer, true, reach, false});
  for (int layer = layers - 1; layer >= 0; --layer) order.push_back({layer, true, reach, false});
  return order;
}

TEST(a_sweep_has_the_bytes_of_the_file) {
  for (const auto method : methods()) {
    const Model model(6, method);
    const auto executor = model.executor();
    const auto order = sweep(6, 3);
    executor->follow(order);
    for (int pass = 0; pass < 3; ++pass)
      for (size_t use = 0; use < order.size(); ++use) {
        executor->advance({use, order[use].layer, -1, kAll});
        model.check(order[use].layer, executor->take(order[use].layer, kLong));
      }
    const Counts counts = executor->counts();
    CHECK(counts.ready + counts.waited + counts.demanded == 36, counts.ready, " ", counts.waited, " ",
          counts.demanded);
    // The first, and at each turn the layer that is used twice in a row, which nobody keeps here.
    CHECK(counts.demanded == 1 + 5, counts.demanded, " layers were not read ahead");
  }
}

TEST(random_orders_positions_and_reaches_have_the_bytes_of_the_file) {
  std::mt19937 random(3);
  const auto below = [&](int limit) { return static_cast<int>(random() % static_cast<unsigned>(limit)); };
  const Model model(8);
  const auto executor = model.executor();
  for (int round = 0; round < 60; ++round) {
    std::vector<Use> order;
    for (int use = 0; use < 1 + below(12); ++use)
      order.push_back({below(8), below(4) != 0, below(5), below(2) != 0});
    executor->follow(order);
    for (int step = 0; step < 12; ++step) {
      const bool foretold = below(5) != 0;
      const int layer = below(8);
      const auto position = static_cast<size_t>(below(static_cast<int>(order.size())));
      if (below(6) == 0) {
        executor->advance({foretold ? std::optional(position) : std::nullopt, -1, layer, kAll});
        continue;
      }
      executor->advance({foretold ? std::optional(position) : std::nullopt, layer, -1, kAll});
      if (below(8) == 0) executor->drop(layer);
      model.check(layer, executor->take(layer, kLong));
    }
  }
}

TEST(memory_that_somebody_holds_is_not_used_again) {
  const Model model(3);
  const auto executor = model.executor();
  std::vector<std::pair<int, Block>> held;
  for (int use = 0; use < 12; ++use) {
    held.emplace_back(use % 3, executor->take(use % 3, kLong));
    for (const auto& [layer, block] : held) model.check(layer, block);
  }
}

TEST(numbers_are_converted_while_they_are_read) {
  const Folder folder;
  std::vector<float> numbers(3001);
  std::iota(numbers.begin(), numbers.end(), -1500.0F);
  Bytes bytes(8 + numbers.size() * sizeof(float));
  std::memcpy(bytes.data() + 8, numbers.data(), numbers.size() * sizeof(float));
  const FilePointer file = file_with(folder / "file", bytes);
  const auto engine = std::make_shared<Engine>(settings_of(peftds::io::Method::kThreads, 2, 4096));
  Executor executor(engine, engine->make_arena(), 2);
  const auto size = static_cast<int64_t>(numbers.size() * sizeof(float));
  std::vector<Layout> layouts;
  for (int layer = 0; layer < 4; ++layer)
    layouts.push_back(executor.define(
        layer, {{file, 8, size, size / 2 + 10, Cast{DType::kFloat32, DType::kBFloat16}, true}}));
  executor.follow(sweep(4, 3));
  for (int pass = 0; pass < 40; ++pass)
    for (size_t use = 0; use < 8; ++use) {
      const int layer = use < 4 ? static_cast<int>(use) : 7 - static_cast<int>(use);
      executor.advance({use, layer, -1, kAll});
      const Block block = executor.take(layer, kLong);
      const std::byte* at = block->data() + layouts[static_cast<size_t>(layer)].offsets[0];
      for (size_t i = 0; i < numbers.size(); i += 97) {
        uint16_t half = 0;
        std::memcpy(&half, at + 2 * i, sizeof(half));
        uint32_t exact = 0;
        std::memcpy(&exact, &numbers[i], sizeof(exact));
        const uint32_t rounded = (exact + 0x7fff + ((exact >> 16) & 1)) >> 16;
        CHECK(half == rounded, numbers[i], " became ", half, ", not ", rounded);
      }
    }
}

TEST(a_failed_read_reaches_who_needs_the_layer_once) {
  const Model model(3, peftds::io::Method::kThreads, "read:eio@1");
  const auto executor = model.executor();
  executor->follow(sweep(3, 2));
  executor->advance({2, -1, -1, kAll});  // layers 2 and 1 are read ahead
  int failures = 0;
  for (const int layer : {2, 1, 0, 2, 1, 0}) {
    try {
      model.check(layer, executor->take(layer, kLong));
    } catch (const peftds::FileError& error) {
      CHECK(error.number() == EIO, error.what());
      ++failures;
      model.check(layer, executor->take(layer, kLong));
    }
  }
  CHECK(failures == 1, failures, " failures");
}

TEST(a_file_that_somebody_changes_is_an_error) {
  const Model model(2, peftds::io::Method::kThreads, "", true);
  const auto executor = model.executor();
  model.check(0, executor->take(0, kLong));
  put(model.folder / "file", random_bytes(200'000, 1));
  const peftds::FileError error = file_error_of([&] { static_cast<void>(executor->take(1, kLong)); });
  CHECK(error.code() == ErrorCode::kCorruptData, error.what());
  CHECK(says(error, "changed while it was in use") && says(error, model.file->path()), error.what());
}

TEST(the_limit_of_a_wait_is_kept_and_the_layer_comes_later) {
  const Model model(1, peftds::io::Method::kThreads, "read:delay=300@1");
  const auto executor = model.executor();
  CHECK(executor->take(0, milliseconds(10)) == nullptr, "it was there too early");
  model.check(0, executor->take(0, kLong));
  const Counts counts = executor->counts();
  CHECK(counts.demanded == 1 && counts.ready == 0, counts.demanded, " ", counts.ready);
}

TEST(no_more_is_read_ahead_than_is_asked_for) {
  const Model model(6);
  const auto executor = model.executor();
  executor->follow(sweep(6, 4));
  executor->advance({0, -1, -1, 2});
  for (int layer = 1; layer <= 3; ++layer) model.check(layer, executor->take(layer, kLong));
  CHECK(executor->counts().demanded == 1, executor->counts().demanded);
}

TEST(between_passes_the_next_layer_is_read_ahead_too) {
  const Model model(4);
  const auto executor = model.executor();
  executor->follow(sweep(4, 1));
  executor->advance({0, -1, -1, kAll, true});
  model.check(0, executor->take(0, kLong));
  model.check(1, executor->take(1, kLong));
  CHECK(executor->counts().demanded == 0, executor->counts().demanded);
}

TEST(layers_out_of_the_plans_sight_are_dropped) {
  const Model model(6);
  const auto executor = model.executor();
  executor->follow(sweep(6, 4));
  executor->advance({0, -1, -1, kAll});
  executor->follow({});
  executor->advance({std::nullopt, -1, -1, kAll});
  CHECK(executor->counts().vain == 4, executor->counts().vain);
  model.check(3, executor->take(3, kLong));
  CHECK(executor->counts().demanded == 1, executor->counts().demanded);
}

/// Waits until a layer is ready; returns whether it became so within a while.
bool becomes_ready(const Executor& executor, int layer) {
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  while (!executor.ready(layer) && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
  return executor.ready(layer);
}

TEST(a_layer_is_ready_once_it_is_read_until_it_is_taken) {
  const Model model(3, peftds::io::Method::kThreads, "read:delay=300@1");
  const auto executor = model.executor();
  for (const int layer : {0, 2, -1, 3, 1'000'000}) CHECK(!executor->ready(layer), "nobody read ", layer);
  executor->follow(sweep(3, 2));
  executor->advance({0, -1, -1, kAll});  // layers 1 and 2 are read ahead, the first of them slowly
  CHECK(!executor->ready(1), "it was ready too early");
  for (const int layer : {1, 2}) CHECK(becomes_ready(*executor, layer), "layer ", layer);
  CHECK(!executor->ready(0), "asking began a read");
  for (const int layer : {1, 2}) model.check(layer, executor->take(layer, milliseconds(0)));
  const Counts counts = executor->counts();
  CHECK(counts.ready == 2 && counts.waited == 0 && counts.demanded == 0, counts.ready, " ", counts.waited);
  CHECK(!executor->ready(1) && !executor->ready(2), "what was taken is still ready");
  executor->close();
  CHECK_THROWS(executor->ready(0), kInvalidArgument);
}

TEST(a_layer_that_is_converted_is_ready_when_that_is_done) {
  Model model(3);
  for (auto& sources : model.sources)
    for (Source& source : sources) {
      source.cast = Cast{DType::kFloat32, DType::kBFloat16};
      source.size &= ~3;
    }
  const auto executor = model.executor();
  executor->follow(sweep(3, 1));
  executor->advance({0, 0, -1, kAll});  // layer 0 is demanded, layer 1 read ahead
  CHECK(becomes_ready(*executor, 1), "what is read ahead is converted by the executor's own thread");
  CHECK(!executor->ready(0), "what is demanded is converted by who takes it");
  for (const int layer : {0, 1}) CHECK(executor->take(layer, kLong), "no block of layer ", layer);
  CHECK(executor->counts().ready == 1, executor->counts().ready);
}

TEST(a_layer_whose_read_failed_is_ready_to_tell) {
  for (const bool converted : {false, true}) {
    Model model(2, peftds::io::Method::kThreads, "read:eio@1");
    if (converted) {
      for (Source& source : model.sources[1]) {
        source.cast = Cast{DType::kFloat32, DType::kBFloat16};
        source.size &= ~3;
      }
    }
    const auto executor = model.executor();
    executor->follow(sweep(2, 1));
    executor->advance({0, -1, -1, kAll});
    CHECK(becomes_ready(*executor, 1), "a failed read is not ready");
    const auto error = file_error_of([&] { static_cast<void>(executor->take(1, milliseconds(0))); });
    CHECK(error.number() == EIO, error.what());
    CHECK(!executor->ready(1), "a failure is told once");
  }
}

TEST(events_tell_of_reads_and_waits) {
  const Model model(2, peftds::io::Method::kThreads, "read:delay=30@1");
  const auto executor = model.executor();
  static_cast<void>(executor->take(1, kLong));
  const auto events = executor->drain();
  std::set<Event::Kind> kinds;
  for (const Event& event : events) {
    kinds.insert(event.kind);
    CHECK(event.layer == 1 && event.start <= event.end, event.layer);
    if (event.kind == Event::Kind::kRead) CHECK(event.bytes >= 8500, event.bytes);
    if (event.kind == Event::Kind::kWait)
      CHECK(event.end - event.start >= 20'000'000, event.end - event.start);
  }
  CHECK(kinds == (std::set{Event::Kind::kRead, Event::Kind::kWait}), events.size());
  CHECK(executor->drain().empty(), "events were told twice");
}

TEST(closing_in_the_middle_leaves_no_thread_and_refuses_what_comes_after) {
  const int before = thread_count();
  {
    Model model(4, peftds::io::Method::kThreads, "read:delay=50@2");
    for (auto& sources : model.sources)
      for (Source& source : sources) {
        source.cast = Cast{DType::kFloat32, DType::kBFloat16};
        source.size &= ~3;
      }
    const auto executor = model.executor();
    executor->follow(sweep(4, 4));
    executor->advance({0, -1, -1, kAll});
    executor->close();
    executor->close();
    CHECK_THROWS(executor->take(0, kLong), kInvalidArgument);
    CHECK_THROWS(executor->advance({0, 0, -1, kAll}), kInvalidArgument);
  }
  check_thread_count(before);
}

TEST(closing_while_another_thread_waits_ends_its_wait) {
  const Model model(1, peftds::io::Method::kThreads, "read:delay=100@1+");
  const auto executor = model.executor();
  std::thread closer([&] {
    std::this_thread::sleep_for(milliseconds(20));
    executor->close();
  });
  CHECK_THROWS(executor->take(0, kLong), kInvalidArgument);
  closer.join();
}

TEST(what_is_dropped_is_over_before_more_is_read_than_the_plan_counts_on) {
  const Model model(4, peftds::io::Method::kThreads, "read:delay=20@1+");
  const auto executor = model.executor();
  int64_t largest = 0;
  for (const Layout& layout : model.layouts) largest = std::max(largest, layout.bytes);
  for (int round = 0; round < 6; ++round) {
    executor->follow(sweep(4, 1));
    executor->advance({1, -1, -1, kAll});  // layer 2 is on its way,
    executor->follow({});
    executor->advance({std::nullopt, round % 2, -1, kAll});  // and another is wanted
    model.check(round % 2, executor->take(round % 2, kLong));
  }
  CHECK(model.arena.usage().peak_live <= 2 * largest, model.arena.usage().peak_live, " of ", 2 * largest);
}

TEST(wrong_arguments_are_refused) {
  const Model model(1);
  Executor executor(model.engine, model.arena, 1);
  CHECK_THROWS(executor.take(0, kLong), kInvalidArgument);
  CHECK_THROWS(executor.define(-1, {}), kInvalidArgument);
  CHECK_THROWS(executor.define(0, {{nullptr, 0, 1, 1, std::nullopt, false}}), kInvalidArgument);
  CHECK_THROWS(executor.define(0, {{model.file, 0, 10, 9, std::nullopt, false}}), kInvalidArgument);
  CHECK_THROWS(executor.define(0, {{model.file, 2, 8, 8, Cast{DType::kFloat32, DType::kBFloat16}, false}}),
               kInvalidArgument);
  CHECK_THROWS(executor.follow({{3, true, 1, false}}), kInvalidArgument);
  CHECK_THROWS(executor.advance({0, -1, -1, kAll}), kInvalidArgument);
}

TEST(a_tensor_without_bytes_is_zeros) {
  const Model model(1);
  Executor executor(model.engine, model.arena, 1);
  const Layout layout = executor.define(0, {{model.file, 0, 0, 64, std::nullopt, false}});
  const Block block = executor.take(0, kLong);
  for (int i = 0; i < 64; ++i) CHECK(block->data()[layout.offsets[0] + i] == std::byte{0}, i);
}

TEST(a_forked_child_is_told_to_make_its_own) {
  const Model model(2);
  const auto executor = model.executor();
  executor->follow(sweep(2, 2));
  executor->advance({0, -1, -1, kAll});
  CHECK(succeeds_in_child([&] {
    CHECK_THROWS(executor->take(1, kLong), kInvalidArgument);
    CHECK_THROWS(executor->ready(1), kInvalidArgument);
  }));
  model.check(1, executor->take(1, kLong));
}

TEST(a_forked_child_can_drop_it_although_its_thread_is_not_there) {
  Model model(2);
  for (auto& sources : model.sources)
    for (Source& source : sources) {
      source.cast = Cast{DType::kFloat32, DType::kBFloat16};
      source.size &= ~3;
    }
  auto executor = model.executor();
  executor->follow(sweep(2, 2));
  executor->advance({0, -1, -1, kAll});  // makes the thread
  static_cast<void>(executor->take(1, kLong));
  CHECK(succeeds_in_child([&] { executor.reset(); }));
}

}  // namespace

int main() { return peftds::test::run_all(); }
