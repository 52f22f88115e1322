#include "compact/compact_cpu.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace spec_kernels {
namespace {

constexpr int64_t kBytesPerTask = 1 << 16;

struct Move {
  int64_t request, source, target;  // nodes of that request
};

// The rows that change place, request by request in ascending order.
std::vector<Move> plan(const char* op, const CompactIndices& indices) {
  std::vector<Move> moves;
  for (int64_t b = 0; b < indices.batch; ++b) {
    if (indices.length(b) < 0) continue;
    const int64_t count = indices.count(b);
    if (count < 0 || count >= indices.num_columns) fail_count(op, b, indices.num_columns, count);
    int64_t previous = -1;
    for (int64_t i = 0; i <= count; ++i) {
      const int64_t node = indices.node(b, i);
      if (node <= previous) fail_order(op, b, node);
      previous = node;
      if (node != i) moves.push_back({b, node, i});
    }
  }
  return moves;
}

void check_place(const CompactArgs& args, int64_t index, const Move& m, int64_t node) {
  const CompactIndices& indices = args.indices;
  const MovedRows& cache = args.moved[static_cast<size_t>(index)];
  const int64_t p = indices.position(m.request, node);
  if (!indices.in_table(p, cache.inner))
    fail_position(args.op, index, indices.num_table_columns, cache.inner, p);
  const int64_t page = indices.page(m.request, p, cache.inner);
  if (page < 0 || page >= cache.outer) fail_page(args.op, index, cache.outer, page);
}

char* place(const CompactIndices& indices, const MovedRows& cache, const Move& m, int64_t node) {
  const int64_t p = indices.position(m.request, node);
  return cache.data + indices.page(m.request, p, cache.inner) * cache.outer_stride +
         p % cache.inner * cache.inner_stride;
}

void compact(Tensor accept_index, Tensor num_accepted, Tensor context_lens, Tensor block_tables,
             std::vector<Tensor> caches, std::vector<Tensor> rows) {
  check_cpu("compact", "accept_index", accept_index);
  compact_on_cpu(compact_args("compact", accept_index, num_accepted, context_lens, block_tables,
                              caches, rows));
}

}  // namespace

void compact_on_cpu(const CompactArgs& args) {
  const std::vector<MovedRows>& moved = args.moved;
  const std::vector<Move> moves = plan(args.op, args.indices);
  if (moves.empty()) return;
  // Everything is checked before the first byte moves: a call that fails has changed nothing.
  for (int64_t i = 0; i < static_cast<int64_t>(moved.size()); ++i) {
    const MovedRows& t = moved[static_cast<size_t>(i)];
    for (const Move& m : moves) {
      if (i < args.num_caches) {
        check_place(args, i, m, m.source);
        check_place(args, i, m, m.target);
      } else if (m.source >= t.inner) {
        fail_node(args.op, m.request, i - args.num_caches, t.inner, m.source);
      }
    }
  }
  // One task a tensor keeps a request's moves in order on one thread.
  int64_t bytes = 1;
  for (const MovedRows& t : moved) {
    bytes = std::max(bytes, std::min(t.row_bytes, kBytesPerTask) *
                                std::min(static_cast<int64_t>(moves.size()), kBytesPerTask));
  }
  torch::stable::parallel_for(
      0, static_cast<int64_t>(moved.size()), std::max<int64_t>(1, kBytesPerTask / bytes),
      [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const MovedRows& t = moved[static_cast<size_t>(i)];
          if (t.row_bytes == 0) continue;  // it may have no address
          const auto at = [&](const Move& m, int64_t node) {
            return i < args.num_caches
                       ? place(args.indices, t, m, node)
                       : t.data + m.request * t.outer_stride + node * t.inner_stride;
          };
          for (const Move& m : moves) {
            std::memmove(at(m, m.target), at(m, m.source), static_cast<size_t>(t.row_bytes));
          }
        }
      });
}

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace spec_kernels
