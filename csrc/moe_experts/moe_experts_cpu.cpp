#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "common/check.h"
#include "moe_experts/moe_experts.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "moe_experts";
constexpr int64_t kMaxRows =
    256;  // a pass: bounds the scratch, and still amortises each read of a weight
constexpr int64_t kRouterBlock = 8;    // experts a task
constexpr int64_t kActivateRows = 64;  // rows whose gate and up products are held at once
// Views that repeat an element can be of any size: with these bounds the bytes of the scratch fit
// 64 bits.
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxInner = 1 << 24;
constexpr int64_t kWorkPerThread = 1 << 16;  // multiply-adds that outweigh waking a thread

// Elements between copied fp32 rows: an odd number of cache lines. Rows a multiple of 4 KiB apart,
// as those of usual hidden sizes are, would all compete for the same few places of the first cache.
int64_t wide_stride(int64_t hidden) { return ((hidden + 15) / 16 | 1) * 16; }

struct Router {
  int64_t num_experts, top_k, n_group, topk_group;
  float scaling;
  bool normalize;
  const void* weight;
  int64_t weight_stride;
  MoeForm form;
  const float* bias;
  int64_t bias_stride;
};

// A weight matrix.
struct Matrix {
  const char* data;
  int64_t stride;         // elements (of INT4, words) between rows
  const uint16_t* scale;  // of INT4
  int64_t scale_stride, group;

  // As the weights of a product, from this row on.
  void rows_from(int64_t row, int64_t item, MoeProduct& m) const {
    m.w = data + row * stride * item;
    m.w_stride = stride;
    m.scale = scale + row * scale_stride;
    m.scale_stride = scale_stride;
    m.group = group;
  }
};

// The two matrices of an expert: [2 * inner, H] and [H, inner].
struct Expert {
  Matrix gate_up, down;
  int64_t inner;
  MoeForm form;
  int64_t item;  // bytes of an element, or a word

  // Rows and activations that its products read are bf16, else fp32.
  bool narrow() const { return form == MoeForm::kBf16Dot || form == MoeForm::kAmx; }
};

struct Experts {
  Expert first;                                 // expert 0 of the routed ones
  int64_t gate_up_step, down_step;              // bytes between experts
  int64_t gate_up_scale_step, down_scale_step;  // elements
  std::optional<Expert> shared;

  Expert routed(int64_t e) const {
    Expert expert = first;
    expert.gate_up.data += e * gate_up_step;
    expert.down.data += e * down_step;
    expert.gate_up.scale += e * gate_up_scale_step;
    expert.down.scale += e * down_scale_step;
    return expert;
  }

  bool any(MoeForm form) const { return first.form == form || (shared && shared->form == form); }
};

// An expert and the rows that chose it: `first .. first + num_rows` of the grouped order.
struct Segment {
  Expert expert;
  int64_t first, num_rows;
  int64_t act;     // offset of its activations, [num_rows, inner] elements
  int64_t packed;  // offset of its packed activations
};

// Hands out pieces of one allocation; with no base it only counts.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class T>
  T* take(int64_t n) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// Scratch of a pass over num_rows rows. Pairs are (row, slot); the shared expert adds a pair for
// every row.
struct Scratch {
  float* wide_x;       // [num_rows, wide_stride(H)]
  float* scores;       // [num_rows, E]
  float* group_value;  // [num_threads, n_group]
  int64_t* group_id;   // [num_threads, n_group]
  int64_t* ids;        // [num_rows, top_k]
  float* weights;      // [num_rows, top_k]
  int64_t* position;   // [num_rows, top_k]: where a pair stands in the grouped order
  int64_t* row_of;     // [num_pairs]: the row of a pair in the grouped order
  int64_t* count;      // [E]
  Segment* segments;   // [E + 1]
  uint16_t* packed_x;
  char* act;
  uint16_t* packed_act;
  float* down;                 // [num_threads, num_pairs, kMoeBlock]
  const float** contribution;  // [num_threads, top_k]

