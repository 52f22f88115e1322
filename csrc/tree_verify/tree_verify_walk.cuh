// One block a request walks its tree. A row is streamed from memory for as many passes as the
// request's parameters need, and the few tokens that top-k or top-p keep are put in order in shared
// memory; no copy of a row is made, and rows off the path are not read. All sums are of integers,
// so neither the number of threads nor their order shows in the result.
//
// Passes over the row of each node on the path (V elements of 2 or 4 bytes; after the first they
// come from L2):
//   greedy             1   greatest
//   target-only        2   greatest; weights. Then the sixteenth that holds the coin, again
//   + top-k            2   greatest; gathering what is above a bound. The rest is in the list
//   + top-p            3   greatest; weights; gathering. The rest is in the list
//   where no list holds what is kept (top-k beyond 384, a nucleus beyond some hundreds), for each
//   of the two         + up to 6 by 64 bins (of bf16 without bias 3), 1 gathering, 1 weights
//   draft_probs        + q once, and p and q once for each draft that is rejected (with a list:
//                      as much of them as it keeps)
//   typical            + weights once
//
// Computed, not measured, for V = 163840 in bf16, 0.33 MB a row: 0.18 us of 1.8 TB/s, 0.07 us of
// 4.8 TB/s, so memory is not what binds but the one multiprocessor that a request has: at 64 bytes
// a clock and 1.8 to 2.4 GHz a pass takes 2 to 3 us, gathering (some 12 instructions an element,
// 128 of them a clock) 6 to 9 us, weights (some 45) 24 to 32 us. So a greedy node should take 3 us,
// a sampled one 9 to 12 us with top-k, 27 to 35 us with neither, 33 to 44 us with top-p alone.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/device.cuh"
#include "tree_verify/tree_verify_args.h"
#include "tree_verify/tree_verify_cuda.cuh"

namespace spec_kernels {

constexpr int kListCapacity = 2048;
constexpr int kNumKeyBins = 64;
// A weight, up to 2^kWeightBits, in limbs: one column of a bin takes kMaxVocab / kWarp of them.
constexpr int kNumLimbs = 3;
constexpr int kLimbBits = 14;
static_assert(kNumLimbs * kLimbBits > kWeightBits, "a weight fits in its limbs");
static_assert((kMaxVocab / kWarp) << kLimbBits <= int64_t{1} << 31, "no column overflows");

// Of values, sortable as unsigned integers; -0 counts as 0.
constexpr uint32_t kLeastKey = 0x007FFFFFu;  // of -inf
constexpr uint32_t kGreatestKey = 0xFFFFFFFFu;

struct BlockState {
  BlockSums sums;
  uint64_t bin_amount[kNumKeyBins];
  uint32_t bin_count[kNumKeyBins];
  int32_t count;
  int64_t rejected[kMaxRejections];
  Ratio ratio[kMaxRejections];
  union {
    uint64_t list[kListCapacity];
    uint32_t bins[1 + kNumLimbs][kNumKeyBins][kWarp];  // a column for each lane, so none collide
  };
};

// The arithmetic of the weights on one value.
struct Math {
#if defined(__CUDA_ARCH__)
  __device__ __forceinline__ static float add(float a, float b) { return __fadd_rn(a, b); }
  __device__ __forceinline__ static float mul(float a, float b) { return __fmul_rn(a, b); }
#else
  SK_HOST_DEVICE static float add(float a, float b) { return a + b; }
  SK_HOST_DEVICE static float mul(float a, float b) { return a * b; }
#endif
  SK_HOST_DEVICE static float at_least(float a, float b) { return a > b ? a : b; }
  SK_HOST_DEVICE static float zero_where_equal(float a, float b, float otherwise) {
    return a == b ? 0.0f : otherwise;
  }
  SK_HOST_DEVICE static float times_power_of_two(float p, float n) {
    // Both normal, and so is the product: the exponents add up. n + 1.5 * 2^23 ends in the bits of
    // n.
    return from_bits(bits(p) + (bits(add(n, 12582912.0f)) << 23));
  }
  SK_HOST_DEVICE static uint32_t bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
  }
  SK_HOST_DEVICE static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
  }
};

