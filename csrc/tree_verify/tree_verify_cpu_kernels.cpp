#include "tree_verify/tree_verify_simd.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// Sixteen values from id i on, i a multiple of 16; lanes past the row are -inf. NaN stays:
// comparisons ignore it.
template <class T, bool kEdited, bool kWhole>
SK_INLINE F32x16 raw_values(const Row& row, int64_t i) {
  const T* logits = static_cast<const T*>(row.logits) + i;
  const int64_t rest = row.vocab - i;
  F32x16 v = kWhole ? load(logits) : load_partial(logits, rest);
  if constexpr (kEdited) {
    if (row.bias) v += kWhole ? load(row.bias + i) : load_partial(row.bias + i, rest);
    if (row.allowed) {
      const I32x16 bit =
          ((I32x16{} + static_cast<int32_t>(row.allowed[i / 32] >> (i % 32))) >> lanes()) & 1;
      v = select(-bit, v, splat(-kInfinity));
    }
  }
  if constexpr (!kWhole) {
    v = select((lanes() - static_cast<int32_t>(rest)) >> 31, v, splat(-kInfinity));
  }
  return v;
}

SK_INLINE I32x16 log_bin(F32x16 x) {
  return __builtin_convertvector(x * -static_cast<float>(kBinsPerNat), I32x16);
}

// Relative probabilities, 0 where cut off.
SK_INLINE F32x16 kept(const Weights& w, int64_t i) {
  const F32x16 v = load(w.values + i);
  const F32x16 x = exp_weight(log_weight(w, v));
  const I32x16 after_cut = (static_cast<int32_t>(w.cut.id - i) - lanes()) >> 31;
  const I32x16 tie = equal(v, splat(w.cut.value)) & ~after_cut;
  const I32x16 stays = (greater(v, splat(w.cut.value)) | tie) & greater_equal(x, splat(w.min_p));
  return (F32x16)((I32x16)x & stays);
}

SK_INLINE Fixed kept_weight(const Weights& w, int64_t i) { return to_fixed(kept(w, i)); }

// Sixteen entries of q from id i on; lanes past the row are 0.
template <class T>
SK_INLINE F32x16 draft_probs(const DraftRow& row, int64_t i) {
  const T* probs = static_cast<const T*>(row.probs) + i;
  const int64_t rest = row.vocab - i;
  return rest >= kLanes ? load(probs) : load_partial(probs, rest);
}

SK_INLINE I32x16 is_sound_draft(F32x16 q) {
  return greater_equal(q, splat(0.0f)) & greater(splat(2.0f), q);
}

SK_INLINE F32x16 sound_draft(F32x16 q) {
  return (F32x16)((I32x16)min(q, splat(1.0f)) & is_sound_draft(q));
}

typedef uint64_t U64x8 __attribute__((vector_size(64)));
typedef int64_t I64x8 __attribute__((vector_size(64)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));

struct Halves {
  U64x8 half[2];
};

SK_INLINE Halves widen(U32x16 v) {
  U32x8 part[2];
  std::memcpy(part, &v, sizeof(v));
  return {{__builtin_convertvector(part[0], U64x8), __builtin_convertvector(part[1], U64x8)}};
}

// What the rejections leave of the weights from id i < vocab on.
template <class T>
SK_INLINE void residual_weights(const Weights& w, int64_t i, uint64_t* out) {
  const DraftRow& row = *w.rejected;
  const Fixed p = kept_weight(w, i), q = to_fixed(sound_draft(draft_probs<T>(row, i)));
  const Halves p_high = widen(p.high), p_low = widen(p.low);
  const Halves q_high = widen(q.high), q_low = widen(q.low);
  for (int h = 0; h < 2; ++h) {
    U64x8 left = (p_high.half[h] << 16) + p_low.half[h];
    for (int r = 0; r < row.num_rejected; ++r) {
      const uint64_t mantissa = row.ratio[r].mantissa;
      const int shift = row.ratio[r].shift - 16;  // as in scaled()
      const U64x8 product = q_high.half[h] * mantissa + ((q_low.half[h] * mantissa) >> 16);
      const U64x8 amount = shift < 0 ? product << -shift : shift < 64 ? product >> shift : U64x8{};
      const U64x8 rest = left - amount;
      left = rest & ~(U64x8)((I64x8)rest >> 63);
    }
    std::memcpy(out + 8 * h, &left, sizeof(left));
  }
  for (int r = 0; r < row.num_rejected; ++r) {
    const int64_t lane = row.token[r] - i;
    if (lane >= 0 && lane < kLanes) out[lane] = 0;
  }
}

// Sixteen weights as they stand.
SK_INLINE void current_weights(const Weights& w, int64_t i, uint64_t* out) {
  if (!w.rejected || i >= w.rejected->vocab) {
    const Fixed q = kept_weight(w, i);
    for (int j = 0; j < kLanes; ++j) out[j] = fixed_lane(q, j);
  } else if (w.rejected->dtype == Float::kBf16) {
    residual_weights<bf16>(w, i, out);
  } else {
    residual_weights<float>(w, i, out);
  }
}