  Scratch(Arena& arena, const Router& router, const Experts& experts, int64_t num_rows,
          int64_t hidden, int64_t num_threads) {
    const int64_t num_routed = num_rows * router.top_k;
    const int64_t num_pairs = num_routed + (experts.shared ? num_rows : 0);
    const int64_t shared_inner = experts.shared ? experts.shared->inner : 0;
    const bool packs = experts.any(MoeForm::kAmx);
    wide_x = arena.take<float>(num_rows * wide_stride(hidden));
    scores = arena.take<float>(num_rows * router.num_experts);
    group_value = arena.take<float>(num_threads * router.n_group);
    group_id = arena.take<int64_t>(num_threads * router.n_group);
    ids = arena.take<int64_t>(num_routed);
    weights = arena.take<float>(num_routed);
    position = arena.take<int64_t>(num_routed);
    row_of = arena.take<int64_t>(num_pairs);
    count = arena.take<int64_t>(router.num_experts);
    segments = arena.take<Segment>(router.num_experts + 1);
    packed_x = arena.take<uint16_t>(packs ? num_pairs * moe_packed_depth(hidden) : 0);
    act = arena.take<char>((num_routed * experts.first.inner + num_rows * shared_inner) * 4);
    packed_act = arena.take<uint16_t>(packs ? num_routed * moe_packed_depth(experts.first.inner) +
                                                  num_rows * moe_packed_depth(shared_inner)
                                            : 0);
    down = arena.take<float>(num_threads * num_pairs * kMoeBlock);
    contribution = arena.take<const float*>(num_threads * router.top_k);
  }
};

// Calls task(i, worker) for every i. Workers take the next task when they finish one, so an expert
// that many rows chose, or a core that another process uses, does not hold up the rest.
template <class Task>
void share_tasks(int64_t num_tasks, int64_t work, bool uses_tiles, const Task& task) {
  const int64_t num_workers =
      std::min<int64_t>({torch::stable::get_num_threads(), num_tasks, work / kWorkPerThread + 1});
  if (num_workers <= 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, 0);
    if (uses_tiles) SK_KERNEL(moe_release_tiles)();
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t worker, int64_t) {
    for (int64_t i = next++; i < num_tasks; i = next++) task(i, worker);
    if (uses_tiles) SK_KERNEL(moe_release_tiles)();
  });
}

// Inserts into the best `k` so far, best first; candidates come in ascending id, so that equals
// keep the lower id ahead.
struct Best {
  float* value;
  int64_t* id;
  int64_t k;
  int64_t size = 0;

  void offer(float v, int64_t candidate) {
    if (k == 0 || (size == k && !(v > value[k - 1]))) return;
    int64_t i = size < k ? size++ : k - 1;
    for (; i > 0 && v > value[i - 1]; --i) {
      value[i] = value[i - 1];
      id[i] = id[i - 1];
    }
    value[i] = v;
    id[i] = candidate;
  }
};

// Chooses the experts of one row from its scores. A NaN counts less than anything sound and weighs
// nothing; what is compared is never NaN, so the order is total and every id in range.
void choose(const Router& r, const float* scores, float* group_value, int64_t* group_id,
            int64_t* ids, float* weights) {
  const auto biased = [&](int64_t e) {
    const float v = scores[e] + (r.bias ? r.bias[e * r.bias_stride] : 0.0f);
    return std::isnan(v) ? -FLT_MAX : std::min(std::max(v, -FLT_MAX), FLT_MAX);
  };
  const int64_t group_size = r.num_experts / r.n_group;
  Best groups{group_value, group_id, r.topk_group};
  for (int64_t g = 0; g < r.n_group; ++g) {
    if (r.topk_group == r.n_group) {
      groups.offer(0.0f, g);
      continue;
    }
    float best = -INFINITY, second = -INFINITY;
    for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
      const float v = biased(e);
      second = std::max(second, std::min(best, v));
      best = std::max(best, v);
    }
    groups.offer(group_size > 1 ? best + second : best, g);
  }
  std::sort(group_id, group_id + groups.size);

  Best experts{weights, ids, r.top_k};
  for (int64_t i = 0; i < groups.size; ++i) {
    for (int64_t e = group_id[i] * group_size; e < (group_id[i] + 1) * group_size; ++e)
      experts.offer(biased(e), e);
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < r.top_k; ++i) {
    const float score = scores[ids[i]];
    weights[i] = std::isnan(score) ? 0.0f : score;
    sum += weights[i];
  }
  for (int64_t i = 0; i < r.top_k; ++i) {
    if (r.normalize) weights[i] /= sum + 1e-20f;
    weights[i] *= r.scaling;
  }
}

