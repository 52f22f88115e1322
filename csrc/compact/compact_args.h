// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/indexed.h"
#include "compact/compact.h"

namespace spec_kernels {

struct CompactArgs {
  const char* op;  // that was called: what messages name
  CompactIndices indices;
  std::vector<MovedRows> moved;  // caches, then rows
  int64_t num_caches;
};

namespace compact_detail {

inline MovedRows moved_rows(const char* op, const char* kind, int64_t i, const Tensor& t,
                            const Tensor& like) {
  check_same_device(op, indexed(kind, i).c_str(), t, like);
  SK_CHECK(t.dim() >= 2, op, indexed(kind, i).c_str(), "at least 2 dimensions", shape_string(t));
  int64_t row = t.numel() > 0;  // else the sizes may be anything, their product too
  for (int64_t d = t.dim() - 1; d >= 2 && row > 0; --d) {
    SK_CHECK(t.size(d) <= 1 || t.stride(d) == row, op, indexed(kind, i).c_str(), "contiguous rows",
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

// By ascending address, so that each tensor meets only those whose span begins within its own.
inline void check_apart(const char* op, const std::vector<Tensor>& caches,
                        const std::vector<Tensor>& rows, const std::vector<NamedTensor>& others) {
  struct Item {
    Footprint footprint;
    std::string name;
    bool moved;
  };
  std::vector<Item> items;
  items.reserve(caches.size() + rows.size() + others.size());
  const auto add = [&](const char* kind, const std::vector<Tensor>& tensors) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      items.push_back({Footprint(tensors[i]), indexed(kind, static_cast<int64_t>(i)), true});
      check_elements_apart(op, items.back().name.c_str(), items.back().footprint);
    }
  };
  add("caches", caches);
  add("rows", rows);
  for (const NamedTensor& t : others) {
    if (t.tensor) items.push_back({Footprint(*t.tensor), t.name, false});
  }
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
      SK_CHECK(!may_overlap(f, order[j]->footprint), op, order[first ? i : j]->name.c_str(),
               "memory apart from " + order[first ? j : i]->name, "an overlap");
    }
  }
}

}  // namespace compact_detail

// `others` are what else the op reads or writes: nothing that moves may overlap them.
inline CompactArgs compact_args(const char* op, const Tensor& accept_index,
                                const Tensor& num_accepted, const Tensor& context_lens,
                                const Tensor& block_tables, const std::vector<Tensor>& caches,
                                const std::vector<Tensor>& rows,
                                std::vector<NamedTensor> others = {}) {
  using namespace compact_detail;
  const auto check_index = [&](const char* name, const Tensor& t,
                               std::initializer_list<int64_t> shape) {
    check_same_device(op, name, t, accept_index);
    check_int(op, name, t);
    check_shape(op, name, t, shape);
  };
  check_index("accept_index", accept_index, {-1, -1});
  const int64_t batch = accept_index.size(0);
  check_index("num_accepted", num_accepted, {batch});
  check_index("context_lens", context_lens, {batch});
  check_index("block_tables", block_tables, {batch, -1});

  CompactArgs args{};
  args.op = op;
  args.moved.reserve(caches.size() + rows.size());
  args.num_caches = static_cast<int64_t>(caches.size());
  for (int64_t i = 0; i < args.num_caches; ++i) {
    args.moved.push_back(moved_rows(op, "caches", i, caches[static_cast<size_t>(i)], accept_index));
    SK_CHECK(args.moved.back().inner >= 1, op, indexed("caches", i).c_str(),
             "a page size of at least 1", args.moved.back().inner);
  }
  for (int64_t i = 0; i < static_cast<int64_t>(rows.size()); ++i) {
    args.moved.push_back(moved_rows(op, "rows", i, rows[static_cast<size_t>(i)], accept_index));
    SK_CHECK(args.moved.back().outer == batch, op, indexed("rows", i).c_str(),
             std::to_string(batch) + " requests", args.moved.back().outer);
  }
  others.insert(others.end(), {{"accept_index", &accept_index},
                               {"num_accepted", &num_accepted},
                               {"context_lens", &context_lens},
                               {"block_tables", &block_tables}});
  check_apart(op, caches, rows, others);

  args.indices = {IntView(accept_index),
                  IntView(num_accepted),
                  IntView(context_lens),
                  IntView(block_tables),
                  batch,
                  accept_index.size(1),
                  block_tables.size(1),
                  accept_index.stride(0),
                  accept_index.stride(1),
                  num_accepted.stride(0),
                  context_lens.stride(0),
                  block_tables.stride(0),
                  block_tables.stride(1)};
  return args;
}

// The wording of a value out of range, one for every backend.

[[noreturn]] inline void fail_count(const char* op, int64_t b, int64_t num_columns, int64_t count) {
  fail(op, indexed("num_accepted", b).c_str(), "0 to " + std::to_string(num_columns - 1), count);
}
[[noreturn]] inline void fail_order(const char* op, int64_t b, int64_t node) {
  fail(op, indexed("accept_index", b).c_str(), "strictly increasing nodes", node);
}
[[noreturn]] inline void fail_node(const char* op, int64_t b, int64_t i, int64_t num_nodes,
                                   int64_t node) {
  fail(op, indexed("accept_index", b).c_str(),
       "nodes below " + std::to_string(num_nodes) + " (" + indexed("rows", i) + ")", node);
}
[[noreturn]] inline void fail_position(const char* op, int64_t i, int64_t num_columns,
                                       int64_t page_size, int64_t position) {
  fail(op, indexed("caches", i).c_str(),
       "positions below " + std::to_string(num_columns) + " pages of " + std::to_string(page_size) +
           " (block_tables)",
       position);
}
[[noreturn]] inline void fail_page(const char* op, int64_t i, int64_t num_pages, int64_t page) {
  fail(op, "block_tables",
       "pages 0 to " + std::to_string(num_pages - 1) + " of " + indexed("caches", i), page);
}

}  // namespace spec_kernels