__device__ inline uint32_t key_of(float v) {
  const uint32_t u = Math::bits(Math::add(v, 0.0f));
  return u >> 31 ? ~u : u | 0x80000000u;
}
__device__ inline float value_of_key(uint32_t key) {
  return Math::from_bits(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

// Ids in an order of which the greater is better.
__device__ inline uint32_t id_rank(int id) {
  return mutant("tree_verify_tie_order") ? static_cast<uint32_t>(id) : ~static_cast<uint32_t>(id);
}
__device__ inline int ranked_id(uint32_t rank) {
  return static_cast<int>(mutant("tree_verify_tie_order") ? rank : ~rank);
}

// Greater is better: by value, then by lower id.
__device__ inline uint64_t rank_of(float v, int id) {
  return uint64_t{key_of(v)} << 32 | id_rank(id);
}

// A row of floats, by aligned vectors of 16 bytes. Position u of it is id u - shift; `filler`
// stands where no id is, so nothing outside the row is read.
template <Float kKind>
struct Stream {
  using Bits = std::conditional_t<kKind == Float::kBf16, uint16_t, uint32_t>;
  static constexpr int kVec = 16 / sizeof(Bits);
  static constexpr int kTile = kWarp * kVec;
  static constexpr int kPerWord = kVec / 4;

  const Bits* base;
  int shift, size;
  Bits filler;

  Stream() = default;
  __device__ __forceinline__ Stream(const void* row, int64_t num_elements, Bits fill)
      : filler(fill) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(row);
    shift = static_cast<int>(address % 16 / sizeof(Bits));
    base = reinterpret_cast<const Bits*>(address - shift * sizeof(Bits));
    size = static_cast<int>(num_elements);
  }

  __device__ __forceinline__ int num_tiles() const { return divide_up(shift + size, kTile); }

  __device__ __forceinline__ uint4 fetch(int u) const {
    if (u >= shift && u + kVec <= shift + size) {
      return __ldg(reinterpret_cast<const uint4*>(base + u));
    }
    uint32_t word[4] = {};
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const bool inside = u + j >= shift && u + j < shift + size;
      const uint32_t bits = inside ? base[u + j] : filler;
      if constexpr (kKind == Float::kBf16) {
        word[j / 2] |= bits << (j % 2 * 16);
      } else {
        word[j] = bits;
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  __device__ __forceinline__ static void unpack(uint32_t word, float (&v)[kPerWord]) {
    if constexpr (kKind == Float::kBf16) {
      v[0] = Math::from_bits(word << 16);
      v[1] = Math::from_bits(word & 0xFFFF0000u);
    } else {
      v[0] = Math::from_bits(word);
    }
  }

  __device__ __forceinline__ static void unpack(const uint4& raw, float (&v)[kVec]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float part[kPerWord];
      unpack(word[i], part);
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) v[i * kPerWord + j] = part[j];
    }
  }

  // Calls f(u, values) for this lane's vectors of the tiles [first, last); kAhead are under way at
  // a time.
  template <int kAhead, class F>
  __device__ __forceinline__ void each(int first, int last, const F& f) const {
    int t = first;
    if constexpr (kAhead > 1) {
      const int whole = min(last, (shift + size) / kTile);
      while (t < whole && t * kTile < shift) one(t++, f);
      for (; t + kAhead <= whole; t += kAhead) {
        uint4 raw[kAhead];
        const int u = t * kTile + lane_id() * kVec;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          raw[i] = __ldg(reinterpret_cast<const uint4*>(base + u + i * kTile));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          float v[kVec];
          unpack(raw[i], v);
          f(u + i * kTile, v);
        }
      }
    }
#pragma unroll 1
    for (; t < last; ++t) one(t, f);
  }

  // Calls f(value, id) for this lane's elements; where no id is, with one outside [0, size).
  template <class F>
  __device__ __forceinline__ void each_value(Part part, const F& f) const {
    for (int t = part.first; t < part.last; ++t) {
      int id = t * kTile + lane_id() * kVec - shift;
      uint4 raw = fetch(id + shift);
      // A word at a time: what is done with a value is long, and there are many such loops.
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        float v[kPerWord];
        unpack(raw.x, v);
#pragma unroll
        for (int i = 0; i < kPerWord; ++i, ++id) f(v[i], id);
        raw = make_uint4(raw.y, raw.z, raw.w, 0);
      }
    }
  }

  // Calls f(value, id) for the greatest value of each of this lane's vectors, with an id at or
  // before the first that has it. A NaN is no value: no comparison takes it for one.
  template <class F>
  __device__ __forceinline__ void each_greatest(Part part, const F& f) const {
    each<4>(part.first, part.last, [&](int u, const float(&v)[kVec]) {
      float m = value_of_key(kLeastKey);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        m = v[j] > m || (v[j] != v[j] && mutant("tree_verify_nan")) ? v[j] : m;
      }
      f(m, max(u - shift, 0));
    });
  }

 private:
  template <class F>
  __device__ __forceinline__ void one(int tile, const F& f) const {
    const int u = tile * kTile + lane_id() * kVec;
    float v[kVec];
    unpack(fetch(u), v);
    f(u, v);
  }
};

