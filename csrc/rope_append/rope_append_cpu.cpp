#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/indexed.h"
#include "rope_append/rope_append.h"

namespace spec_kernels {
namespace {

constexpr int64_t kElementsPerTask = 65536;  // below this, waking a thread costs more

// Unsigned, so that absurd values wrap below zero, which every caller refuses.
int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

// Where rows stand: the arguments that both ops share.
struct PlaceTensors {
  const Tensor& cos_sin;
  const Tensor& depths;
  const std::optional<Tensor>& slots;
  const Tensor& context_lens;
  const std::optional<Tensor>& cache_lens;
  const Tensor& block_tables;
};

void check_operand(const char* op, const char* name, const Tensor& t, ScalarType dtype,
                   std::initializer_list<int64_t> shape) {
  check_cpu(op, name, t);
  check_dtype(op, name, t, dtype);
  check_shape(op, name, t, shape);
  check_last_dim(op, name, t);
}

void check_index(const char* op, const char* name, const Tensor& t,
                 std::initializer_list<int64_t> shape) {
  check_cpu(op, name, t);
  check_int(op, name, t);
  check_shape(op, name, t, shape);
}

// The dtype of `like`, or fp8.
void check_cache(const char* op, const char* name, const Tensor& cache, const Tensor& like,
                 std::initializer_list<int64_t> shape) {
  const bool is_fp8 = cache.scalar_type() == ScalarType::Float8_e4m3fn;
  check_operand(op, name, cache, is_fp8 ? ScalarType::Float8_e4m3fn : like.scalar_type(), shape);
  SK_CHECK(cache.size(1) >= 1, op, name, "a page size of at least 1", cache.size(1));
}

void check_places(const char* op, const PlaceTensors& p, int64_t batch, int64_t num_rows,
                  int64_t dim) {
  check_operand(op, "cos_sin", p.cos_sin, ScalarType::Float, {-1, -1});
  const int64_t width = p.cos_sin.size(1);
  SK_CHECK(width % 2 == 0 && width <= dim, op, "cos_sin",
           "an even number of columns, at most " + std::to_string(dim), width);
  check_index(op, "depths", p.depths, {batch, num_rows});
  check_index(op, "context_lens", p.context_lens, {batch});
  check_index(op, "block_tables", p.block_tables, {batch, -1});
  if (p.slots) check_index(op, "slots", *p.slots, {batch, num_rows});
  if (p.cache_lens) check_index(op, "cache_lens", *p.cache_lens, {batch});
}

// The present rows; every value that they lead to is checked before anything is written.
std::vector<RopeRow> find_rows(const char* op, const PlaceTensors& p, const char* cache_name,
                               const Tensor& cache) {
  const int64_t batch = p.depths.size(0), num_rows = p.depths.size(1);
  const int64_t num_pages = cache.size(0), page_size = cache.size(1);
  const int64_t num_blocks = p.block_tables.size(1), num_positions = p.cos_sin.size(0);
  const IntMatrix depths(p.depths), context_lens(p.context_lens), tables(p.block_tables);
  const IntMatrix slots(p.slots ? *p.slots : p.depths);
  const IntMatrix begins(p.cache_lens ? *p.cache_lens : p.context_lens);
  std::vector<RopeRow> rows;
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t context = context_lens(b), begin = begins(b);
    if (context < 0 || begin < 0) continue;
    taken.clear();
    for (int64_t n = 0; n < num_rows; ++n) {
      const int64_t depth = depths(b, n), slot = p.slots ? slots(b, n) : n;
      if (depth < 0 || slot < 0) continue;
      const int64_t position = wrapping_add(context, depth);
      SK_CHECK(position >= 0 && position < num_positions, op, indexed("depths", b, n).c_str(),
               "a position below " + std::to_string(num_positions), position);
      const int64_t place = wrapping_add(begin, slot);
      const int64_t block = place / page_size;
      SK_CHECK(
          place >= 0 && block < num_blocks, op, indexed("slots", b, n).c_str(),
          "a place within " + std::to_string(num_blocks) + " pages of " + std::to_string(page_size),
          place);
      const int64_t page = tables(b, block);
      SK_CHECK(page >= 0 && page < num_pages, op, indexed("block_tables", b, block).c_str(),
               "0 <= page < " + std::to_string(num_pages), page);
      rows.push_back({b, n, position, page, place % page_size});
      taken.emplace_back(page, place % page_size);
    }
    std::sort(taken.begin(), taken.end());
    const auto twice = std::adjacent_find(taken.begin(), taken.end());
    SK_CHECK(twice == taken.end(), op, indexed("slots", b).c_str(),
             std::string("a place in ") + cache_name + " for each row",
             "slot " + std::to_string(twice->second) + " of page " + std::to_string(twice->first) +
                 " twice");
  }
  return rows;
}

RopePart make_part(RopeRule rule, const Tensor& in, bool in_heads, const Tensor& out,
                   bool out_heads, bool to_cache, const std::optional<Tensor>& scale) {
  RopePart p{};
  p.rule = rule;
  p.in = in.data_ptr();
  p.out = out.data_ptr();
  for (int i = 0; i < 2; ++i) {
    p.in_stride[i] = in.stride(i);
    p.out_stride[i] = out.stride(i);
  }
  p.in_stride[2] = in_heads ? in.stride(2) : 0;
  p.out_stride[2] = out_heads ? out.stride(2) : 0;
  p.to_cache = to_cache;
  p.num_heads = in_heads ? in.size(2) : 1;
  p.dim = in.size(in.dim() - 1);
  p.scale = scale ? static_cast<const float*>(scale->data_ptr()) : nullptr;
  p.scale_stride = scale ? scale->stride(0) : 0;
  return p;
}

void run(RopeAppendArgs& args, const PlaceTensors& p, bool interleaved, ScalarType dtype,
         ScalarType cache_dtype, const std::vector<RopeRow>& rows) {
  if (rows.empty()) return;
  args.cos_sin = static_cast<const float*>(p.cos_sin.data_ptr());
  args.cos_sin_stride = p.cos_sin.stride(0);
  args.half = p.cos_sin.size(1) / 2;
  args.interleaved = interleaved;
  args.dtype = float_kind(dtype);
  args.cache_dtype = float_kind(cache_dtype);
  int64_t elements = 1;
  for (const RopePart& part : args.parts) elements += part.num_heads * part.dim;
  const auto kernel = SK_KERNEL(rope_append_rows);
  torch::stable::parallel_for(0, static_cast<int64_t>(rows.size()),
                              std::max<int64_t>(1, kElementsPerTask / elements),
                              [&](int64_t begin, int64_t end) {
                                std::vector<float> scratch(static_cast<size_t>(4 * args.half + 32));
                                kernel(args, rows.data() + begin, end - begin, scratch.data());
                              });
}

// Each element is read before it is written, so queries may be rotated in place.
const Tensor* unless_same(const Tensor& q, const Tensor& q_out) {
  return Footprint(q).same_as(Footprint(q_out)) ? nullptr : &q;
}

void rope_append(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor depths,
                 std::optional<Tensor> slots, Tensor context_lens, std::optional<Tensor> cache_lens,
                 Tensor block_tables, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                 bool interleaved, Tensor q_out, Tensor k_cache, Tensor v_cache) {
  constexpr char kOp[] = "rope_append";
  check_any_float(kOp, "q", q);
  const ScalarType dtype = q.scalar_type();
  check_operand(kOp, "q", q, dtype, {-1, -1, -1, -1});
  const int64_t batch = q.size(0), num_rows = q.size(1), k_dim = q.size(3);
  check_operand(kOp, "k", k, dtype, {batch, num_rows, -1, k_dim});
  const int64_t kv_heads = k.size(2);
  check_operand(kOp, "v", v, dtype, {batch, num_rows, kv_heads, -1});
  check_cache(kOp, "k_cache", k_cache, q, {-1, -1, kv_heads, k_dim});
  check_operand(kOp, "v_cache", v_cache, k_cache.scalar_type(),
                {k_cache.size(0), k_cache.size(1), kv_heads, v.size(3)});
  check_operand(kOp, "q_out", q_out, dtype, {batch, num_rows, q.size(2), k_dim});
  const PlaceTensors places{cos_sin, depths, slots, context_lens, cache_lens, block_tables};
  check_places(kOp, places, batch, num_rows, k_dim);
  check_cache_scale(kOp, "k_scale", k_scale, k_cache, kv_heads);
  check_cache_scale(kOp, "v_scale", v_scale, v_cache, kv_heads);
  check_outputs_apart(kOp, {{"q_out", &q_out}, {"k_cache", &k_cache}, {"v_cache", &v_cache}},
                      {{"q", unless_same(q, q_out)},
                       {"k", &k},
                       {"v", &v},
                       {"cos_sin", &cos_sin},
                       {"depths", &depths},
                       {"slots", given(slots)},
                       {"context_lens", &context_lens},
                       {"cache_lens", given(cache_lens)},
                       {"block_tables", &block_tables},
                       {"k_scale", given(k_scale)},
                       {"v_scale", given(v_scale)}});
  const std::vector<RopeRow> rows = find_rows(kOp, places, "k_cache", k_cache);
  RopeAppendArgs args{};
  args.parts[0] = make_part(RopeRule::kRotate, q, true, q_out, true, false, std::nullopt);
  args.parts[1] = make_part(RopeRule::kRotate, k, true, k_cache, true, true, k_scale);
  args.parts[2] = make_part(RopeRule::kCopy, v, true, v_cache, true, true, v_scale);
  run(args, places, interleaved, dtype, k_cache.scalar_type(), rows);
}

void rope_append_mla(Tensor q_rope, Tensor latent, Tensor k_rope, std::optional<Tensor> norm_weight,
                     double eps, Tensor cos_sin, Tensor depths, std::optional<Tensor> slots,
                     Tensor context_lens, std::optional<Tensor> cache_lens, Tensor block_tables,
                     std::optional<Tensor> cache_scale, bool interleaved, Tensor q_out,
                     Tensor cache) {
  constexpr char kOp[] = "rope_append_mla";
  check_any_float(kOp, "q_rope", q_rope);
  const ScalarType dtype = q_rope.scalar_type();
  check_operand(kOp, "q_rope", q_rope, dtype, {-1, -1, -1, -1});
  const int64_t batch = q_rope.size(0), num_rows = q_rope.size(1), rope = q_rope.size(3);
  check_operand(kOp, "latent", latent, dtype, {batch, num_rows, -1});
  const int64_t rank = latent.size(2);
  check_operand(kOp, "k_rope", k_rope, dtype, {batch, num_rows, rope});
  SK_CHECK(rank <= INT64_MAX - rope, kOp, "latent", "fewer columns", rank);
  check_cache(kOp, "cache", cache, q_rope, {-1, -1, rank + rope});
  if (norm_weight) check_operand(kOp, "norm_weight", *norm_weight, dtype, {rank});
  SK_CHECK(std::isfinite(eps), kOp, "eps", "a finite number", eps);
  check_operand(kOp, "q_out", q_out, dtype, {batch, num_rows, q_rope.size(2), rope});
  const PlaceTensors places{cos_sin, depths, slots, context_lens, cache_lens, block_tables};
  check_places(kOp, places, batch, num_rows, rope);
  check_cache_scale(kOp, "cache_scale", cache_scale, cache, 1);
  check_outputs_apart(kOp, {{"q_out", &q_out}, {"cache", &cache}},
                      {{"q_rope", unless_same(q_rope, q_out)},
                       {"latent", &latent},
                       {"k_rope", &k_rope},
                       {"norm_weight", given(norm_weight)},
                       {"cos_sin", &cos_sin},
                       {"depths", &depths},
                       {"slots", given(slots)},
                       {"context_lens", &context_lens},
                       {"cache_lens", given(cache_lens)},
                       {"block_tables", &block_tables},
                       {"cache_scale", given(cache_scale)}});
  const std::vector<RopeRow> rows = find_rows(kOp, places, "cache", cache);
  RopeAppendArgs args{};
  args.norm_weight = norm_weight ? norm_weight->data_ptr() : nullptr;
  args.eps = static_cast<float>(eps);
  const RopeRule rule = norm_weight ? RopeRule::kNorm : RopeRule::kCopy;
  args.parts[0] = make_part(RopeRule::kRotate, q_rope, true, q_out, true, false, std::nullopt);
  args.parts[1] = make_part(rule, latent, false, cache, false, true, cache_scale);
  args.parts[2] = make_part(RopeRule::kRotate, k_rope, false, cache, false, true, cache_scale);
  // The rope key stands behind the latent.
  args.parts[2].out =
      static_cast<char*>(cache.data_ptr()) + rank * static_cast<int64_t>(cache.element_size());
  run(args, places, interleaved, dtype, cache.scalar_type(), rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("rope_append", TORCH_BOX(&rope_append));
  m.impl("rope_append_mla", TORCH_BOX(&rope_append_mla));
}

}  // namespace spec_kernels
