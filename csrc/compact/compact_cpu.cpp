#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/check.h"
#include "compact/compact.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "compact";
constexpr int64_t kBytesPerTask = 1 << 16;

struct Move {
  int64_t request, source, target;  // nodes of that request
};

std::string indexed(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

MovedRows moved_rows(const char* kind, int64_t i, const Tensor& t) {
  SK_CHECK(t.is_cpu(), kOp, indexed(kind, i).c_str(), "a CPU tensor", "another device");
  SK_CHECK(t.dim() >= 2, kOp, indexed(kind, i).c_str(), "at least 2 dimensions", shape_string(t));
  int64_t row = t.numel() > 0;  // else the sizes may be anything, their product too
  for (int64_t d = t.dim() - 1; d >= 2 && row > 0; --d) {
    SK_CHECK(t.size(d) <= 1 || t.stride(d) == row, kOp, indexed(kind, i).c_str(), "contiguous rows",
             "stride " + std::to_string(t.stride(d)) + " in dimension " + std::to_string(d));
    row *= t.size(d);
  }
  const int64_t bytes = static_cast<int64_t>(t.element_size());
  return {static_cast<char*>(t.data_ptr()),
          t.size(0),
          t.size(1),
          t.stride(0) * bytes,
          t.stride(1) * bytes,
          row * bytes};
}

// The rows that change place, request by request in ascending order.
std::vector<Move> plan(const Tensor& accept_index, const Tensor& num_accepted,
                       const IntView& lengths, int64_t length_stride) {
  const IntView paths(accept_index);
  const IntView counts(num_accepted);
  const int64_t batch = accept_index.size(0);
  const int64_t columns = accept_index.size(1);
  const int64_t row = accept_index.stride(0);
  const int64_t column = accept_index.stride(1);
  const int64_t count_stride = num_accepted.stride(0);
  std::vector<Move> moves;
  for (int64_t b = 0; b < batch; ++b) {
    if (lengths[b * length_stride] < 0) continue;
    const int64_t count = counts[b * count_stride];
    SK_CHECK(count >= 0 && count < columns, kOp, indexed("num_accepted", b).c_str(),
             "0 to " + std::to_string(columns - 1), count);
    int64_t previous = -1;
    for (int64_t i = 0; i <= count; ++i) {
      const int64_t node = paths[b * row + i * column];
      SK_CHECK(node > previous, kOp, indexed("accept_index", b).c_str(),
               "strictly increasing nodes", node);
      previous = node;
      if (node != i) moves.push_back({b, node, i});
    }
  }
  return moves;
}

// Reads the block table; `check` first sees every place that `place` will be asked for.
struct Tables {
  IntView pages, lengths;
  int64_t row, column, num_columns, length_stride;

  // Unsigned, so that an absurd length wraps to a negative position, which `check` refuses.
  int64_t position(const Move& m, int64_t node) const {
    return static_cast<int64_t>(static_cast<uint64_t>(lengths[m.request * length_stride]) +
                                static_cast<uint64_t>(node));
  }

  int64_t page(const MovedRows& cache, const Move& m, int64_t position) const {
    return pages[m.request * row + position / cache.inner * column];
  }

  void check(int64_t index, const MovedRows& cache, const Move& m, int64_t node) const {
    const int64_t p = position(m, node);
    SK_CHECK(p >= 0 && p / cache.inner < num_columns, kOp, indexed("caches", index).c_str(),
             "positions below " + std::to_string(num_columns) + " pages of " +
                 std::to_string(cache.inner) + " (block_tables)",
             p);
    const int64_t physical = page(cache, m, p);
    SK_CHECK(physical >= 0 && physical < cache.outer, kOp, "block_tables",
             "pages 0 to " + std::to_string(cache.outer - 1) + " of " + indexed("caches", index),
             physical);
  }

  char* place(const MovedRows& cache, const Move& m, int64_t node) const {
    const int64_t p = position(m, node);
    return cache.data + page(cache, m, p) * cache.outer_stride +
           p % cache.inner * cache.inner_stride;
  }
};

// By ascending address, so that each tensor meets only those whose span begins within its own.
void check_apart(const std::vector<Tensor>& caches, const std::vector<Tensor>& rows,
                 const Tensor& accept_index, const Tensor& num_accepted, const Tensor& context_lens,
                 const Tensor& block_tables) {
  struct Item {
    Footprint footprint;
    std::string name;
    bool moved;
  };
  std::vector<Item> items;
  items.reserve(caches.size() + rows.size() + 4);
  const auto add = [&](const char* kind, const std::vector<Tensor>& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      items.push_back({Footprint(tensors[i]), indexed(kind, static_cast<int64_t>(i)), true});
      check_elements_apart(kOp, items.back().name.c_str(), items.back().footprint);
    }
  };
  add("caches", caches);
  add("rows", rows);
  items.push_back({Footprint(accept_index), "accept_index", false});
  items.push_back({Footprint(num_accepted), "num_accepted", false});
  items.push_back({Footprint(context_lens), "context_lens", false});
  items.push_back({Footprint(block_tables), "block_tables", false});
  std::vector<const Item*> order;
  order.reserve(items.size());
  for (const Item& item : items) {
    if (item.footprint.bytes > 0) order.push_back(&item);
  }
  std::sort(order.begin(), order.end(),
            [](const Item* x, const Item* y) { return x->footprint.begin < y->footprint.begin; });
  for (size_t i = 0; i < order.size(); ++i) {
    const Footprint& f = order[i]->footprint;
    const uintptr_t end = f.begin + static_cast<uintptr_t>(f.bytes);
    for (size_t j = i + 1; j < order.size() && order[j]->footprint.begin < end; ++j) {
      if (!order[i]->moved && !order[j]->moved) continue;
      const bool first = order[i]->moved;
      SK_CHECK(!may_overlap(f, order[j]->footprint), kOp, order[first ? i : j]->name.c_str(),
               "memory apart from " + order[first ? j : i]->name, "an overlap");
    }
  }
}