__device__ inline float float_at(const void* row, Float kind, int64_t i) {
  return kind == Float::kBf16
             ? Math::from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(row)[i]) << 16)
             : static_cast<const float*>(row)[i];
}

// A thread's greatest value and the block's; `place` is an id at or before the first that has the
// latter, with none of another vector between.
struct Greatest {
  uint32_t own_key, key;
  float value;
  int place;
};

// `each(take)` calls take(value, id) for this lane's part of the row, ids ascending.
template <class Each>
__device__ __forceinline__ Greatest find_greatest(BlockSums& s, const Each& each) {
  float best = value_of_key(kLeastKey);
  int where = 0;
  each([&](float v, int id) {
    if (v > best) {  // strictly: of equal values the first stays
      best = v;
      where = id;
    }
  });
  const uint64_t found = block_max(s, rank_of(best, where));
  const uint32_t key = static_cast<uint32_t>(found >> 32);
  return {key_of(best), key, value_of_key(key), ranked_id(static_cast<uint32_t>(found))};
}

// The n-th greatest of the threads' keys; 0 if there are fewer threads. A lower bound of the n-th
// greatest key of the row, of which hardly more than n are above it.
__device__ __forceinline__ uint32_t nth_greatest(uint32_t own_key, int n) {
  uint32_t bound = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = bound | 1u << bit;
    if (__syncthreads_count(own_key >= higher) >= n) bound = higher;
  }
  return bound;
}

// Bitonic, greatest entry first; the list has room for the next power of two.
__device__ __forceinline__ void sort_list(uint64_t* list, int num_listed) {
  int padded = 1;
  while (padded < num_listed) padded *= 2;
  const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
  __syncthreads();
  for (int i = num_listed + thread; i < padded; i += num_threads) list[i] = 0;
  for (int size = 2; size <= padded; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = thread; i < padded / 2; i += num_threads) {
        const int x = i / step * 2 * step + i % step, y = x + step;
        const uint64_t a = list[x], b = list[y];
        if ((a < b) == ((x & size) == 0)) {
          list[x] = b;
          list[y] = a;
        }
      }
    }
  }
  __syncthreads();
}

struct Found {
  float value;
  int id;
  int place;  // in the list
};

// The target's distribution at one node and q beside it: the `row` of walk_tree. All threads of the
// block enter every function together and get the same result.
template <Float kKind>
class NodeRow {
  using Values = Stream<kKind>;
  static constexpr int kVec = Values::kVec;

