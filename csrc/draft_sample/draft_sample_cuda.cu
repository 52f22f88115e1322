// One block a live row. Passes over the row (V elements of 2 or 4 bytes; after the first they come
// from L2):
//   greatest           1
//   more than one      1 that gathers what is above a bound; where no list holds that (ties beyond
//                      2048, or more than 384 drafts), 1 for each
//   likeliest          1 for the weights, whose sum makes them probabilities
//   drawn              2 for the weights, of which the second writes q and sums it; then for each
//                      draw its sixteenth
// Draws take nothing out of the row: what was drawn is subtracted from the sums that it is in.
//
// Computed, not measured, as in tree_verify_walk.cuh: for V = 32000 in bf16 a pass takes about
// 0.5 us, one for the weights 5 to 6 us; for V = 163840 2 to 3 us and 24 to 32 us. So a greedy
// draft should take 6 us or 30 us, a drawn one 12 us or 60 us, all rows of a level beside each
// other.
#include <optional>

#include "common/indexed.h"
#include "draft_sample/draft_sample_args.h"
#include "tree_verify/tree_verify_walk.cuh"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "draft_sample";

enum class BadValue : int32_t { kTemperature = 1, kTargetId = 2 };

struct DraftState {
  BlockSums sums;
  int32_t count;
  int32_t ids[kMaxDrafts];  // the likeliest, best first; -1 once drawn
  union {
    uint64_t list[kListCapacity];
    struct {
      uint64_t weight[kMaxDrafts];
      int32_t id[kMaxDrafts];
    } drawn;
  };
};

// All threads of the block enter every function together and get the same result.
template <Float kKind>
class DraftedRow {
  using Values = Stream<kKind>;

 public:
  __device__ __forceinline__ DraftedRow(const DraftSampleArgs& args, int64_t request, int64_t row,
                                        DraftState& state, Fault* record)
      : a_(args),
        b_(request),
        p_(row),
        s_(state),
        record_(record),
        row_(args.logits.at(request, row), args.vocab,
             kKind == Float::kBf16 ? 0xFF80u : 0xFF800000u),
        num_drafts_(static_cast<int>(args.num_drafts)) {}

  __device__ __forceinline__ void run() {
    greatest_ = find_greatest(s_.sums, [&](const auto& take) {
      row_.each_greatest(own_share(0, row_.num_tiles()), take);
    });
    find_likeliest();
    if (a_.draws(b_)) {
      draw();
    } else {
      take_likeliest();
    }
  }

 private:
  __device__ __forceinline__ static bool is_value(float v) { return v > value_of_key(kLeastKey); }
  __device__ __forceinline__ bool any_value() const { return greatest_.key != kLeastKey; }
  __device__ __forceinline__ float value_at(int id) const {
    return float_at(row_.base, kKind, id + row_.shift);
  }

  __device__ __forceinline__ void put(int draft, int id, float confidence) const {
    a_.tokens(b_, p_, draft) = a_.target_id(id);
    a_.confidence(b_, p_, draft) = confidence;
  }

  // ---- The likeliest.

  // Leaves them in s_.ids; -inf and NaN come last, by id.
  __device__ __forceinline__ void find_likeliest() {
    int found = 0;
    if (any_value() && num_drafts_ == 1) {
      int id = greatest_.place;
      while (value_at(id) != greatest_.value) ++id;
      if (threadIdx.x == 0) s_.ids[0] = id;
      found = 1;
    } else if (any_value()) {
      const int count = gather();
      found = count <= kListCapacity ? min(take_listed(count), num_drafts_) : take_in_passes();
    }
    // One thread looks at fewer than num_drafts values and at what it takes.
    if (threadIdx.x == 0) {
      for (int id = 0; found < num_drafts_; ++id) {
        if (!is_value(value_at(id))) s_.ids[found++] = id;
      }
    }
    __syncthreads();
  }

  // Puts all that may be among the likeliest into the list; returns their number, also where the
  // list is too short.
  __device__ __forceinline__ int gather() {
    uint32_t low = kLeastKey + 1;
    if (row_.size > kListCapacity) {
      if (num_drafts_ > static_cast<int>(blockDim.x) * 3 / 4) return kListCapacity + 1;
      low = max(nth_greatest(greatest_.own_key, num_drafts_), low);
    }
    __syncthreads();
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();
    row_.each_value(own_share(0, row_.num_tiles()), [&](float v, int id) {
      if (!is_value(v) || key_of(v) < low) return;
      const int place = atomicAdd(&s_.count, 1);
      if (place < kListCapacity) s_.list[place] = rank_of(v, id);
    });
    __syncthreads();
    return mutant("draft_sample_overflow") ? min(s_.count, kListCapacity) : s_.count;
  }