// The greatest values of whole vectors in [begin, end). `max` passes over a NaN in its first
// argument.
template <class T, bool kEdited>
SK_INLINE F32x16 greatest(const Row& row, int64_t begin, int64_t end) {
  F32x16 best[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32x16 v = raw_values<T, kEdited, true>(row, i + j * kLanes);
      best[j] = max(v, best[j]);
    }
  }
  for (; i < end; i += kLanes) {
    const F32x16 v = raw_values<T, kEdited, true>(row, i);
    best[0] = max(v, best[0]);
  }
  return max(max(best[0], best[1]), max(best[2], best[3]));
}

template <class T, bool kEdited>
Best argmax(const Row& row, int64_t begin, int64_t end) {
  constexpr int64_t kStretch = 1024;
  Best best = {-kInfinity, 0};
  int64_t where = begin;
  for (int64_t i = begin; i < end; i += kStretch) {
    const int64_t stop = end - i < kStretch ? end : i + kStretch;
    const int64_t whole = i + (stop - i) / kLanes * kLanes;
    F32x16 v = greatest<T, kEdited>(row, i, whole);
    if (whole < stop) {
      v = max(raw_values<T, kEdited, false>(row, whole), v);
    }
    const float found = reduce_max(v);
    if (found > best.value) {  // strictly: of equal values the first stays
      best.value = found;
      where = i;
    }
  }
  if (best.value == -kInfinity) return best;
  for (int64_t i = where;; i += kLanes) {
    const F32x16 v = row.vocab - i >= kLanes ? raw_values<T, kEdited, true>(row, i)
                                             : raw_values<T, kEdited, false>(row, i);
    for (int j = 0; j < kLanes; ++j) {
      if (v[j] == best.value) {
        best.id = i + j;
        return best;
      }
    }
  }
}

template <class T, bool kEdited>
void values(const Row& row, int64_t first_block, int64_t last_block, float* out, float* block_max) {
  const F32x16 kLowest = splat(-kInfinity);
  for (int64_t block = first_block; block < last_block; ++block) {
    F32x16 best = kLowest;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const int64_t rest = row.vocab - i;
      F32x16 v = kLowest;
      if (rest >= kLanes) {
        v = raw_values<T, kEdited, true>(row, i);
      } else if (rest > 0) {
        v = raw_values<T, kEdited, false>(row, i);
      }
      v = select(equal(v, v), v, kLowest);
      store(out + i, v);
      best = max(v, best);
    }
    block_max[block] = reduce_max(best);
  }
}

uint64_t residual_sum(const Weights& w, int64_t begin) {
  uint64_t total = 0;
  for (int64_t i = begin; i < begin + kBlock; i += kLanes) {
    uint64_t weight[kLanes];
    current_weights(w, i, weight);
    for (int j = 0; j < kLanes; ++j) total += weight[j];
  }
  return total;
}

template <class T>
uint64_t sum_drafts(const DraftRow& row, int64_t begin, int64_t end, bool* sound) {
  uint64_t total = 0;
  I32x16 all_sound = I32x16{} - 1;
  for (int64_t i = begin; i < end;) {
    // Lanes of `high` may reach 2^24 each: 8 vectors, and then 16 lanes, stay within 32 bits.
    const int64_t stop = end - i < kBlock ? end : i + kBlock;
    U32x16 high = {};
    U32x16 low = {};
    for (; i < stop; i += kLanes) {
      const F32x16 q = draft_probs<T>(row, i);
      all_sound &= is_sound_draft(q);
      const Fixed weight = to_fixed(sound_draft(q));
      high += weight.high;
      low += weight.low;
    }
    total += (uint64_t{sum(high)} << 16) + sum(low);
  }
  *sound = lane_bits(all_sound) == 0xFFFF;
  return total;
}

// Calls f with the element type of the row and whether bias or mask apply.
#define SK_ROW_DISPATCH(row, function, ...)                                 \
  ((row).dtype == Float::kBf16                                              \
       ? ((row).bias || (row).allowed ? function<bf16, true>(__VA_ARGS__)   \
                                      : function<bf16, false>(__VA_ARGS__)) \
       : ((row).bias || (row).allowed ? function<float, true>(__VA_ARGS__)  \
                                      : function<float, false>(__VA_ARGS__)))

}  // namespace

Best row_argmax(const Row& row, int64_t begin, int64_t end) {
  return SK_ROW_DISPATCH(row, argmax, row, begin, end);
}

void row_values(const Row& row, int64_t first_block, int64_t last_block, float* out,
                float* block_max) {
  SK_ROW_DISPATCH(row, values, row, first_block, last_block, out, block_max);
}