 public:
  __device__ __forceinline__ NodeRow(const TreeVerifyArgs& args, int64_t request,
                                     const Parameters& parameters, BlockState& state)
      : a_(args), request_(request), p_(parameters), s_(state) {}

  __device__ __forceinline__ void move_to(int64_t node) {
    row_ = Values(a_.logits.at(request_, node), a_.vocab,
                  kKind == Float::kBf16 ? 0xFF80u : 0xFF800000u);
    bias_ = static_cast<const float*>(a_.bias.at(request_, node));
    allowed_ = static_cast<const uint32_t*>(a_.allowed.at(request_, node));
    probs_ = a_.draft_probs.at(request_, node);
    list_ = List::kNone;
    weighed_ = Weighed::kTarget;
    num_rejected_ = 0;
    find_greatest_value();
  }

  __device__ __forceinline__ int64_t greedy() const {
    if (greatest_key_ == kLeastKey) return -1;
    int id = greatest_place_;
    while (value_at(id) != greatest_) ++id;
    return id;
  }

  __device__ __forceinline__ bool weigh() {
    if (greatest_key_ == kLeastKey) return false;
    inverse_ = inverse_temperature(p_.temperature);
    cut_ = {value_of_key(kLeastKey), row_.size, 0};
    min_p_ = 0.0f;
    // One after the other top-k, top-p and min-p, each on what the one before has left.
#pragma unroll 1
    for (int stage = 0; stage < 3; ++stage) {
      if (stage == 0 && (p_.top_k <= 0 || p_.top_k >= row_.size)) continue;
      if (stage == 1 && p_.top_p >= 1.0f) continue;
      if (stage == 2) {
        min_p_ = p_.min_p;
        if (list_ != List::kNone) sort_by_id();
      }
      if (stage > 0) total_ = sum();
      if (stage < 2) {
        const bool by_weight = stage == 1;
        cut_at(by_weight,
               by_weight ? nucleus_mass(p_.top_p, total_) : static_cast<uint64_t>(p_.top_k));
      }
    }
    return true;
  }

  __device__ __forceinline__ int64_t draw(uint32_t coin) {
    return locate(coin_times(coin, total_)).id;
  }

  __device__ __forceinline__ bool weigh_drafts() {
    bool sound = true;
    uint64_t own = 0;
    const auto add = [&](const auto& v) {
      for (const float q : v) {
        sound = sound && is_sound_draft(q);
        own += is_sound_draft(q) ? draft_weight(q) : 0;
      }
    };
    if (a_.draft_dtype == Float::kBf16) {
      using Drafts = Stream<Float::kBf16>;
      const Drafts q(probs_, row_.size, 0);
      const Part part = own_share(0, q.num_tiles());
      q.each<1>(part.first, part.last, [&](int, const float(&v)[Drafts::kVec]) { add(v); });
    } else {
      using Drafts = Stream<Float::kF32>;
      const Drafts q(probs_, row_.size, 0);
      const Part part = own_share(0, q.num_tiles());
      q.each<1>(part.first, part.last, [&](int, const float(&v)[Drafts::kVec]) { add(v); });
    }
    draft_total_ = block_sum(s_.sums, own);
    return __syncthreads_and(sound) != 0;
  }

  __device__ __forceinline__ uint64_t weight(int64_t id) const {
    return current(value_at(static_cast<int>(id)), static_cast<int>(id));
  }
  __device__ __forceinline__ uint64_t weight_total() const { return total_; }

  __device__ __forceinline__ uint64_t draft(int64_t id) const {
    for (int r = 0; r < num_rejected_; ++r) {
      if (s_.rejected[r] == id) return 0;
    }
    return raw_draft(id);
  }
  __device__ __forceinline__ uint64_t draft_total() const { return draft_total_; }