  __device__ __forceinline__ int take_listed(int count) {
    sort_list(s_.list, count);
    for (int i = static_cast<int>(threadIdx.x); i < min(count, num_drafts_);
         i += static_cast<int>(blockDim.x)) {
      s_.ids[i] = ranked_id(static_cast<uint32_t>(s_.list[i]));
    }
    return count;
  }

  __device__ __forceinline__ int take_in_passes() {
    uint64_t last = ~uint64_t{0};
    int found = 0;
    for (; found < num_drafts_; ++found) {
      uint64_t own = 0;
      row_.each_value(own_share(0, row_.num_tiles()), [&](float v, int id) {
        if (!is_value(v)) return;
        const uint64_t rank = rank_of(v, id);
        if (rank < last && rank > own) own = rank;
      });
      last = block_max(s_.sums, own);
      if (last == 0) break;
      if (threadIdx.x == 0) s_.ids[found] = ranked_id(static_cast<uint32_t>(last));
    }
    return found;
  }

  __device__ __forceinline__ void take_likeliest() {
    weigh(1.0f);
    for (int i = static_cast<int>(threadIdx.x); i < num_drafts_;
         i += static_cast<int>(blockDim.x)) {
      const int id = s_.ids[i];
      const float v = value_at(id);
      put(i, id, is_value(v) ? Math::mul(relative(v), inverse_total_) : 0.0f);
    }
  }

  // ---- Weights.

  __device__ __forceinline__ float relative(float v) const {
    return exp_weight<Math>(log_weight<Math>(v, greatest_.value, inverse_temperature_));
  }

  __device__ __forceinline__ void weigh(float temperature) {
    if (!any_value()) return;  // inverse_total_ stays 0
    inverse_temperature_ = inverse_temperature(temperature);
    inverse_total_ = inverse_total(sum_tiles(s_.sums, row_.num_tiles(), [&](Part part) {
      uint64_t sum = 0;
      row_.each_value(part, [&](float v, int) { sum += to_fixed(relative(v)); });
      return sum;
    }));
  }

  __device__ __forceinline__ float q_of(float v) const {
    if (!any_value()) return 0.0f;
    const float weight = relative(v);
    return weight >= kLeastWeight ? Math::mul(weight, inverse_total_) : 0.0f;
  }
  __device__ __forceinline__ uint64_t weight_of(float v) const { return draft_weight(q_of(v)); }

  // Writes q at the target ids; returns the sum of its weights, by warp in s_.sums.segment.
  __device__ __forceinline__ uint64_t write_q() {
    float* probs = a_.probs.at(b_, p_);
    return sum_tiles(s_.sums, row_.num_tiles(), [&](Part part) {
      uint64_t sum = 0;
      row_.each_value(part, [&](float v, int id) {
        if (id < 0 || id >= row_.size) return;
        const float q = q_of(v);
        const int64_t target = mutant("draft_sample_scatter") ? id : a_.target_id(id);
        if (target >= 0 && target < a_.num_ids) {
          probs[target] = q;
        } else {
          report(record_, static_cast<int32_t>(BadValue::kTargetId), id, a_.num_ids, target);
        }
        sum += draft_weight(q);
      });
      return sum;
    });
  }

  // ---- Draws.

  __device__ __forceinline__ int tile_of(int id) const { return (id + row_.shift) / Values::kTile; }
  __device__ __forceinline__ int lane_of(int id) const {
    return (id + row_.shift) % Values::kTile / Values::kVec;
  }

  // What is left of this lane's elements in the tiles.
  __device__ __forceinline__ uint64_t lane_sum(Part part) const {
    uint64_t sum = 0;
    row_.each_value(part, [&](float v, int) { sum += weight_of(v); });
    for (int j = 0; j < num_drawn_; ++j) {
      const int id = s_.drawn.id[j], tile = tile_of(id);
      if (tile >= part.first && tile < part.last && lane_of(id) == lane_id())
        sum -= s_.drawn.weight[j];
    }
    return sum;
  }

  __device__ __forceinline__ bool is_drawn(int id) const {
    for (int j = 0; j < num_drawn_; ++j) {
      if (s_.drawn.id[j] == id) return true;
    }
    return false;
  }

  // The first id whose cumulative weight exceeds `below`.
  __device__ __forceinline__ int locate(uint64_t below) {
    const Place at =
        find_tile(s_.sums, row_.num_tiles(), below, [&](Part part) { return lane_sum(part); });
    uint64_t cumulative = 0;
    int found = -1;
    row_.each_value({at.tile, at.tile + 1}, [&](float v, int id) {
      if (found >= 0 || is_drawn(id)) return;
      cumulative += weight_of(v);
      if (exceeds(cumulative, below)) found = id;
    });
    return __shfl_sync(0xffffffffu, found, at.lane);
  }