void compact(Tensor accept_index, Tensor num_accepted, Tensor context_lens, Tensor block_tables,
             std::vector<Tensor> caches, std::vector<Tensor> rows) {
  const auto check_index = [](const char* name, const Tensor& t,
                              std::initializer_list<int64_t> shape) {
    check_cpu(kOp, name, t);
    check_int(kOp, name, t);
    check_shape(kOp, name, t, shape);
  };
  check_index("accept_index", accept_index, {-1, -1});
  const int64_t batch = accept_index.size(0);
  check_index("num_accepted", num_accepted, {batch});
  check_index("context_lens", context_lens, {batch});
  check_index("block_tables", block_tables, {batch, -1});

  std::vector<MovedRows> moved;
  moved.reserve(caches.size() + rows.size());
  const int64_t num_caches = static_cast<int64_t>(caches.size());
  for (int64_t i = 0; i < num_caches; ++i) {
    moved.push_back(moved_rows("caches", i, caches[static_cast<size_t>(i)]));
    SK_CHECK(moved.back().inner >= 1, kOp, indexed("caches", i).c_str(),
             "a page size of at least 1", moved.back().inner);
  }
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()); ++i) {
    moved.push_back(moved_rows("rows", i, rows[static_cast<size_t>(i)]));
    SK_CHECK(moved.back().outer == batch, kOp, indexed("rows", i).c_str(),
             std::to_string(batch) + " requests", moved.back().outer);
  }

  check_apart(caches, rows, accept_index, num_accepted, context_lens, block_tables);

  const Tables tables{IntView(block_tables),  IntView(context_lens), block_tables.stride(0),
                      block_tables.stride(1), block_tables.size(1),  context_lens.stride(0)};
  const std::vector<Move> moves =
      plan(accept_index, num_accepted, tables.lengths, tables.length_stride);
  if (moves.empty()) return;
  // Everything is checked before the first byte moves: a call that fails has changed nothing.
  for (int64_t i = 0; i < static_cast<int64_t>(moved.size()); ++i) {
    const MovedRows& t = moved[static_cast<size_t>(i)];
    for (const Move& m : moves) {
      if (i < num_caches) {
        tables.check(i, t, m, m.source);
        tables.check(i, t, m, m.target);
      } else {
        SK_CHECK(
            m.source < t.inner, kOp, indexed("accept_index", m.request).c_str(),
            "nodes below " + std::to_string(t.inner) + " (" + indexed("rows", i - num_caches) + ")",
            m.source);
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
          const auto place = [&](const Move& m, int64_t node) {
            return i < num_caches ? tables.place(t, m, node)
                                  : t.data + m.request * t.outer_stride + node * t.inner_stride;
          };
          for (const Move& m : moves) {
            std::memmove(place(m, m.target), place(m, m.source), static_cast<size_t>(t.row_bytes));
          }
        }
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace spec_kernels