  __device__ __forceinline__ void reject(int64_t id, Ratio ratio) {
    draft_total_ -= draft(id);
    __syncthreads();
    if (threadIdx.x == 0) {
      s_.rejected[num_rejected_] = id;
      s_.ratio[num_rejected_] = ratio;
    }
    ++num_rejected_;
    weighed_ = Weighed::kResidual;
    __syncthreads();
    const uint64_t rest = sum();
    if (!mutant("tree_verify_renormalise")) total_ = rest;
  }

  __device__ __forceinline__ bool any_rejected() const { return num_rejected_ > 0; }

  __device__ __forceinline__ double limit(double epsilon, double delta) {
    uint64_t own = 0;
    each_kept(own_share(0, num_tiles()), [&](float v, int id) {
      if (current(v, id) == 0) return;
      const float x = log_weight<Math>(v, greatest_, inverse_);
      own += to_fixed(Math::mul(exp_weight<Math>(x), -x));
    });
    const double surprise = static_cast<double>(block_sum(s_.sums, own));
    const float mean = static_cast<float>(surprise / static_cast<double>(total_));
    return typical_limit(total_, exp_weight<Math>(-mean), epsilon, delta);
  }

 private:
  enum class List { kNone, kByRank, kById };  // holds all that is kept, in that order
  enum class Weighed { kTarget, kResidual, kTies };

  // ---- Reading.

  // A NaN stays: no comparison takes it for a value, so it is neither the greatest nor kept.
  __device__ __forceinline__ float edited(float v, int id) const {
    if (id >= 0 && id < row_.size) {
      if (bias_) v = Math::add(v, bias_[id]);
      if (allowed_ && !(allowed_[id / 32] >> (id % 32) & 1u)) v = value_of_key(kLeastKey);
    }
    return v;
  }

  __device__ __forceinline__ float value_at(int id) const {
    return edited(float_at(row_.base, kKind, id + row_.shift), id);
  }

  __device__ __forceinline__ void find_greatest_value() {
    const Part part = own_share(0, row_.num_tiles());
    const Greatest found = find_greatest(s_.sums, [&](const auto& take) {
      if (bias_ || allowed_) {
        each_value(part, take);
      } else {
        row_.each_greatest(part, take);
      }
    });
    own_key_ = found.own_key;
    greatest_key_ = found.key;
    greatest_ = found.value;
    greatest_place_ = found.place;
  }

  __device__ __forceinline__ int num_tiles() const {
    return list_ == List::kNone ? row_.num_tiles() : divide_up(num_listed_, kWarp);
  }

  __device__ __forceinline__ Found listed(int place) const {
    const uint64_t entry = s_.list[place];
    const uint32_t high = static_cast<uint32_t>(entry >> 32), low = static_cast<uint32_t>(entry);
    return list_ == List::kById ? Found{value_of_key(low), ranked_id(high), place}
                                : Found{value_of_key(high), ranked_id(low), place};
  }

  // Calls f(value, id) for this lane's elements of tiles of the list, if there is one, or of the
  // row; within a tile ids ascend from lane to lane (in a list by rank, ranks fall).
  template <class F>
  __device__ __forceinline__ void each_kept(Part part, const F& f) const {
    if (list_ == List::kNone) {
      each_value(part, f);
      return;
    }
    for (int t = part.first; t < part.last; ++t) {
      const int place = t * kWarp + lane_id();
      if (place >= num_listed_) return;
      const Found e = listed(place);
      f(e.value, e.id);
    }
  }

  template <class F>
  __device__ __forceinline__ void each_value(Part part, const F& f) const {
    row_.each_value(part, [&](float v, int id) { f(edited(v, id), id); });
  }

  // ---- Weights.

  __device__ __forceinline__ bool kept(float v, int id) const {
    return v > cut_.value || (v == cut_.value && (id <= cut_.id || mutant("tree_verify_cut_tie")));
  }

  __device__ __forceinline__ uint64_t raw_draft(int64_t id) const {
    const float q = float_at(probs_, a_.draft_dtype, id);
    return is_sound_draft(q) ? draft_weight(q) : 0;
  }

