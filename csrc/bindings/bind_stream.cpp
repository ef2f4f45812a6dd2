// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind_stream.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "stream/executor.h"

namespace peftds::bindings {
namespace {

namespace py = pybind11;
using stream::Block;
using stream::Counts;
using stream::Event;
using stream::Executor;

/// File, offset, size in the file, room in memory, element types in file and memory if they differ,
/// and whether a change of the file is an error.
using PySource = std::tuple<std::shared_ptr<io::File>, int64_t, int64_t, int64_t,
                            std::optional<std::pair<std::string, std::string>>, bool>;
using PyUse = std::tuple<int, bool, int, bool>;

/// A layer's bytes; a tensor over them keeps them alive.
struct PyBlock {
  Block block;
};

kernels::DType dtype_named(const std::string& name) {
  if (name == "float32") return kernels::DType::kFloat32;
  if (name == "bfloat16") return kernels::DType::kBFloat16;
  if (name == "float16") return kernels::DType::kFloat16;
  throw Error(ErrorCode::kInvalidArgument, "there is no conversion from or to \"" + name + "\"");
}

std::shared_ptr<Executor> make_executor(std::shared_ptr<io::Engine> engine, const Arena& arena, int threads) {
  return {new Executor(std::move(engine), arena, threads), [](Executor* executor) {
            const py::gil_scoped_release released;  // it waits for what is under way
            delete executor;
          }};
}

std::tuple<int64_t, int64_t, std::vector<int64_t>> define(Executor& executor, int layer,
                                                          const std::vector<PySource>& sources) {
  std::vector<stream::Source> native;
  for (const auto& [file, offset, size, room, cast, read_only] : sources) {
    stream::Source source{file, offset, size, room, std::nullopt, read_only};
    if (cast) source.cast = {dtype_named(cast->first), dtype_named(cast->second)};
    native.push_back(std::move(source));
  }
  const py::gil_scoped_release released;
  stream::Layout layout = executor.define(layer, std::move(native));
  return {layout.bytes, layout.staged, std::move(layout.offsets)};
}

void follow(Executor& executor, const std::vector<PyUse>& order) {
  std::vector<stream::Use> native;
  native.reserve(order.size());
  for (const auto& [layer, reads, reach, counted] : order) native.push_back({layer, reads, reach, counted});
  executor.follow(std::move(native));
}

void advance(Executor& executor, std::optional<size_t> position, int demanded, int resident, int most,
             bool between) {
  executor.advance({position, demanded, resident, most, between});
}

/// Lets Ctrl-C through: signals are looked at ten times a second.
PyBlock take(Executor& executor, int layer) {
  for (;;) {
    {
      const py::gil_scoped_release released;
      if (Block block = executor.take(layer, std::chrono::milliseconds(100))) return {std::move(block)};
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

}  // namespace

void bind_stream(py::module_& module) {
  py::class_<PyBlock>(module, "Block", py::buffer_protocol(), "A layer's bytes.")
      .def_buffer([](const PyBlock& block) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(block.block->data()), block.block->size());
      });
  py::class_<Counts>(module, "StreamCounts")
      .def_readonly("ready", &Counts::ready)
      .def_readonly("waited", &Counts::waited)
      .def_readonly("demanded", &Counts::demanded)
      .def_readonly("vain", &Counts::vain)
      .def_readonly("bytes", &Counts::bytes);
  py::native_enum<Event::Kind>(module, "StreamEventKind", "enum.Enum")
      .value("READ", Event::Kind::kRead)
      .value("DECODE", Event::Kind::kDecode)
      .value("WAIT", Event::Kind::kWait)
      .finalize();
  py::class_<Event>(module, "StreamEvent")
      .def_readonly("kind", &Event::kind)
      .def_readonly("layer", &Event::layer)
      .def_readonly("bytes", &Event::bytes)
      .def_readonly("background", &Event::background)
      .def_readonly("start", &Event::start)
      .def_readonly("end", &Event::end);
  py::classh<Executor>(module, "Executor", "Reads layers from files ahead of their use.")
      .def(py::init(&make_executor), py::arg("engine"), py::arg("arena"), py::arg("threads"))
      .def("define", &define, py::arg("layer"), py::arg("sources"),
           "Say what a layer is made of; returns the bytes of its block, those that it needs beside while it "
           "is "
           "read, and where each source begins in the block.")
      .def("follow", &follow, py::arg("order"), "Follow (layer, reads, reach, counted) uses from now on.")
      .def("advance", &advance, py::arg("position"), py::kw_only(), py::arg("demanded") = -1,
           py::arg("resident") = -1, py::arg("most") = std::numeric_limits<int>::max(),
           py::arg("between") = false, py::call_guard<py::gil_scoped_release>(),
           "The use at a position of the order begins, or comes next if no layer is in use.")
      .def("take", &take, py::arg("layer"), "Wait for a layer and return its block; raise what went wrong.")
      .def("ready", &Executor::ready, py::arg("layer"), py::call_guard<py::gil_scoped_release>(),
           "Whether take() would return a layer, or raise what went wrong, without waiting.")
      .def("drop", &Executor::drop, py::arg("layer"), py::call_guard<py::gil_scoped_release>())
      .def("drain", &Executor::drain, "Events since the last call; times as time.monotonic_ns().")
      .def("counts", &Executor::counts)
      .def("close", &Executor::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace peftds::bindings
