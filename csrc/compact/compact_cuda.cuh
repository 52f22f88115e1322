// The move on the device, for `compact` and for what ends in it: where rows stand, and moving
// them.
//
// A request moves in every tensor or in none: each block checks the whole path against all page
// sizes and row counts, not only against those of the tensors that it moves.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "common/device.cuh"
#include "compact/compact_args.h"

namespace spec_kernels {

constexpr int kMoveTile = 64;  // moves resolved at a time
constexpr int kMoveAhead = 4;  // loads of a column in flight before its first store
constexpr int kMaxPageSizes = 8;

// Apart from the codes of tree_verify, which shares a record with them.
enum MoveFault : int32_t { kCount = 16, kOrder, kNode, kPosition, kPage };

struct PageSize {
  int64_t size, num_pages;  // fewest pages of all caches with this page size
};

// Where the rows of a request stand in all tensors.
struct MovePlaces {
  CompactIndices indices;
  Fault* record;
  int64_t num_nodes;  // fewest of all row tensors
  int32_t num_page_sizes;
  PageSize page_sizes[kMaxPageSizes];
};

struct MovedTensor {
  char* data;
  int64_t outer_stride, inner_stride, row_bytes;
  int32_t page_size;  // index into page_sizes; -1: [B, N, ...]
  int32_t first_chunk;
};

// What one launch moves, a row of a tensor cut into chunks.
template <int kMaxTensors>
struct MovedTensors {
  int32_t num_tensors, num_chunks;
  MovedTensor tensors[kMaxTensors];
};

__device__ inline bool place_is_sound(const MovePlaces& p, int64_t b, int64_t node) {
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
__device__ inline bool move_is_sound(const MovePlaces& p, int64_t b, int64_t i) {
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
__device__ inline bool path_is_sound(const MovePlaces& p, int64_t b, int64_t count) {
  bool sound = count >= 0 && count < p.indices.num_columns;
  if (!sound && threadIdx.x == 0) report(p.record, kCount, b, 0, count);
  for (int64_t i = threadIdx.x; sound && i <= count; i += blockDim.x)
    sound = move_is_sound(p, b, i);
  return __syncthreads_and(sound);
}

// The tensor that a chunk belongs to: the last whose first chunk is not beyond it.
template <int kMaxTensors>
__device__ const MovedTensor& tensor_of(const MovedTensors<kMaxTensors>& m, int32_t chunk) {
  int low = 0, high = m.num_tensors - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (m.tensors[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return m.tensors[low];
}

// Some threads of a block that move together: this one's place among them, and their barrier.
template <class Sync>
struct Movers {
  int thread, num_threads;
  int64_t *from, *to;  // [kMoveTile] each, theirs
  Sync sync;
};

// Moves a thread's columns of bytes [begin, end) of `num_moves` rows, kColumns of them at a time.
template <class Word, int kColumns>
__device__ __forceinline__ void move_bytes(char* data, const int64_t* from, const int64_t* to,
                                           int num_moves, int64_t begin, int64_t end, int thread,
                                           int num_threads) {
  constexpr int64_t kWidth = sizeof(Word);
  const int64_t step = num_threads * kWidth;
  for (int64_t at = begin + thread * kWidth; at < end; at += kColumns * step) {
    for (int k = 0; k < num_moves; k += kMoveAhead) {
      // Row k is read from row node >= k, and all rows written so far are below k: loads may run
      // ahead of stores, stores not ahead of the loads before them.
      Word held[kMoveAhead][kColumns];
#pragma unroll
      for (int j = 0; j < kMoveAhead; ++j) {
        if (k + j >= num_moves || from[k + j] == to[k + j]) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (c == 0 || at + c * step < end)
            held[j][c] = *reinterpret_cast<const Word*>(data + from[k + j] + at + c * step);
        }
      }
#pragma unroll
      for (int j = 0; j < kMoveAhead; ++j) {
        if (k + j >= num_moves || from[k + j] == to[k + j]) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (c == 0 || at + c * step < end)
            *reinterpret_cast<Word*>(data + to[k + j] + at + c * step) = held[j][c];
        }
      }
    }
  }
}

// Moves bytes [begin, end) of the rows of request b on a sound path, in ascending order. Each
// thread keeps to its own columns of bytes, so the order in which it issues its accesses is all the
// order that is needed. A row that stays has no move, and its entry in the table may be anything.
template <int kColumns, class Sync>
__device__ __forceinline__ void move_rows(const MovePlaces& p, const MovedTensor& t, int64_t b,
                                          int64_t count, int64_t begin, int64_t end,
                                          const Movers<Sync>& m) {
  const uint64_t alignment = reinterpret_cast<uint64_t>(t.data) |
                             static_cast<uint64_t>(t.outer_stride | t.inner_stride | t.row_bytes);
  const int64_t page_size = t.page_size < 0 ? 1 : p.page_sizes[t.page_size].size;
  const auto offset = [&](int64_t node) {
    if (t.page_size < 0) return b * t.outer_stride + node * t.inner_stride;
    const int64_t position = p.indices.position(b, node);
    return p.indices.page(b, position, page_size) * t.outer_stride +
           position % page_size * t.inner_stride;
  };
  for (int64_t first = 0; first <= count; first += kMoveTile) {
    const int num_moves = static_cast<int>(min(count + 1 - first, int64_t{kMoveTile}));
    for (int k = m.thread; k < num_moves; k += m.num_threads) {
      const int64_t i = first + k;
      const int64_t node = p.indices.node(b, i);
      m.from[k] = node == i ? 0 : offset(node);
      m.to[k] = node == i ? 0 : offset(i);
    }
    if (!mutant("compact_barrier")) m.sync();
    if (mutant("compact_descending")) {
      for (int k = num_moves - 1; k >= 0; --k)
        move_bytes<unsigned char, 1>(t.data, m.from + k, m.to + k, 1, begin, end, m.thread,
                                     m.num_threads);
    } else if (alignment % 16 == 0) {
      move_bytes<uint4, kColumns>(t.data, m.from, m.to, num_moves, begin, end, m.thread,
                                  m.num_threads);
    } else if (alignment % 4 == 0) {
      move_bytes<uint32_t, kColumns>(t.data, m.from, m.to, num_moves, begin, end, m.thread,
                                     m.num_threads);
    } else {
      move_bytes<unsigned char, kColumns>(t.data, m.from, m.to, num_moves, begin, end, m.thread,
                                          m.num_threads);
    }
    m.sync();  // the tables are free again
  }
}

// ---- On the host.

// The places of a call, and which of the caller's tensors a bound comes from.
struct MovePlan {
  const char* op;
  MovePlaces places;
  std::vector<MovedTensor> tensors;  // those that have bytes
  int64_t page_size_cache[kMaxPageSizes], fewest_pages_cache[kMaxPageSizes], fewest_nodes_rows;

  MovePlan(const CompactArgs& args, Fault* record);
  [[noreturn]] void raise(const Fault& fault) const;
};

// Takes tensors from `next` on into one launch, as many as it holds; returns the first that is
// left.
template <int kMaxTensors>
size_t take_tensors(const MovePlan& plan, size_t next, int64_t chunk_bytes,
                    MovedTensors<kMaxTensors>& taken) {
  constexpr int64_t kMostChunks = std::numeric_limits<int32_t>::max();
  taken.num_tensors = taken.num_chunks = 0;
  for (; next < plan.tensors.size() && taken.num_tensors < kMaxTensors; ++next) {
    MovedTensor t = plan.tensors[next];
    const int64_t own = (t.row_bytes + chunk_bytes - 1) / chunk_bytes;
    SK_CHECK(own <= kMostChunks, plan.op, "caches, rows",
             "rows below " + std::to_string(kMostChunks) + " chunks of " +
                 std::to_string(chunk_bytes) + " bytes",
             t.row_bytes);
    if (taken.num_chunks + own > kMostChunks) break;
    t.first_chunk = taken.num_chunks;
    taken.tensors[taken.num_tensors++] = t;
    taken.num_chunks += static_cast<int32_t>(own);
  }
  return next;
}

// Moves the tensors from `next` on, in launches of their own.
void launch_moves(const MovePlan& plan, size_t next, cudaStream_t stream);

}  // namespace spec_kernels
