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

inline void check_apart(const char* op, const char* name, const Tensor& a, const Tensor& b) {
  const char* x = static_cast<const char*>(a.data_ptr());
  const char* y = static_cast<const char*>(b.data_ptr());
  const int64_t num_x = num_bytes(a), num_y = num_bytes(b);
  SK_CHECK(num_x == 0 || num_y == 0 || x + num_x <= y || y + num_y <= x, op, name,
           "memory apart from the other tensors", "an overlap");
}

inline void check_allreduce(const char* op, const Tensor& input, const Tensor& out) {
  check_any_float(op, "input", input);
  check_dtype(op, "out", out, input.scalar_type());
  check_contiguous(op, "input", input);
  check_contiguous(op, "out", out);
  SK_CHECK(input.numel() == out.numel(), op, "out", "shape " + shape_string(input),
           shape_string(out));
  if (input.data_ptr() != out.data_ptr()) check_apart(op, "out", out, input);
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