  // Before any cut.
  __device__ __forceinline__ uint64_t target_weight(float v) const {
    return to_fixed(exp_weight<Math>(log_weight<Math>(v, greatest_, inverse_)));
  }

  // The weight as it stands.
  __device__ __forceinline__ uint64_t current(float v, int id) const {
    if (weighed_ == Weighed::kTies) return v == tie_ && kept(v, id);
    if (!kept(v, id)) return 0;
    const float relative = exp_weight<Math>(log_weight<Math>(v, greatest_, inverse_));
    uint64_t left = relative >= min_p_ ? to_fixed(relative) : 0;
    if (weighed_ == Weighed::kResidual && left > 0) left = residual(left, id);
    return left;
  }

  __device__ __forceinline__ uint64_t residual(uint64_t left, int id) const {
    const uint64_t q = raw_draft(id);
    for (int r = 0; r < num_rejected_; ++r) {
      const uint64_t amount = scaled(q >> 16, q & 0xFFFFu, s_.ratio[r]);
      left = left > amount && s_.rejected[r] != id ? left - amount : 0;
    }
    return left;
  }

  __device__ __forceinline__ uint64_t lane_sum(Part part) const {
    uint64_t sum = 0;
    each_kept(part, [&](float v, int id) { sum += current(v, id); });
    return sum;
  }

  __device__ __forceinline__ uint64_t sum() {
    return sum_tiles(s_.sums, num_tiles(), [&](Part part) { return lane_sum(part); });
  }

  // The first element whose cumulative weight exceeds `below`, after sum().
  __device__ __forceinline__ Found locate(uint64_t below) {
    const Place at =
        find_tile(s_.sums, num_tiles(), below, [&](Part part) { return lane_sum(part); });
    uint64_t cumulative = 0;
    Found found = {0.0f, -1, at.tile * kWarp + at.lane};
    each_kept({at.tile, at.tile + 1}, [&](float v, int id) {
      cumulative += current(v, id);
      if (found.id < 0 && exceeds(cumulative, below)) found = {v, id, found.place};
    });
    found.value = __shfl_sync(0xffffffffu, found.value, at.lane);
    found.id = __shfl_sync(0xffffffffu, found.id, at.lane);
    return found;
  }

  // ---- Cuts.

  struct Interval {
    uint32_t low, high;  // keys, both inside
    uint64_t above;      // amount of what is better
  };

  // Cuts after the element, best first, at which the number of elements (or their weight) reaches
  // `target`; nothing is cut where all of them do not. What is kept is put into the list if it
  // fits.
  __device__ __forceinline__ void cut_at(bool by_weight, uint64_t target) {
    const bool listed_already = list_ != List::kNone;
#pragma unroll 1
    for (bool best = true;; best = false) {
      Interval in = {kLeastKey + 1, kGreatestKey, 0};
      if (!listed_already) {
        int count = kListCapacity;
        if (best) {
          if (!bound_best(by_weight, target, in)) continue;
        } else {
          in.high = greatest_key_;
          count = narrow(by_weight, target, in);
          if (count < 0) return;
        }
        if (count > kListCapacity) {  // of one value: those of lowest id stay
          tie_ = value_of_key(in.low);
          weighed_ = Weighed::kTies;
          const uint64_t each = by_weight ? target_weight(tie_) : 1;
          target = (target - in.above + each - 1) / each;
        } else {
          if (gather(in.low, in.high) > kListCapacity) continue;
          list_ = List::kByRank;
          sort_list(s_.list, num_listed_);
        }
      }
      const bool ties = weighed_ == Weighed::kTies;
      Found last = {0.0f, 0, num_listed_ - 1};
      if (by_weight || ties) {
        const uint64_t above = ties ? 0 : in.above;
        if (above + sum() >= target) {
          last = locate(target - above - 1);
        } else if (in.low > kLeastKey + 1 && best) {  // there is more than the list holds
          list_ = List::kNone;
          continue;
        }
      } else {
        last.place =
            static_cast<int>(min(static_cast<uint64_t>(last.place), target - in.above - 1));
      }
      if (ties) {
        cut_ = {tie_, last.id, 0};
        weighed_ = Weighed::kTarget;
        return;
      }
      cut_ = listed(last.place);
      num_listed_ = last.place + 1;
      if (in.above > 0) list_ = List::kNone;
      return;
    }
  }

