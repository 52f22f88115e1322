// One launch for every layer's cache and every row tensor: blocks are (chunk of a tensor's row,
// request). A block moves its bytes of the request's rows in ascending order; each thread keeps to
// its own byte column, so the order in which it issues its accesses is all the order that is
// needed.
//
// A request moves in every tensor or in none: each block checks the whole path against all page
// sizes and row counts, not only against its own tensor's.
//
// Kimi-K2.5, 61 caches of 1152-byte rows, 3 rows moved: 2 x 211 KB a request. That is 0.2 us of an
// RTX PRO 6000's 1.8 TB/s; what takes the time is the launch and four dependent reads (count, path,
// table, row), 3 to 4 us on paper.
#include <algorithm>
#include <limits>
#include <vector>

#include "common/device.cuh"
#include "compact/compact_args.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "compact";
constexpr int kThreads = 256;
constexpr int64_t kChunkBytes = 4096;  // 16 bytes a thread
constexpr int kTile = 64;              // moves resolved at a time
constexpr int kAhead = 4;              // loads in flight before the first store
constexpr int kMaxTensors = 88;        // of one launch; more take a second one
constexpr int kMaxPageSizes = 8;

enum FaultCode : int32_t { kCount = 1, kOrder, kNode, kPosition, kPage };

struct PageSize {
  int64_t size, num_pages;  // fewest pages of all caches with this page size
};

struct MovedTensor {
  char* data;
  int64_t outer_stride, inner_stride, row_bytes;
  int32_t page_size;  // index into page_sizes; -1: [B, N, ...]
  int32_t first_chunk;
};

struct Params {
  CompactIndices indices;
  Fault* record;
  int64_t num_nodes;  // fewest of all row tensors
  int32_t num_page_sizes, num_tensors;
  PageSize page_sizes[kMaxPageSizes];
  MovedTensor tensors[kMaxTensors];
};
static_assert(sizeof(Params) <= 4096, "kernel parameters of every architecture and driver");

__device__ bool place_is_sound(const Params& p, int64_t b, int64_t node) {
  const int64_t position = p.indices.position(b, node);
  for (int k = 0; k < p.num_page_sizes; ++k) {
    const PageSize& s = p.page_sizes[k];
    if (!p.indices.in_table(position, s.size)) {
      report(p.record, kPosition, k, 0, position);
      return false;
    }
    const int64_t page = p.indices.page(b, position, s.size);
    if ((page < 0 || page >= s.num_pages) && !mutant("compact_any_page")) {
      report(p.record, kPage, k, 0, page);
      return false;
    }
  }
  return true;
}

// Whether entry i of the path may be moved, or stays.
__device__ bool move_is_sound(const Params& p, int64_t b, int64_t i) {
  const int64_t node = p.indices.node(b, i);
  const int64_t previous = i > 0 ? p.indices.node(b, i - 1) : -1;
  if (node <= previous && !mutant("compact_any_order")) {
    report(p.record, kOrder, b, 0, node);
    return false;
  }
  if (node == i) return true;
  if (node >= p.num_nodes) {
    report(p.record, kNode, b, p.num_nodes, node);
    return false;
  }
  return place_is_sound(p, b, node) && place_is_sound(p, b, i);
}

// Called by the whole block; the same answer for all its threads and for every block of a request.
__device__ bool path_is_sound(const Params& p, int64_t b, int64_t count) {
  bool sound = count >= 0 && count < p.indices.num_columns;
  if (!sound && threadIdx.x == 0) report(p.record, kCount, b, 0, count);
  for (int64_t i = threadIdx.x; sound && i <= count; i += kThreads) sound = move_is_sound(p, b, i);
  return __syncthreads_and(sound);
}

