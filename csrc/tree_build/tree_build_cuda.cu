// One block a request: choose, compact in pool order, link, write.
//
// The choice is a radix select over sortable keys, eight bits a pass: it finds the least key that
// is kept and how many of that key's candidates, from the lowest index up, are kept with it. Counts
// are all that threads add up, and sums of counts have no order, so neither has the result.
//
// A pool of 710 (ten a level, eight levels) and 64 nodes: 12 KB read, 5 KB written a request, no
// time at 1.8 TB/s; what counts is some 25 barriers and four dependent reads, about 6 us on paper.
// A pool of 20000 is read five times beyond the first 8192 keys: about 20 us. A chain of 1024
// nodes walks 1024 steps in shared memory, about 15 us; a walk is as long as its tree is deep.
#include <algorithm>

#include "common/device.cuh"
#include "tree_build/tree_build_args.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_build";
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kItems = 4;  // neighbours in the pool that a thread compacts at a time
constexpr int kMaxCachedKeys = 8192;
constexpr unsigned kAllLanes = 0xffffffffu;

enum FaultCode : int32_t { kCandidateTooLarge = 1, kRootTooLarge };

struct Params {
  CandidatePool pool;
  TreeOutputs tree;
  int64_t batch;
  Fault* record;
  int32_t num_cached_keys;
};

struct Scan {
  uint32_t before, total;
};

// Sum over the threads before this one, and over all. Ends with everybody past its last read.
__device__ Scan scan(uint32_t value) {
  SK_SHARED(uint32_t, sums, [kWarps]);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  uint32_t inclusive = value;
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t below = __shfl_up_sync(kAllLanes, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  Scan result{inclusive - value, 0};
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) result.before += sums[w];
    result.total += sums[w];
  }
  __syncthreads();
  return result;
}

// The key of candidate i; 0 where it is absent.
__device__ uint32_t candidate_key(const Params& p, int64_t b, int64_t i) {
  const uint32_t key = score_key(p.pool.score(b, i));
  if (key == 0) return 0;
  const int64_t id = p.pool.candidate(b, i);
  return id >= 0 && p.tree.tokens.holds(id) ? key : 0;
}

__device__ void write_absent(const TreeOutputs& tree, int64_t b, int64_t first) {
  for (int64_t i = first + threadIdx.x; i < tree.num_nodes; i += kThreads) {
    const int64_t at = b * tree.num_nodes + i;
    tree.tokens.set(at, 0);
    tree.parents.set(at, -1);
    tree.depths.set(at, 0);
    tree.first_child.set(at, -1);
    tree.next_sibling.set(at, -1);
    tree.pool_index.set(at, -1);
    for (int64_t w = 0; w < tree.num_words; ++w) tree.ancestors[at * tree.num_words + w] = 0;
  }
}

// Which of the candidates with `key` are kept: those above `least`, and the first `num_ties` of it.
struct Choice {
  uint32_t least, num_ties;
};

// `room` < the number of present candidates, room >= 1.
template <class Key>
__device__ Choice choose(const Key& key, int64_t size, uint32_t room) {
  SK_SHARED(uint32_t, counts, [256]);
  SK_SHARED(uint32_t, digit);
  SK_SHARED(uint32_t, rest);
  Choice choice{0, room};
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size; i += kThreads) {
      const uint32_t k = key(i);
      // The digits above `shift`, all 32 bits of it at once being no shift.
      const bool alike = shift == 24 || k >> (shift + 8) == choice.least >> (shift + 8);
      if (k != 0 && alike) atomicAdd(&counts[k >> shift & 255u], 1u);
    }
    __syncthreads();
    // Thread t has the digit 255 - t: those before it have the greater digits.
    const uint32_t own = counts[255 - threadIdx.x];
    const uint32_t above = scan(own).before;
    if (above < choice.num_ties && choice.num_ties <= above + own) {
      digit = 255 - threadIdx.x;
      rest = choice.num_ties - above;
    }
    __syncthreads();
    choice.least |= digit << shift;
    choice.num_ties = rest;
  }
  return choice;
}