struct Pass {
  const Router& router;
  const Experts& experts;
  Float dtype;
  const char* x;
  int64_t x_stride, num_rows, hidden;
  char* out;
  int64_t out_stride;
};

void run_pass(const Pass& p, const Scratch& s) {
  const Router& router = p.router;
  const int64_t size = float_size(p.dtype);
  const int64_t num_routed = p.num_rows * router.top_k;
  const auto product = SK_KERNEL(moe_product);

  const float* x_f32 = reinterpret_cast<const float*>(p.x);
  int64_t x_f32_stride = p.x_stride;
  const bool widens =
      p.dtype == Float::kBf16 && (router.num_experts > 0 || p.experts.any(MoeForm::kWiden));
  if (widens || (p.dtype == Float::kF32 && p.num_rows > 1)) {
    x_f32 = s.wide_x;
    x_f32_stride = wide_stride(p.hidden);
    for (int64_t t = 0; t < p.num_rows; ++t) {
      float* wide = s.wide_x + t * x_f32_stride;
      const char* row = p.x + t * p.x_stride * size;
      if (widens) {
        SK_KERNEL(moe_widen)(reinterpret_cast<const uint16_t*>(row), p.hidden, wide);
      } else {
        std::memcpy(wide, row, static_cast<size_t>(p.hidden) * sizeof(float));
      }
    }
  }

  // Route.
  if (router.top_k > 0) {
    const int64_t num_blocks = (router.num_experts + kRouterBlock - 1) / kRouterBlock;
    const int64_t weight_size = router.form == MoeForm::kF32 ? 4 : 2;
    share_tasks(
        num_blocks, p.num_rows * router.num_experts * p.hidden, false, [&](int64_t block, int64_t) {
          const int64_t e = block * kRouterBlock;
          MoeProduct m{};
          m.x = x_f32;
          m.x_stride = x_f32_stride;
          m.num_rows = p.num_rows;
          m.w = static_cast<const char*>(router.weight) + e * router.weight_stride * weight_size;
          m.w_stride = router.weight_stride;
          m.num_outs = std::min(kRouterBlock, router.num_experts - e);
          m.depth = p.hidden;
          m.y = s.scores + e;
          m.y_stride = router.num_experts;
          product(m, router.form);
        });
    share_tasks(p.num_rows, p.num_rows * router.num_experts * 8, false,
                [&](int64_t t, int64_t worker) {
                  float* scores = s.scores + t * router.num_experts;
                  SK_KERNEL(moe_sigmoid)(scores, router.num_experts);
                  choose(router, scores, s.group_value + worker * router.n_group,
                         s.group_id + worker * router.n_group, s.ids + t * router.top_k,
                         s.weights + t * router.top_k);
                });
  }

  // Group the pairs by expert, rows ascending within one; the shared expert's pairs come last.
  std::fill(s.count, s.count + router.num_experts, 0);
  for (int64_t i = 0; i < num_routed; ++i) ++s.count[s.ids[i]];
  Segment* segment = s.segments;
  int64_t first = 0, act = 0, packed = 0;
  const auto add_segment = [&](const Expert& expert, int64_t rows) {
    *segment++ = Segment{expert, first, rows, act, packed};
    first += rows;
    act += rows * expert.inner;
    packed += rows * moe_packed_depth(expert.inner);
  };
  for (int64_t e = 0; e < router.num_experts; ++e) {
    const int64_t begin = first;
    if (s.count[e] > 0) add_segment(p.experts.routed(e), s.count[e]);
    s.count[e] = begin;
  }
  const int64_t num_active = segment - s.segments;
  for (int64_t i = 0; i < num_routed; ++i) {
    s.position[i] = s.count[s.ids[i]]++;
    s.row_of[s.position[i]] = i / router.top_k;
  }
  if (p.experts.shared) {
    add_segment(*p.experts.shared, p.num_rows);
    for (int64_t t = 0; t < p.num_rows; ++t) s.row_of[num_routed + t] = t;
  }
  const int64_t num_segments = segment - s.segments;
  const int64_t num_pairs = first;

  // Activations have room for fp32, whatever they are.
  const auto activation = [&](const Segment& g) { return s.act + g.act * 4; };
  const auto act_size = [](const Segment& g) { return g.expert.narrow() ? 2 : 4; };
  const bool packs = p.experts.any(MoeForm::kAmx);
  const int64_t packed_hidden = moe_packed_depth(p.hidden);
  const int64_t work = act * p.hidden;
  if (packs) {
    share_tasks(num_segments, num_pairs * p.hidden, false, [&](int64_t i, int64_t) {
      const Segment& g = s.segments[i];
      if (g.expert.form != MoeForm::kAmx) return;
      SK_KERNEL(moe_pack)(reinterpret_cast<const uint16_t*>(p.x), p.x_stride, s.row_of + g.first,
                          g.num_rows, p.hidden, s.packed_x + g.first * packed_hidden);
    });
  }

  // Gate and up products, and the activation. The shared expert, with all rows, is the longest task
  // and goes first.
  const auto blocks = [](int64_t n) { return (n + kMoeBlock - 1) / kMoeBlock; };
  const int64_t shared_blocks = p.experts.shared ? blocks(p.experts.shared->inner) : 0;
  const int64_t routed_blocks = blocks(p.experts.first.inner);
  share_tasks(
      shared_blocks + num_active * routed_blocks, 2 * work, packs, [&](int64_t task, int64_t) {
        const bool is_shared = task < shared_blocks;
        const int64_t routed_task = task - shared_blocks;
        const Segment& g = s.segments[is_shared ? num_active : routed_task / routed_blocks];
        const int64_t begin = (is_shared ? task : routed_task % routed_blocks) * kMoeBlock;
        const Expert& expert = g.expert;
        float gate[kActivateRows * kMoeBlock], up[kActivateRows * kMoeBlock];
        MoeProduct m{};
        m.num_outs = std::min(kMoeBlock, expert.inner - begin);
        m.depth = p.hidden;
        m.y_stride = kMoeBlock;
        for (int64_t r = 0; r < g.num_rows; r += kActivateRows) {
          m.num_rows = std::min(kActivateRows, g.num_rows - r);
          if (expert.form == MoeForm::kAmx) {
            m.x = s.packed_x + (g.first + r) * packed_hidden;
          } else {
            m.x = expert.narrow() ? static_cast<const void*>(p.x) : x_f32;
            m.x_stride = expert.narrow() ? p.x_stride : x_f32_stride;
            m.x_index = s.row_of + g.first + r;
          }
          expert.gate_up.rows_from(begin, expert.item, m);
          m.y = gate;
          product(m, expert.form);
          expert.gate_up.rows_from(expert.inner + begin, expert.item, m);
          m.y = up;
          product(m, expert.form);
          for (int64_t i = 0; i < m.num_rows; ++i) {
            SK_KERNEL(moe_activate)(gate + i * kMoeBlock, up + i * kMoeBlock, m.num_outs, p.dtype,
                                    expert.narrow(),
                                    activation(g) + ((r + i) * expert.inner + begin) * act_size(g));
          }
        }
      });
  if (packs) {
    share_tasks(num_segments, act, false, [&](int64_t i, int64_t) {
      const Segment& g = s.segments[i];
      if (g.expert.form != MoeForm::kAmx) return;
      SK_KERNEL(moe_pack)(reinterpret_cast<const uint16_t*>(activation(g)), g.expert.inner, nullptr,
                          g.num_rows, g.expert.inner, s.packed_act + g.packed);
    });
  }

  // Down products of a block of the output, for all pairs; then every row sums its own.
  share_tasks(blocks(p.hidden), work, packs, [&](int64_t block, int64_t worker) {
    const int64_t begin = block * kMoeBlock;
    const int64_t num_outs = std::min(kMoeBlock, p.hidden - begin);
    float* down = s.down + worker * num_pairs * kMoeBlock;
    for (int64_t i = 0; i < num_segments; ++i) {
      const Segment& g = s.segments[i];
      MoeProduct m{};
      m.x = g.expert.form == MoeForm::kAmx ? static_cast<const void*>(s.packed_act + g.packed)
                                           : activation(g);
      m.x_stride = g.expert.inner;
      m.num_rows = g.num_rows;
      g.expert.down.rows_from(begin, g.expert.item, m);
      m.num_outs = num_outs;
      m.depth = g.expert.inner;
      m.y = down + g.first * kMoeBlock;
      m.y_stride = kMoeBlock;
      product(m, g.expert.form);
    }
    const float** rows = s.contribution + worker * router.top_k;
    for (int64_t t = 0; t < p.num_rows; ++t) {
      for (int64_t i = 0; i < router.top_k; ++i)
        rows[i] = down + s.position[t * router.top_k + i] * kMoeBlock;
      SK_KERNEL(moe_combine)(rows, s.weights + t * router.top_k, router.top_k,
                             p.experts.shared ? down + (num_routed + t) * kMoeBlock : nullptr,
                             num_outs, p.dtype, p.out + (t * p.out_stride + begin) * size);
    }
  });
}

