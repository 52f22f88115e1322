// The Python module _host: host objects with a lifetime. No tensors pass through it.
#include <pybind11/pybind11.h>

#include <system_error>

#include "host/segment.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace spec_kernels {
namespace {

std::unique_ptr<Segment> create(uint32_t world_size, uint64_t capacity, uint32_t spin_iterations,
                                uint32_t num_spare, uint32_t num_workers, uint64_t block_bytes) {
  return Segment::create(world_size, capacity,
                         {spin_iterations, num_spare, num_workers, block_bytes});
}

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host objects with a lifetime: shared segments.";
  // A lack of memory, of permission or of a kernel feature is an OSError with its errno.
  py::register_local_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code().value(), e.what()).ptr());
    }
  });
  // Where the counters stand, in bytes, for tests and debuggers.
  using group::Header;
  using group::RankLine;
  m.attr("OFFSETS") =
      py::dict("arrivals"_a = offsetof(Header, arrivals), "progress"_a = offsetof(Header, progress),
               "step"_a = offsetof(Header, ranks) + offsetof(RankLine, step),
               "arrived"_a = offsetof(Header, ranks) + offsetof(RankLine, arrived),
               "next_rank"_a = sizeof(RankLine));
  m.attr("MAX_RANKS") = group::kMaxRanks;
  py::class_<Segment>(
      m, "Segment", py::buffer_protocol(),
      "An anonymous shared segment of one group of ranks; a writable buffer of bytes.")
      .def_static("create", &create, py::kw_only(), py::arg("world_size"), py::arg("capacity"),
                  py::arg("spin_iterations"), py::arg("num_spare"), py::arg("num_workers"),
                  py::arg("block_bytes"))
      .def_static(
          "attach",
          [](int64_t pid, int64_t fd, const py::bytes& id) { return Segment::attach(pid, fd, id); },
          py::arg("pid"), py::arg("fd"), py::arg("id"))
      .def("bind", &Segment::bind, py::arg("rank"), py::call_guard<py::gil_scoped_release>())
      .def("leave", &Segment::leave, py::call_guard<py::gil_scoped_release>())
      .def("abort", &Segment::abort, py::arg("rank"), py::arg("reason"))
      .def_property_readonly("fd", &Segment::fd)
      .def_property_readonly("id",
                             [](const Segment& s) {
                               const group::Header& h = s.header();
                               return py::bytes(reinterpret_cast<const char*>(h.id), sizeof(h.id));
                             })
      .def_property_readonly("world_size", [](const Segment& s) { return s.header().world_size; })
      .def_property_readonly("capacity", [](const Segment& s) { return s.header().capacity; })
      .def("__len__", &Segment::size)
      .def_buffer([](Segment& s) {
        return py::buffer_info(static_cast<uint8_t*>(s.data()), static_cast<py::ssize_t>(s.size()),
                               false);
      });
}

}  // namespace
}  // namespace spec_kernels