void block_weights(const Weights& w, int64_t first_block, int64_t last_block, uint64_t* sums) {
  for (int64_t block = first_block; block < last_block; ++block) {
    if (w.rejected) {
      sums[block] = w.block_max[block] >= w.cut.value ? residual_sum(w, block * kBlock) : 0;
      continue;
    }
    U32x16 high = {};
    U32x16 low = {};
    if (w.block_max[block] >= w.cut.value) {
      // Per lane at most 8 * 2^24 and 8 * 2^16; over lanes 2^31 at most.
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
        const Fixed q = kept_weight(w, i);
        high += q.high;
        low += q.low;
      }
    }
    sums[block] = (uint64_t{sum(high)} << 16) + sum(low);
  }
}

void weight_histogram(const Weights& w, int64_t first_block, int64_t last_block, uint64_t* mass) {
  // Neighbouring lanes often share a bin: separate counters keep one addition from waiting for the
  // last.
  constexpr int kCopies = 4;
  uint64_t copies[kCopies][kNumBins] = {};
  for (int64_t i = first_block * kBlock; i < last_block * kBlock; i += kLanes) {
    const F32x16 x = log_weight(w, load(w.values + i));
    const Fixed q = to_fixed(exp_weight(x));
    const I32x16 bins = log_bin(x);
    int32_t bin[kLanes];
    uint64_t weight[kLanes];
    std::memcpy(bin, &bins, sizeof(bin));
    for (int j = 0; j < kLanes; ++j) weight[j] = fixed_lane(q, j);
    for (int j = 0; j < kLanes; ++j) copies[j % kCopies][bin[j]] += weight[j];
  }
  for (const auto& copy : copies) {
    for (int i = 0; i < kNumBins; ++i) mass[i] += copy[i];
  }
}

int64_t gather_bin(const Weights& w, int64_t block, int32_t bin, Candidate* out) {
  if (log_bin(log_weight(w, splat(w.block_max[block])))[0] > bin) return 0;
  int64_t found = 0;
  for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
    const I32x16 off = log_bin(log_weight(w, load(w.values + i))) - bin;
    for (uint32_t own = lane_bits(~((off | -off) >> 31)); own != 0; own &= own - 1) {
      const int64_t id = i + __builtin_ctz(own);
      out[found++] = {0, w.values[id], static_cast<int32_t>(id)};
    }
  }
  return found;
}

int64_t find_in_block(const Weights& w, int64_t block, uint64_t below) {
  uint64_t cumulative = 0;
  for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
    uint64_t weight[kLanes];
    current_weights(w, i, weight);
    for (int j = 0; j < kLanes; ++j) {
      cumulative += weight[j];
      if (cumulative > below) return i + j;
    }
  }
  return -1;  // not reached: the caller picked the block whose sum exceeds `below`
}

uint64_t surprise(const Weights& w, int64_t first_block, int64_t last_block) {
  uint64_t total = 0;
  for (int64_t block = first_block; block < last_block; ++block) {
    if (w.block_max[block] < w.cut.value) continue;
    U32x16 high = {};
    U32x16 low = {};
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kLanes) {
      const F32x16 x = log_weight(w, load(w.values + i));
      const F32x16 relative = kept(w, i);
      const Fixed weight = to_fixed(relative);
      const I32x16 any = (I32x16)(weight.high | weight.low);
      const Fixed q = to_fixed(relative * (splat(0.0f) - x));
      high += q.high & (U32x16)((any | -any) >> 31);
      low += q.low & (U32x16)((any | -any) >> 31);
    }
    total += (uint64_t{sum(high)} << 16) + sum(low);
  }
  return total;
}

float exp_of(float x) { return exp_weight(splat(x))[0]; }

uint64_t weight_of(const Weights& w, int64_t id) {
  uint64_t weight[kLanes];
  current_weights(w, id / kLanes * kLanes, weight);
  return weight[id % kLanes];
}

uint64_t draft_sum(const DraftRow& row, int64_t begin, int64_t end, bool* sound) {
  return row.dtype == Float::kBf16 ? sum_drafts<bf16>(row, begin, end, sound)
                                   : sum_drafts<float>(row, begin, end, sound);
}

void candidate_weights(const Weights& w, Candidate* candidates, int64_t num_candidates) {
  for (int64_t i = 0; i < num_candidates; i += kLanes) {
    const int64_t n = num_candidates - i < kLanes ? num_candidates - i : kLanes;
    float v[kLanes] = {};
    for (int64_t j = 0; j < n; ++j) v[j] = candidates[i + j].value;
    const Fixed q = to_fixed(exp_weight(log_weight(w, load(v))));
    for (int64_t j = 0; j < n; ++j) candidates[i + j].weight = fixed_lane(q, j);
  }
}

}  // namespace SK_ISA
}  // namespace spec_kernels