MoeForm choose_form(Float dtype) {
  if (dtype == Float::kF32) return MoeForm::kF32;
  if (cpu_has_amx_bf16()) return MoeForm::kAmx;
  if (cpu_has_avx512_bf16()) return MoeForm::kBf16Dot;
  return MoeForm::kWiden;
}

void moe_experts(Tensor x, Tensor router_weight, std::optional<Tensor> correction_bias,
                 Tensor w_gate_up, Tensor w_down, std::optional<Tensor> w_gate_up_scale,
                 std::optional<Tensor> w_down_scale, std::optional<Tensor> shared_gate_up,
                 std::optional<Tensor> shared_down, int64_t top_k, int64_t n_group,
                 int64_t topk_group, double routed_scaling, bool normalize, Tensor out) {
  check_cpu(kOp, "x", x);
  check_float(kOp, "x", x);
  check_shape(kOp, "x", x, {-1, -1});
  check_last_dim(kOp, "x", x);
  const int64_t num_rows = x.size(0);
  const int64_t hidden = x.size(1);
  const auto check_operand = [&](const char* name, const Tensor& t,
                                 std::initializer_list<int64_t> shape) {
    check_same_device(kOp, name, t, x);
    check_shape(kOp, name, t, shape);
    check_last_dim(kOp, name, t);
  };
  check_operand("router_weight", router_weight, {-1, hidden});
  if (router_weight.scalar_type() != ScalarType::Float)
    check_dtype(kOp, "router_weight", router_weight, x.scalar_type());
  const int64_t num_experts = router_weight.size(0);
  SK_CHECK(num_experts <= kMaxExperts, kOp, "router_weight",
           "at most " + std::to_string(kMaxExperts) + " experts", num_experts);
  const auto check_inner = [](const char* name, int64_t inner) {
    SK_CHECK(inner <= kMaxInner, kOp, name, "at most " + std::to_string(kMaxInner) + " columns",
             inner);
  };
  SK_CHECK(w_gate_up_scale.has_value() == w_down_scale.has_value(), kOp, "w_down_scale",
           "given exactly when w_gate_up_scale is", w_down_scale ? "a tensor" : "None");
  const bool is_int4 = w_down_scale.has_value();
  SK_CHECK(!is_int4 || hidden % kMoeInt4Group == 0, kOp, "x",
           "a multiple of " + std::to_string(kMoeInt4Group) + " columns for INT4 experts", hidden);
  const Float dtype = float_kind(x.scalar_type());
  const int64_t size = float_size(dtype);
  const MoeForm plain_form = choose_form(dtype);
  // The shapes of both matrices follow from the down matrix: [H, I] and [2I, H], and the number of
  // experts before them if there are many. Words of INT4 hold several columns.
  const auto check_pair = [&](const char* gate_up_name, const Tensor& gate_up,
                              const char* down_name, const Tensor& down, bool many, bool packed) {
    const ScalarType item = packed ? ScalarType::Int : x.scalar_type();
    const int64_t per_word = packed ? kMoeInt4PerWord : 1;
    check_dtype(kOp, down_name, down, item);
    if (many) {
      check_operand(down_name, down, {num_experts, hidden, -1});
    } else {
      check_operand(down_name, down, {hidden, -1});
    }
    const int64_t words = down.size(many ? 2 : 1);
    check_inner(down_name, words);
    const int64_t inner = words * per_word;
    check_dtype(kOp, gate_up_name, gate_up, item);
    if (many) {
      check_operand(gate_up_name, gate_up, {num_experts, 2 * inner, hidden / per_word});
    } else {
      check_operand(gate_up_name, gate_up, {2 * inner, hidden});
    }
    const auto matrix = [&](const Tensor& t) {
      return Matrix{static_cast<const char*>(t.data_ptr()), t.stride(many ? 1 : 0), nullptr, 0, 0};
    };
    return Expert{matrix(gate_up), matrix(down), inner, packed ? MoeForm::kInt4 : plain_form,
                  packed ? static_cast<int64_t>(sizeof(uint32_t)) : size};
  };
  const auto check_scale = [&](const char* name, const Tensor& scale, int64_t num_outs,
                               int64_t num_columns, Matrix& matrix) {
    check_dtype(kOp, name, scale, ScalarType::BFloat16);
    check_operand(name, scale, {num_experts, num_outs, -1});
    const int64_t num_groups = scale.size(2);
    const int64_t group = num_columns / std::max<int64_t>(num_groups, 1);
    SK_CHECK(group * num_groups == num_columns && group % kMoeInt4Group == 0, kOp, name,
             "groups of a multiple of " + std::to_string(kMoeInt4Group) + " among " +
                 std::to_string(num_columns) + " columns",
             std::to_string(num_groups) + " groups");
    matrix.scale = static_cast<const uint16_t*>(scale.data_ptr());
    matrix.scale_stride = scale.stride(1);
    matrix.group = group;
  };
  Experts experts{};
  experts.first = check_pair("w_gate_up", w_gate_up, "w_down", w_down, true, is_int4);
  experts.gate_up_step = w_gate_up.stride(0) * experts.first.item;
  experts.down_step = w_down.stride(0) * experts.first.item;
  if (is_int4) {
    const int64_t inner = experts.first.inner;
    check_scale("w_gate_up_scale", *w_gate_up_scale, 2 * inner, hidden, experts.first.gate_up);
    check_scale("w_down_scale", *w_down_scale, hidden, inner, experts.first.down);
    experts.gate_up_scale_step = w_gate_up_scale->stride(0);
    experts.down_scale_step = w_down_scale->stride(0);
  }
  SK_CHECK(shared_gate_up.has_value() == shared_down.has_value(), kOp, "shared_down",
           "given exactly when shared_gate_up is", shared_down.has_value() ? "a tensor" : "None");
  if (shared_gate_up)
    experts.shared =
        check_pair("shared_gate_up", *shared_gate_up, "shared_down", *shared_down, false, false);
  if (correction_bias) {
    check_operand("correction_bias", *correction_bias, {num_experts});
    check_dtype(kOp, "correction_bias", *correction_bias, ScalarType::Float);
  }
  SK_CHECK(
      n_group >= 1 && n_group <= std::max<int64_t>(num_experts, 1) && num_experts % n_group == 0,
      kOp, "n_group", "a divisor of " + std::to_string(num_experts) + " experts", n_group);
  SK_CHECK(topk_group >= 1 && topk_group <= n_group, kOp, "topk_group",
           "1 <= topk_group <= " + std::to_string(n_group), topk_group);
  const int64_t most = num_experts / n_group * topk_group;
  SK_CHECK(top_k >= 0 && top_k <= most, kOp, "top_k", "0 <= top_k <= " + std::to_string(most),
           top_k);
  SK_CHECK(std::isfinite(routed_scaling), kOp, "routed_scaling", "a finite number", routed_scaling);
  check_operand("out", out, {num_rows, hidden});
  check_dtype(kOp, "out", out, x.scalar_type());
  // A row is written after its last read, so out may be x itself.
  check_outputs_apart(kOp, {{"out", &out}},
                      {{"x", Footprint(x).same_as(Footprint(out)) ? nullptr : &x},
                       {"router_weight", &router_weight},
                       {"correction_bias", given(correction_bias)},
                       {"w_gate_up", &w_gate_up},
                       {"w_down", &w_down},
                       {"w_gate_up_scale", given(w_gate_up_scale)},
                       {"w_down_scale", given(w_down_scale)},
                       {"shared_gate_up", given(shared_gate_up)},
                       {"shared_down", given(shared_down)}});
  if (num_rows == 0 || hidden == 0) return;

  Router router{};
  router.num_experts = num_experts;
  router.top_k = top_k;
  router.n_group = n_group;
  router.topk_group = topk_group;
  router.scaling = static_cast<float>(routed_scaling);
  router.normalize = normalize;
  router.weight = router_weight.data_ptr();
  router.weight_stride = router_weight.stride(0);
  router.form = router_weight.scalar_type() == ScalarType::Float ? MoeForm::kF32 : MoeForm::kWiden;
  if (correction_bias) {
    router.bias = static_cast<const float*>(correction_bias->data_ptr());
    router.bias_stride = correction_bias->stride(0);
  }

  Pass pass{router, experts, dtype, nullptr, x.stride(0), 0, hidden, nullptr, out.stride(0)};
  const int64_t num_threads = torch::stable::get_num_threads();
  const auto layout = [&](Arena& arena) {
    return Scratch(arena, router, experts, std::min(num_rows, kMaxRows), hidden, num_threads);
  };
  Arena measure(nullptr);
  layout(measure);
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(64, measure.used() + 64)), &std::free);
  SK_CHECK(memory, kOp, "x", "enough memory for its scratch",
           std::to_string(measure.used()) + " bytes missing");
  Arena arena(memory.get());
  const Scratch scratch = layout(arena);
  for (int64_t t = 0; t < num_rows; t += kMaxRows) {
    pass.x = static_cast<const char*>(x.data_ptr()) + t * x.stride(0) * size;
    pass.out = static_cast<char*>(out.data_ptr()) + t * out.stride(0) * size;
    pass.num_rows = std::min(kMaxRows, num_rows - t);
    run_pass(pass, scratch);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("moe_experts", TORCH_BOX(&moe_experts)); }

}  // namespace spec_kernels