  // Takes a draw out of the likeliest and of the sums.
  __device__ __forceinline__ void remove(int id, uint64_t weight) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < num_drafts_;
         i += static_cast<int>(blockDim.x)) {
      if (s_.ids[i] == id) s_.ids[i] = -1;
    }
    if (threadIdx.x == 0) {
      s_.drawn.id[num_drawn_] = id;
      s_.drawn.weight[num_drawn_] = weight;
      s_.sums.segment[tile_of(id) / divide_up(row_.num_tiles(), num_warps())] -= weight;
    }
    if (!mutant("draft_sample_barrier")) __syncthreads();
    ++num_drawn_;
  }

  __device__ __forceinline__ void draw() {
    weigh(a_.temperature.at_or(b_, 1.0f));
    uint64_t total = write_q();
    int best = 0;  // of s_.ids, the first that was not drawn
    for (int i = 0; i < num_drafts_; ++i) {
      while (best < num_drafts_ && s_.ids[best] < 0) ++best;
      const float greatest = best < num_drafts_ ? q_of(value_at(s_.ids[best])) : 0.0f;
      int id = row_.size - 1;
      uint64_t weight = 0;
      if (total > 0) {
        id = locate(draft_below(a_.coin(b_, mutant("draft_sample_ordinal") ? 0 : i), total));
        weight = weight_of(value_at(id));
      }
      if (threadIdx.x == 0) put(i, id, greatest);
      if (mutant("draft_sample_replacement")) continue;
      remove(id, weight);
      total -= weight;
    }
  }

  const DraftSampleArgs& a_;
  const int64_t b_, p_;
  DraftState& s_;
  Fault* record_;
  Values row_;
  const int num_drafts_;
  Greatest greatest_ = {};
  float inverse_temperature_ = 0.0f, inverse_total_ = 0.0f;
  int num_drawn_ = 0;
};

template <Float kKind>
__global__ void __launch_bounds__(kMaxThreads, 1)
    draft_sample_kernel(const __grid_constant__ DraftSampleArgs a, Fault* record) {
  SK_DYNAMIC_SHARED(DraftState, state);
  const int64_t b = blockIdx.x / a.num_rows, p = blockIdx.x % a.num_rows;
  if (a.context_lens(b) >= 0 || mutant("draft_sample_padding")) {
    const float temperature = a.temperature.at_or(b, 0.0f);
    if (is_temperature(temperature)) {
      DraftedRow<kKind>(a, b, p, *state, record).run();
      return;
    }
    if (threadIdx.x == 0) {
      report(record, static_cast<int32_t>(BadValue::kTemperature), b, 0, Math::bits(temperature));
    }
  }
  for (int64_t i = threadIdx.x; i < a.num_drafts; i += blockDim.x) {
    a.tokens(b, p, i) = 0;
    a.confidence(b, p, i) = 0.0f;
  }
}

[[noreturn]] void refuse(const Fault& fault) {
  if (static_cast<BadValue>(fault.code) == BadValue::kTemperature) {
    fail(kOp, indexed("temperature", fault.index).c_str(), "a finite number >= 0",
         Math::from_bits(static_cast<uint32_t>(fault.got)));
  }
  fail(kOp, indexed("target_ids", fault.index).c_str(), "0 <= id < " + std::to_string(fault.bound),
       fault.got);
}

void draft_sample(Tensor logits, std::optional<Tensor> target_ids, Tensor context_lens,
                  int64_t depth, std::optional<Tensor> temperature, std::optional<Tensor> seeds,
                  Tensor tokens, Tensor confidence, std::optional<Tensor> probs) {
  check_cuda_tensor(kOp, "logits", logits);
  const DraftSampleArgs args = draft_sample_args(kOp, logits, target_ids, context_lens, depth,
                                                 temperature, seeds, tokens, confidence, probs);
  if (tokens.numel() == 0) return;
  const int32_t device = logits.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const FaultCheck check(kOp, stream);
  const auto kernel = args.dtype == Float::kBf16 ? &draft_sample_kernel<Float::kBf16>
                                                 : &draft_sample_kernel<Float::kF32>;
  launch_kernel(kOp, kernel, one_block_each(kOp, "logits", args.batch * args.num_rows),
                row_block(args.vocab, args.dtype), sizeof(DraftState), stream, args,
                check.record());
  check.finish(refuse);
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) { m.impl("draft_sample", TORCH_BOX(&draft_sample)); }

}  // namespace spec_kernels