// Pool indices of what is kept, ascending, into kept[0 .. room).
template <class Key>
__device__ void compact_kept(const Key& key, int64_t size, const Choice& choice, uint32_t room,
                             int32_t* kept) {
  uint32_t num_above = 0, num_ties = 0;  // before this tile
  for (int64_t tile = 0; tile < size; tile += kThreads * kItems) {
    uint32_t above = 0, tied = 0;  // one bit an item
    for (int j = 0; j < kItems; ++j) {
      const int64_t i = tile + threadIdx.x * kItems + j;
      const uint32_t k = i < size ? key(i) : 0;
      above |= (k > choice.least ? 1u : 0u) << j;
      tied |= (k != 0 && k == choice.least ? 1u : 0u) << j;
    }
    // A tile has at most 1024 of either: two counts in one word.
    const Scan counts =
        scan(static_cast<uint32_t>(__popc(above)) | static_cast<uint32_t>(__popc(tied)) << 16);
    uint32_t a = num_above + (counts.before & 0xffffu), e = num_ties + (counts.before >> 16);
    for (int n = 0; n < kItems; ++n) {
      const int j = mutant("tree_build_order") ? kItems - 1 - n : n;
      const bool is_above = above >> j & 1u, is_tied = tied >> j & 1u;
      const uint32_t at = a + min(e, choice.num_ties);
      if ((is_above || (is_tied && e < choice.num_ties)) && at < room)
        kept[at] = static_cast<int32_t>(tile + threadIdx.x * kItems + j);
      a += is_above;
      e += is_tied;
    }
    num_above += counts.total & 0xffffu;
    num_ties += counts.total >> 16;
  }
}

// The node whose pool index is `slot`, among nodes 1 .. num_before; -1: none.
__device__ int32_t node_of(const int32_t* kept, int32_t num_before, int64_t slot) {
  int32_t low = 0, high = num_before;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (kept[middle] < slot) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < num_before && kept[low] == slot ? low + 1 : -1;
}

// Sets the bits of `node`'s ancestors and its own; returns its depth. Parents are below their
// children, so the walk meets the words from the last to the first and ends at the root.
__device__ int32_t write_ancestors(uint32_t* words, int64_t num_words, const int32_t* parents,
                                   int32_t node) {
  int64_t word = num_words - 1;
  uint32_t bits = 0;
  int32_t depth = 0, at = node;
  for (int32_t step = 0; step <= node; ++step) {
    for (; word > at / 32; --word) {
      words[word] = bits;
      bits = 0;
    }
    bits |= 1u << at % 32;
    if (at == 0) break;
    ++depth;
    at = mutant("tree_build_inheritance") ? 0 : max(parents[at], 0);  // unlinked: the root
  }
  for (; word >= 0; --word) {
    words[word] = bits;
    bits = 0;
  }
  return depth;
}