  // The interval of all that is kept, where the list takes that, or of at least the best up to
  // `target`. False if there is no bound to be had.
  __device__ __forceinline__ bool bound_best(bool by_weight, uint64_t target, Interval& in) const {
    if (row_.size <= kListCapacity) return true;
    const int num_threads = static_cast<int>(blockDim.x);
    const uint64_t wanted = by_weight ? static_cast<uint64_t>(num_threads / 4) : target;
    if (wanted > static_cast<uint64_t>(num_threads) * 3 / 4) return false;
    in.low = max(nth_greatest(own_key_, static_cast<int>(wanted)), kLeastKey + 1);
    return true;
  }

  // Puts what is kept of the keys in [low, high] into the list, as it comes; returns their number,
  // also where the list is too short.
  __device__ __forceinline__ int gather(uint32_t low, uint32_t high) {
    __syncthreads();
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();
    each_value(own_share(0, row_.num_tiles()), [&](float v, int id) {
      const uint32_t key = key_of(v);
      if (key < low || key > high || !kept(v, id)) return;
      const int place = atomicAdd(&s_.count, 1);
      if (place < kListCapacity) s_.list[place] = rank_of(v, id);
    });
    __syncthreads();
    num_listed_ = min(s_.count, kListCapacity);
    return s_.count;
  }

  __device__ __forceinline__ void sort_by_id() {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < num_listed_;
         i += static_cast<int>(blockDim.x)) {
      s_.list[i] = s_.list[i] << 32 | s_.list[i] >> 32;
    }
    list_ = List::kById;
    sort_list(s_.list, num_listed_);
  }

  // Narrows the interval to keys at which the amount reaches `target` and of which the list takes
  // all, or to one key. Returns how many elements are in it, -1 where all together do not reach it.
  __device__ __forceinline__ int narrow(bool by_weight, uint64_t target, Interval& in) {
    const int num_tables = by_weight ? 1 + kNumLimbs : 1;
    for (;;) {
      int shift = 0;
      while ((in.high - in.low) >> shift >= kNumKeyBins) ++shift;
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < num_tables * kNumKeyBins * kWarp;
           i += static_cast<int>(blockDim.x)) {
        s_.bins[i / (kNumKeyBins * kWarp)][i / kWarp % kNumKeyBins][i % kWarp] = 0;
      }
      __syncthreads();
      each_value(own_share(0, row_.num_tiles()), [&](float v, int id) {
        const uint32_t key = key_of(v);
        if (key < in.low || key > in.high || !kept(v, id)) return;
        const int bin = static_cast<int>((key - in.low) >> shift);
        atomicAdd(&s_.bins[0][bin][lane_id()], 1u);
        if (by_weight) {
          uint64_t weight = current(v, id);
          for (int limb = 1; limb <= kNumLimbs; ++limb) {
            atomicAdd(&s_.bins[limb][bin][lane_id()],
                      static_cast<uint32_t>(weight) & ((1u << kLimbBits) - 1));
            weight >>= kLimbBits;
          }
        }
      });
      __syncthreads();
      for (int bin = warp_id(); bin < kNumKeyBins; bin += num_warps()) {
        const uint64_t count = warp_sum(s_.bins[0][bin][lane_id()]);
        uint64_t amount = count;
        if (by_weight) {
          amount = 0;
          for (int limb = kNumLimbs; limb > 0; --limb) {
            amount = (amount << kLimbBits) + warp_sum(s_.bins[limb][bin][lane_id()]);
          }
        }
        if (lane_id() == 0) {
          s_.bin_amount[bin] = amount;
          s_.bin_count[bin] = static_cast<uint32_t>(count);
        }
      }
      __syncthreads();
      int bin = kNumKeyBins - 1;
      while (bin >= 0 && in.above + s_.bin_amount[bin] < target) in.above += s_.bin_amount[bin--];
      if (bin < 0) return -1;
      const int count = static_cast<int>(s_.bin_count[bin]);
      const uint64_t low = in.low + (static_cast<uint64_t>(bin) << shift);
      const uint64_t high = low + (uint64_t{1} << shift) - 1;
      in.low = static_cast<uint32_t>(low);
      in.high = static_cast<uint32_t>(high < in.high ? high : in.high);
      if (count <= kListCapacity || in.low == in.high) return count;
    }
  }

  const TreeVerifyArgs& a_;
  const int64_t request_;
  const Parameters& p_;
  BlockState& s_;
  Values row_;
  const float* bias_ = nullptr;
  const uint32_t* allowed_ = nullptr;
  const void* probs_ = nullptr;
  uint32_t own_key_ = 0, greatest_key_ = 0;
  int greatest_place_ = 0;
  float greatest_ = 0.0f, inverse_ = 0.0f, min_p_ = 0.0f, tie_ = 0.0f;
  Found cut_ = {};
  List list_ = List::kNone;
  Weighed weighed_ = Weighed::kTarget;
  int num_listed_ = 0, num_rejected_ = 0;
  uint64_t total_ = 0, draft_total_ = 0;
};

