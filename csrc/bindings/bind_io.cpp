// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind_io.h"

#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/arena.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "base/page_lock.h"
#include "bindings/page_lock_capsule.h"
#include "io/engine.h"

namespace peftds::bindings {
namespace {

namespace py = pybind11;
using io::Engine;
using io::Extent;
using io::File;

/// File, offset, address and size of one extent.
using PyExtent = std::tuple<std::shared_ptr<File>, int64_t, uintptr_t, int64_t>;

/// A ticket, and what keeps its memory alive until the transfer is over.
class PyTicket {
 public:
  PyTicket(io::Ticket ticket, py::object keep_alive)
      : keep_alive_(std::move(keep_alive)), ticket_(std::move(ticket)) {}
  ~PyTicket() {
    const py::gil_scoped_release released;
    ticket_.reset();
  }

  [[nodiscard]] bool done() const { return ticket_->done(); }

  /// Lets Ctrl-C through: signals are looked at ten times a second.
  void wait() const {
    for (bool over = false; !over;) {
      {
        const py::gil_scoped_release released;
        over = ticket_->wait_for(std::chrono::milliseconds(100));
      }
      if (!over && PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

 private:
  py::object keep_alive_;
  std::optional<io::Ticket> ticket_;
};

std::unique_ptr<PyTicket> submit(Engine& engine, io::Direction direction,
                                 const std::vector<PyExtent>& extents, const py::object& keep_alive,
                                 io::Priority priority) {
  std::vector<Extent> native;
  native.reserve(extents.size());
  for (const auto& [file, offset, address, size] : extents)
    native.push_back({file, offset, reinterpret_cast<std::byte*>(address), size});
  const auto start = [&] {
    const py::gil_scoped_release released;
    return engine.submit(direction, std::move(native), priority);
  };
  return std::make_unique<PyTicket>(start(), keep_alive);
}

Arena make_arena(Engine& engine, const std::optional<py::capsule>& page_lock) {
  if (!page_lock) return engine.make_arena();
  return engine.make_arena(page_lock_in(*page_lock));
}

io::Method method_named(const std::optional<std::string>& name) {
  if (!name) return io::Method::kAuto;
  if (*name == "io_uring") return io::Method::kUring;
  if (*name == "threads") return io::Method::kThreads;
  throw Error(ErrorCode::kInvalidArgument,
              "the storage engine is \"io_uring\" or \"threads\", not \"" + *name + "\"");
}

std::shared_ptr<Engine> make_engine(const std::optional<std::string>& method, int queue_depth,
                                    int64_t block_bytes, const std::string& faults) {
  io::Settings settings;
  settings.method = method_named(method);
  settings.queue_depth = queue_depth;
  settings.block_bytes = block_bytes;
  settings.faults = faults;
  return {new Engine(settings), [](Engine* engine) {
            // It waits for what is under way. The last to let go of it may be native code without the GIL.
            std::optional<py::gil_scoped_release> released;
            if (PyGILState_Check() != 0) released.emplace();
            delete engine;
          }};
}

std::shared_ptr<File> open_file(const std::string& path, io::Access access, bool direct) {
  const py::gil_scoped_release released;
  return std::make_shared<File>(path, access, direct ? io::Direct::kAuto : io::Direct::kOff);
}

std::vector<uint32_t> crc32c_blocks(const py::buffer& buffer, size_t block_bytes, int threads) {
  const py::buffer_info view = buffer.request();
  PEFTDS_CHECK(view.ndim == 1 && view.strides[0] == view.itemsize, kInvalidArgument,
               "checksums need contiguous memory of one dimension");
  const py::gil_scoped_release released;
  return peftds::crc32c_blocks(static_cast<const std::byte*>(view.ptr),
                               static_cast<size_t>(view.size * view.itemsize), block_bytes, threads);
}

void bind_memory(py::module_& module) {
  py::class_<Arena::Buffer>(module, "Buffer", py::buffer_protocol(),
                            "Host memory of an arena; gives it back when it goes.")
      .def_buffer([](const Arena::Buffer& buffer) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(buffer.data()), buffer.size());
      });
  py::class_<Arena::Usage>(module, "ArenaUsage")
      .def_readonly("live", &Arena::Usage::live)
      .def_readonly("held", &Arena::Usage::held)
      .def_readonly("locked", &Arena::Usage::locked)
      .def_readonly("peak_live", &Arena::Usage::peak_live)
      .def_readonly("peak_held", &Arena::Usage::peak_held)
      .def_readonly("peak_locked", &Arena::Usage::peak_locked);
  py::class_<Arena>(module, "Arena", "Page-aligned host memory in exactly the sizes asked for.")
      .def(py::init([](const std::optional<py::capsule>& page_lock) {
             return page_lock ? Arena(nullptr, page_lock_in(*page_lock)) : Arena();
           }),
           py::arg("page_lock") = py::none())
      .def("allocate", &Arena::allocate, py::arg("size"), py::arg("most") = 0,
           py::call_guard<py::gil_scoped_release>(),  // locking writes to every page
           "Return memory; a mapping of up to `most` bytes may serve, and is in use as a whole then.")
      .def("usage", &Arena::usage)
      .def_property_readonly("why_not_locked", &Arena::why_not_locked,
                             "Why a buffer could not be page-locked, the first; empty if there is none.");
  module.def(
      "mlock_page_lock", [] { return to_capsule(mlock_page_lock()); },
      "A page lock for arenas: memory that the system may not swap out. No device is told about it.");
  module.def("crc32c_blocks", &crc32c_blocks, py::arg("data"), py::arg("block_bytes"), py::arg("threads") = 1,
             "CRC-32C of each block of contiguous bytes; the last block may be shorter.");
}

void bind_file(py::module_& module) {
  py::native_enum<io::Access>(module, "Access", "enum.Enum")
      .value("READ", io::Access::kRead)
      .value("CREATE", io::Access::kCreate)
      .value("UPDATE", io::Access::kUpdate)
      .finalize();
  py::classh<File>(module, "File",
                   "A file opened for direct I/O where that is possible, and for buffered I/O always.")
      .def(py::init(&open_file), py::arg("path"), py::arg("access"), py::kw_only(), py::arg("direct") = true)
      .def_property_readonly("path", &File::path)
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("why_buffered", &File::why_buffered)
      .def_property_readonly("alignment", &File::alignment)
      .def_property_readonly("descriptor", &File::buffered_descriptor,
                             "The one for buffered I/O; the file closes it.")
      .def("size", &File::size)
      .def("check_unchanged", &File::check_unchanged,
           "Raise CorruptDataError if it is not as it was when it was opened.")
      .def("preallocate", &File::preallocate, py::arg("offset"), py::arg("size"),
           py::call_guard<py::gil_scoped_release>());
}

void bind_engine(py::module_& module) {
  py::native_enum<io::Direction>(module, "Direction", "enum.Enum")
      .value("READ", io::Direction::kRead)
      .value("WRITE", io::Direction::kWrite)
      .finalize();
  py::native_enum<io::Priority>(module, "Priority", "enum.Enum")
      .value("DEMAND", io::Priority::kDemand)
      .value("READ_AHEAD", io::Priority::kReadAhead)
      .finalize();
  py::class_<PyTicket>(module, "Ticket", "The outcome of one submitted vector of extents.")
      .def("done", &PyTicket::done)
      .def("wait", &PyTicket::wait, "Wait until it is done, as demand from now on; raise what went wrong.");
  py::classh<Engine>(module, "Engine", "The storage engine.")
      .def(py::init(&make_engine), py::kw_only(), py::arg("method") = std::nullopt,
           py::arg("queue_depth") = 8, py::arg("block_bytes") = 1 << 20, py::arg("faults") = "")
      .def("submit", &submit, py::arg("direction"), py::arg("extents"), py::kw_only(), py::arg("keep_alive"),
           py::arg("priority") = io::Priority::kDemand,
           "Start the transfer of (file, offset, address, size) extents; `keep_alive` owns the memory.")
      .def("attach", &Engine::attach, py::arg("file"), py::call_guard<py::gil_scoped_release>())
      .def("make_arena", &make_arena, py::arg("page_lock") = py::none(),
           "Return an arena that page-locks what it maps, as far as it can, if it is told how.")
      .def("close", &Engine::close, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("method", &Engine::method)
      .def_property_readonly("why_threads", &Engine::why_threads);
}

}  // namespace

void bind_io(py::module_& module) {
  bind_memory(module);
  bind_file(module);
  bind_engine(module);
}

}  // namespace peftds::bindings