__global__ void __launch_bounds__(kThreads) tree_build_kernel(const __grid_constant__ Params p) {
  SK_DYNAMIC_SHARED(uint32_t, cached_keys);
  SK_SHARED(int32_t, kept, [kMaxNodes]);  // pool index of node i + 1
  SK_SHARED(int32_t, parents, [kMaxNodes]);
  SK_SHARED(int32_t, first_child, [kMaxNodes]);
  SK_SHARED(int32_t, status);
  constexpr int32_t kNoChild = kMaxNodes;
  const int64_t b = blockIdx.x;
  const TreeOutputs& tree = p.tree;
  const int64_t root = p.pool.root(b);
  if (threadIdx.x == 0) status = 0;
  if (!tree.tokens.holds(root) || (root < 0 && !mutant("tree_build_padding"))) {
    write_absent(tree, b, 0);
    if (threadIdx.x == 0) {
      const bool large = root > 0;
      if (large) report(p.record, kRootTooLarge, b, 0, root);
      tree.status.set(b, large ? kBadToken : 0);
    }
    return;
  }
  __syncthreads();

  uint32_t own_present = 0;
  for (int64_t i = threadIdx.x; i < p.pool.size; i += kThreads) {
    const uint32_t k = candidate_key(p, b, i);
    if (i < p.num_cached_keys) cached_keys[i] = k;
    own_present += k != 0;
    const int64_t id = tree.tokens.wide ? 0 : p.pool.candidate(b, i);
    if (id > 0 && !tree.tokens.holds(id)) {
      report(p.record, kCandidateTooLarge, b, 0, id);
      atomicOr(&status, kBadToken);
    }
  }
  const uint32_t num_present = scan(own_present).total;
  const auto key = [&](int64_t i) {
    return i < p.num_cached_keys ? cached_keys[i] : candidate_key(p, b, i);
  };
  const uint32_t room = static_cast<uint32_t>(tree.num_nodes - 1);
  const int32_t num_kept = static_cast<int32_t>(min(num_present, room));
  if (num_kept > 0) {
    const Choice choice = num_present > room ? choose(key, p.pool.size, room) : Choice{0, 0};
    compact_kept(key, p.pool.size, choice, room, kept);
  }
  if (!mutant("tree_build_barrier")) __syncthreads();

  for (int32_t node = threadIdx.x; node <= num_kept; node += kThreads) {
    first_child[node] = kNoChild;
    int32_t parent = -1;
    if (node > 0) {
      const int32_t slot = kept[node - 1];
      const int64_t parent_slot = p.pool.parent_slot(b, slot);
      if (!parent_slot_is_sound(parent_slot, slot)) {
        atomicOr(&status, kBadParent);
      } else {
        parent = parent_slot == -1 ? 0 : node_of(kept, node - 1, parent_slot);
        if (parent < 0) atomicOr(&status, kMissingParent);
      }
    }
    parents[node] = parent;
  }
  __syncthreads();
  for (int32_t node = 1 + threadIdx.x; node <= num_kept; node += kThreads) {
    const int32_t parent = parents[node];
    if (parent < 0) continue;
    if (mutant("tree_build_links")) {
      first_child[parent] = node;
    } else {
      atomicMin(&first_child[parent], node);
    }
  }
  __syncthreads();

  for (int32_t node = threadIdx.x; node <= num_kept; node += kThreads) {
    const int64_t at = b * tree.num_nodes + node;
    const int32_t parent = parents[node];
    int32_t sibling = parent < 0 ? num_kept + 1 : node + 1;
    while (sibling <= num_kept && parents[sibling] != parent) ++sibling;
    tree.next_sibling.set(at, sibling > num_kept ? -1 : sibling);
    tree.first_child.set(at, first_child[node] == kNoChild ? -1 : first_child[node]);
    tree.parents.set(at, parent);
    tree.depths.set(
        at, write_ancestors(tree.ancestors + at * tree.num_words, tree.num_words, parents, node));
    const int32_t slot = node > 0 ? kept[node - 1] : -1;
    tree.tokens.set(at, node > 0 ? p.pool.candidate(b, slot) : root);
    tree.pool_index.set(at, slot);
  }
  write_absent(tree, b, num_kept + 1);
  if (threadIdx.x == 0) tree.status.set(b, status);
}

void tree_build(Tensor scores, Tensor candidates, Tensor parent_slots, Tensor root_tokens,
                Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor first_child,
                Tensor next_sibling, Tensor pool_index, Tensor status) {
  check_cuda_tensor(kOp, "scores", scores);
  const TreeBuildArgs args =
      tree_build_args(scores, candidates, parent_slots, root_tokens, tokens, parents, depths,
                      ancestors, first_child, next_sibling, pool_index, status);
  if (args.batch == 0) return;
  const DeviceGuard guard(scores.get_device_index());
  const cudaStream_t stream = current_stream(scores.get_device_index());
  const FaultCheck check(kOp, stream);
  const int64_t num_cached = std::min<int64_t>(args.pool.size, kMaxCachedKeys);
  const Params p{args.pool, args.tree, args.batch, check.record(),
                 static_cast<int32_t>(num_cached)};
  launch_kernel(kOp, tree_build_kernel, one_block_each(kOp, "scores", args.batch), kThreads,
                static_cast<size_t>(num_cached) * sizeof(uint32_t), stream, p);
  check.finish([](const Fault& f) {
    fail_token(f.code == kRootTooLarge ? "root_tokens" : "candidates", f.got);
  });
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("tree_build", TORCH_BOX(&tree_build)); }

}  // namespace spec_kernels