// The walk of request b by its block; whoever calls it may use the memory of `state` afterwards,
// behind a barrier. Returns what was accepted, -1 for a padded request or one with a parameter out
// of range: the whole block gets the same.
template <Float kKind>
__device__ __forceinline__ int64_t walk_request(const TreeVerifyArgs& a, int64_t b,
                                                BlockState& state, Fault* record) {
  const bool first = threadIdx.x == 0;
  Walked walked = {-1, 0};
  if (a.context_lens(b) >= 0 || mutant("tree_verify_padding")) {
    const Parameters p = a.parameters(b);
    const BadParameter bad = out_of_range(p);
    if (bad != BadParameter::kNone) {
      walked.status = kBadParameter;
      if (first) report(record, static_cast<int32_t>(bad), b, 0, Math::bits(value_of(p, bad)));
    } else {
      NodeRow<kKind> row(a, b, p, state);
      walked = walk_tree(
          a.rules(b, p), [&](int64_t i) { return a.tokens(b, i); },
          [&](int64_t i) { return a.first_child(b, i); },
          [&](int64_t i) { return a.next_sibling(b, i); }, row,
          [&](int64_t node) { row.move_to(node); },
          [&](int64_t depth, int64_t node, int64_t token) {
            if (!first) return;
            a.accept_index.set(b, depth, node);
            a.out_tokens.set(b, depth, token);
          });
    }
  }
  if (first) {
    a.num_accepted.set(b, 0, walked.depth < 0 ? 0 : walked.depth);
    a.status.set(b, 0, walked.status);
  }
  for (int64_t i = walked.depth + 1 + threadIdx.x; i < a.num_columns; i += blockDim.x) {
    a.accept_index.set(b, i, -1);
    a.out_tokens.set(b, i, -1);
  }
  return walked.depth;
}

// A vector for each thread at least: more threads would only wait at barriers. find_tile() needs
// two warps.
inline dim3 row_block(int64_t vocab, Float dtype) {
  const int64_t vectors = vocab * float_size(dtype) / 16 + 1;
  const int64_t num_warps =
      std::clamp<int64_t>((vectors + kWarp - 1) / kWarp, 2, kMaxThreads / kWarp);
  return dim3(static_cast<unsigned>(num_warps * kWarp));
}

[[noreturn]] inline void refuse(const char* op, const Fault& fault) {
  refuse(op, static_cast<BadParameter>(fault.code),
         Math::from_bits(static_cast<uint32_t>(fault.got)));
}

}  // namespace spec_kernels
