// Validation shared by the CPU and CUDA registrations; devices are checked by each.
#pragma once

#include <limits>
#include <string>

#include "common/check.h"
#include "pcie_allreduce/slab.h"

namespace spec_kernels {

inline void check_group(const char* op, int64_t rank, int64_t world_size, int64_t timeout_ms) {
  SK_CHECK(world_size >= 1 && world_size <= slab::kMaxRanks, op, "world_size", "1 to 8 ranks",
           world_size);
  SK_CHECK(rank >= 0 && rank < world_size, op, "rank", "0 <= rank < " + std::to_string(world_size),
           rank);
  SK_CHECK(timeout_ms > 0 && timeout_ms <= std::numeric_limits<int32_t>::max(), op, "timeout_ms",
           "a positive number of milliseconds", timeout_ms);
}

inline int64_t num_bytes(const Tensor& t) {
  return t.numel() * static_cast<int64_t>(t.element_size());
}

// Where a dense tensor stands. Asking a tensor costs some 30 ns through the stable ABI, so the
// answers are kept.
struct Span {
  const char* begin;
  int64_t bytes;
};

inline Span span_of(const Tensor& t) {
  return {static_cast<const char*>(t.data_ptr()), num_bytes(t)};
}

inline void check_apart(const char* op, const char* name, const Span& a, const Span& b) {
  SK_CHECK(
      a.bytes == 0 || b.bytes == 0 || a.begin + a.bytes <= b.begin || b.begin + b.bytes <= a.begin,
      op, name, "memory apart from the other tensors", "an overlap");
}

inline void check_apart(const char* op, const char* name, const Tensor& a, const Tensor& b) {
  check_apart(op, name, span_of(a), span_of(b));
}

struct InputAndOut {
  ScalarType dtype;
  Span input, out;
};

inline InputAndOut check_allreduce(const char* op, const Tensor& input, const Tensor& out) {
  check_any_float(op, "input", input);
  const ScalarType dtype = input.scalar_type();
  check_dtype(op, "out", out, dtype);
  check_contiguous(op, "input", input);
  check_contiguous(op, "out", out);
  const InputAndOut found{dtype, span_of(input), span_of(out)};
  SK_CHECK(found.input.bytes == found.out.bytes, op, "out", "shape " + shape_string(input),
           shape_string(out));
  if (found.input.begin != found.out.begin) check_apart(op, "out", found.out, found.input);
  return found;
}

inline void check_algorithm(const char* op, const Tensor& input, int64_t algorithm) {
  SK_CHECK(algorithm >= slab::kAuto && algorithm <= slab::kTwoShotInt8, op, "algorithm", "0 to 7",
           algorithm);
  if (algorithm < slab::kTwoShotFp8) return;
  const int64_t row = input.dim() ? input.size(input.dim() - 1) : 1;
  SK_CHECK(row % slab::kScaleGroup == 0, op, "input",
           "a last dimension that is a multiple of 128 where elements share a scale", row);
}

inline void check_all_gather(const char* op, const Tensor& input, const Tensor& out,
                             int64_t world_size) {
  check_dtype(op, "out", out, input.scalar_type());
  check_contiguous(op, "input", input);
  check_contiguous(op, "out", out);
  SK_CHECK(input.numel() * world_size == out.numel(), op, "out",
           std::to_string(world_size) + " times the elements of input " + shape_string(input),
           shape_string(out));
  check_apart(op, "out", out, input);
}

inline void check_broadcast(const char* op, const Tensor& tensor, int64_t src, int64_t world_size) {
  SK_CHECK(src >= 0 && src < world_size, op, "src", "0 <= src < " + std::to_string(world_size),
           src);
  check_contiguous(op, "tensor", tensor);
}

}  // namespace spec_kernels