// Moves a thread's part of bytes [begin, end) of `num_moves` rows.
template <class Word>
__device__ void move_bytes(char* data, const int64_t* from, const int64_t* to, int num_moves,
                           int64_t begin, int64_t end) {
  constexpr int64_t kWidth = sizeof(Word);
  for (int64_t at = begin + threadIdx.x * kWidth; at < end; at += kThreads * kWidth) {
    for (int k = 0; k < num_moves; k += kAhead) {
      // Row k is read from row node >= k, and all rows written so far are below k: loads may run
      // ahead of stores, stores not ahead of the loads before them.
      Word held[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (k + j < num_moves && from[k + j] != to[k + j])
          held[j] = *reinterpret_cast<const Word*>(data + from[k + j] + at);
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (k + j < num_moves && from[k + j] != to[k + j])
          *reinterpret_cast<Word*>(data + to[k + j] + at) = held[j];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) compact_kernel(const __grid_constant__ Params p) {
  int low = 0, high = p.num_tensors - 1;  // the last tensor whose first chunk is not beyond ours
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.tensors[middle].first_chunk <= static_cast<int32_t>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const MovedTensor t = p.tensors[low];
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) - t.first_chunk) * kChunkBytes;
  const int64_t end = min(begin + kChunkBytes, t.row_bytes);
  const uint64_t alignment = reinterpret_cast<uint64_t>(t.data) |
                             static_cast<uint64_t>(t.outer_stride | t.inner_stride | t.row_bytes);
  const int64_t page_size = t.page_size < 0 ? 1 : p.page_sizes[t.page_size].size;

  const auto offset = [&](int64_t b, int64_t node) {
    if (t.page_size < 0) return b * t.outer_stride + node * t.inner_stride;
    const int64_t position = p.indices.position(b, node);
    return p.indices.page(b, position, page_size) * t.outer_stride +
           position % page_size * t.inner_stride;
  };

  SK_SHARED(int64_t, from, [kTile]);
  SK_SHARED(int64_t, to, [kTile]);
  for (int64_t b = blockIdx.y; b < p.indices.batch; b += gridDim.y) {
    if (p.indices.length(b) < 0 && !mutant("compact_padding")) continue;
    const int64_t count = p.indices.count(b);
    if (!path_is_sound(p, b, count)) continue;
    for (int64_t first = 0; first <= count; first += kTile) {
      const int64_t i = first + threadIdx.x;
      if (threadIdx.x < kTile && i <= count) {
        // A row that stays has no move, and its entry in the table may be anything.
        const int64_t node = p.indices.node(b, i);
        from[threadIdx.x] = node == i ? 0 : offset(b, node);
        to[threadIdx.x] = node == i ? 0 : offset(b, i);
      }
      if (!mutant("compact_barrier")) __syncthreads();
      const int num_moves = static_cast<int>(min(count + 1 - first, int64_t{kTile}));
      if (mutant("compact_descending")) {
        for (int k = num_moves - 1; k >= 0; --k)
          move_bytes<unsigned char>(t.data, from + k, to + k, 1, begin, end);
      } else if (alignment % 16 == 0) {
        move_bytes<uint4>(t.data, from, to, num_moves, begin, end);
      } else if (alignment % 4 == 0) {
        move_bytes<uint32_t>(t.data, from, to, num_moves, begin, end);
      } else {
        move_bytes<unsigned char>(t.data, from, to, num_moves, begin, end);
      }
      __syncthreads();
    }
  }
}

// Which of the caller's tensors a bound of the launch comes from.
struct Origins {
  int64_t page_size_cache[kMaxPageSizes], fewest_pages_cache[kMaxPageSizes], fewest_nodes_rows;
};

void add_page_size(Params& p, Origins& origins, int64_t cache, const MovedRows& t) {
  int k = 0;
  while (k < p.num_page_sizes && p.page_sizes[k].size != t.inner) ++k;
  if (k == p.num_page_sizes) {
    SK_CHECK(k < kMaxPageSizes, kOp, "caches",
             "at most " + std::to_string(kMaxPageSizes) + " different page sizes on CUDA", k + 1);
    ++p.num_page_sizes;
    p.page_sizes[k] = {t.inner, t.outer};
    origins.page_size_cache[k] = origins.fewest_pages_cache[k] = cache;
  } else if (t.outer < p.page_sizes[k].num_pages) {
    p.page_sizes[k].num_pages = t.outer;
    origins.fewest_pages_cache[k] = cache;
  }
}

[[noreturn]] void raise(const Params& p, const Origins& origins, const Fault& f) {
  switch (f.code) {
    case kCount:
      fail_count(f.index, p.indices.num_columns, f.got);
    case kOrder:
      fail_order(f.index, f.got);
    case kNode:
      fail_node(f.index, origins.fewest_nodes_rows, p.num_nodes, f.got);
    case kPosition:
      fail_position(origins.page_size_cache[f.index], p.indices.num_table_columns,
                    p.page_sizes[f.index].size, f.got);
    default:
      fail_page(origins.fewest_pages_cache[f.index], p.page_sizes[f.index].num_pages, f.got);
  }
}

void compact(Tensor accept_index, Tensor num_accepted, Tensor context_lens, Tensor block_tables,
             std::vector<Tensor> caches, std::vector<Tensor> rows) {
  check_cuda_tensor(kOp, "accept_index", accept_index);
  const CompactArgs args =
      compact_args(accept_index, num_accepted, context_lens, block_tables, caches, rows);
  if (args.indices.batch == 0) return;

  Params p{};
  Origins origins{};
  p.indices = args.indices;
  p.num_nodes = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < static_cast<int64_t>(args.moved.size()); ++i) {
    const MovedRows& t = args.moved[static_cast<size_t>(i)];
    if (i < args.num_caches) {
      add_page_size(p, origins, i, t);
    } else if (t.inner < p.num_nodes) {
      p.num_nodes = t.inner;
      origins.fewest_nodes_rows = i - args.num_caches;
    }
  }

  const DeviceGuard guard(accept_index.get_device_index());
  const cudaStream_t stream = current_stream(accept_index.get_device_index());
  const FaultCheck check(kOp, stream);
  p.record = check.record();
  const unsigned num_requests = static_cast<unsigned>(std::min<int64_t>(args.indices.batch, 65535));
  int64_t num_chunks = 0;
  const auto launch = [&] {
    if (num_chunks > 0)
      launch_kernel(kOp, compact_kernel, dim3(static_cast<unsigned>(num_chunks), num_requests),
                    kThreads, 0, stream, p);
    p.num_tensors = 0;
    num_chunks = 0;
  };
  for (int64_t i = 0; i < static_cast<int64_t>(args.moved.size()); ++i) {
    const MovedRows& t = args.moved[static_cast<size_t>(i)];
    if (t.row_bytes == 0) continue;  // it may have no address
    const int64_t own = (t.row_bytes + kChunkBytes - 1) / kChunkBytes;
    SK_CHECK(own <= std::numeric_limits<int32_t>::max(), kOp, "caches, rows", "rows below 8 TiB",
             t.row_bytes);
    if (p.num_tensors == kMaxTensors || num_chunks + own > std::numeric_limits<int32_t>::max())
      launch();
    int32_t page_size = -1;
    if (i < args.num_caches) {
      page_size = 0;
      while (p.page_sizes[page_size].size != t.inner) ++page_size;
    }
    p.tensors[p.num_tensors++] = {t.data,      t.outer_stride, t.inner_stride,
                                  t.row_bytes, page_size,      static_cast<int32_t>(num_chunks)};
    num_chunks += own;
  }
  launch();
  check.finish([&](const Fault& f) { raise(p, origins, f); });
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("compact", TORCH_BOX(&compact)); }

}  // namespace spec_kernels
