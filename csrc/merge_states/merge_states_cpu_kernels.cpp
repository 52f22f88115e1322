#include "common/simd.h"
#include "merge_states/merge_states.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

// Nothing is fused, and e^x comes from the C library, so that every instruction set gets the same
// bits.

// One step of the fold: what stands so far times `keep`, plus part `index` times `add`.
struct Step {
  int64_t index;
  float keep, add;
};

template <class T>
void row(const MergeStatesArgs& a, int64_t b, int64_t n, int64_t h) {
  constexpr float kInf = __builtin_inff();
  const float* lses = a.lses + b * a.lses_stride[1] + n * a.lses_stride[2] + h * a.lses_stride[3];
  Step steps[kMaxParts];
  int num_steps = 0;
  float top = -kInf, total = 0.0f;
  for (int64_t i = 0; i < a.num_parts; ++i) {
    const float lse = lses[i * a.lses_stride[0]];
    if (lse == -kInf) continue;
    const float new_top = top != top || top > lse ? top : lse;  // NaN stays
    Step& step = steps[num_steps++];
    step.index = i;
    step.keep = top == -kInf ? 0.0f : __builtin_expf(top - new_top);
    step.add = __builtin_expf(lse - new_top);
    total = total * step.keep + step.add;
    top = new_top;
  }
  a.lse[b * a.lse_stride[0] + n * a.lse_stride[1] + h * a.lse_stride[2]] =
      num_steps ? top + __builtin_logf(total) : -kInf;

  const T* outs = static_cast<const T*>(a.outs) + b * a.outs_stride[1] + n * a.outs_stride[2] +
                  h * a.outs_stride[3];
  T* out = static_cast<T*>(a.out) + b * a.out_stride[0] + n * a.out_stride[1] + h * a.out_stride[2];
  const F32x16 divisor = splat(num_steps ? total : 1.0f);
  for (int64_t c = 0; c < a.dim; c += kLanes) {
    const int64_t rest = a.dim - c;
    F32x16 sum = {};
    for (int s = 0; s < num_steps; ++s) {
      const T* in = outs + steps[s].index * a.outs_stride[0] + c;
      const F32x16 x = rest >= kLanes ? load(in) : load_partial(in, rest);
      sum = x * splat(steps[s].add) + sum * splat(steps[s].keep);
    }
    const F32x16 mean = sum / divisor;
    store_up_to(out + c, mean + (mean - mean), rest);  // an infinity becomes NaN
  }
}

template <class T>
void rows(const MergeStatesArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    row<T>(a, i / a.num_heads / a.num_rows, i / a.num_heads % a.num_rows, i % a.num_heads);
}

}  // namespace

void merge_states_rows(const MergeStatesArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case Float::kBf16:
      return rows<bf16>(args, begin, end);
    case Float::kF16:
      return rows<fp16>(args, begin, end);
    default:
      return rows<float>(args, begin, end);
  }
}

}  // namespace SK_ISA
}  // namespace spec_kernels
