#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/indexed.h"
#include "tree_attention/tree_attention.h"

namespace spec_kernels {
namespace {

constexpr int64_t kMaxWords = 32;
// Tables and pages that are views may repeat for ever; no context is longer.
constexpr int64_t kMaxPositions = int64_t{1} << 31;
// A context that is refused later must not overflow before.
constexpr int64_t kFarPosition = int64_t{1} << 62;
// Multiply-adds below which waking other threads costs more than it brings (some ten microseconds
// of work).
constexpr double kSerialWork = 1.5e6;
// Jobs a thread, so that one disturbed thread does not hold up the call.
constexpr int64_t kJobsPerThread = 4;

Bf16Math detect_math() {
  if (cpu_has_amx_bf16()) return Bf16Math::kAmx;
  return cpu_has_avx512_bf16() ? Bf16Math::kDot : Bf16Math::kFma;
}

Bf16Math bf16_math() {
  static const Bf16Math math = detect_math();
  return math;
}

// Jobs whose partial results belong together.
struct JobGroup {
  int64_t first_job, num_jobs;
  int64_t partial;  // offset in floats; used when there are several jobs
};

struct Plan {
  std::vector<AttentionNode> nodes;
  std::vector<int32_t> slots;
  std::vector<AttentionJob> jobs;
  std::vector<JobGroup> groups;
  std::vector<int32_t> job_group;
  std::unique_ptr<std::atomic<int64_t>[]> pending;
  int64_t num_pending = 0;
  std::vector<bool> present;
  std::vector<char> memory;
};

struct Request {
  int64_t context;  // prefix keys in this cache
  int64_t first_node, num_nodes, num_chain;
};

struct Call {
  const char* op;
  TreeAttentionArgs args;
  IntMatrix tables, context_lens;
  const int32_t* words;
  int64_t word_stride[3];
  int64_t num_batch, num_rows, num_kv_heads, num_words, num_pages, num_blocks, window;
  ContextShard shard;
};

void check_page(const Call& c, int64_t b, int64_t block) {
  const int64_t page = c.tables(b, block);
  SK_CHECK(page >= 0 && page < c.num_pages, c.op, indexed("block_tables", b, block).c_str(),
           "0 <= page < " + std::to_string(c.num_pages), page);
}

template <class T>
void clear_row(const TreeAttentionArgs& a, int64_t b, int64_t n) {
  for (int64_t h = 0; h < a.num_heads; ++h) {
    T* out =
        static_cast<T*>(a.out) + b * a.out_stride[0] + n * a.out_stride[1] + h * a.out_stride[2];
    std::fill_n(out, a.v_dim, T(0));
    a.lse[b * a.lse_stride[0] + n * a.lse_stride[1] + h * a.lse_stride[2]] = -INFINITY;
  }
}

// Reads one request's words into nodes, chains first, and checks every value that its rows will
// lead to.
Request read_request(const Call& c, int64_t b, Plan& plan) {
  const int64_t whole = c.context_lens(b);
  if (whole < 0) return {0, static_cast<int64_t>(plan.nodes.size()), 0, 0};  // padded
  const int64_t held = c.shard.local_length(whole);
  const int64_t context = std::min(held, kFarPosition);
  const bool holds_tree = c.shard.holds_tree();
  Request request{context, static_cast<int64_t>(plan.nodes.size()), 0, 0};
  const int64_t capacity =
      c.num_blocks > kMaxPositions / c.args.page ? kMaxPositions : c.num_blocks * c.args.page;
  int64_t highest_bit = -1;
  bool sorted = true;
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t n = 0; n < c.num_rows; ++n) {
      const int32_t* words = c.words + b * c.word_stride[0] + n * c.word_stride[1];
      int64_t num_path = 0, highest = -1;
      for (int64_t i = 0; i < c.num_words; ++i) {
        const uint32_t word = static_cast<uint32_t>(words[i * c.word_stride[2]]);
        if (!word) continue;
        num_path += __builtin_popcount(word);
        highest = 32 * i + 31 - __builtin_clz(word);
      }
      // Without tree keys every path is one: its end is that of the prefix.
      const bool is_chain = !holds_tree || num_path == highest + 1;
      if (num_path == 0 || is_chain != (pass == 0)) continue;
      highest_bit = std::max(highest_bit, highest);
      AttentionNode node{};
      node.row = static_cast<int32_t>(n);
      node.is_chain = is_chain;
      node.last = context + (holds_tree ? num_path : 0) - 1;
      if (c.window > 0) {
        // The window is counted in positions of the whole context.
        const int64_t start = std::min(whole, kFarPosition) + num_path - c.window;
        node.first = start <= whole ? c.shard.local_length(std::max<int64_t>(0, start))
                                    : context + start - whole;
      }
      if (node.first > node.last) continue;  // nothing in sight
      if (!is_chain) {
        node.path = static_cast<int64_t>(plan.slots.size());
        for (int64_t i = 0; i < c.num_words; ++i) {
          for (uint32_t word = static_cast<uint32_t>(words[i * c.word_stride[2]]); word;
               word &= word - 1) {
            plan.slots.push_back(static_cast<int32_t>(32 * i + __builtin_ctz(word)));
          }
        }
      } else if (request.num_nodes > 0) {
        sorted = sorted && plan.nodes.back().last <= node.last;
      }
      plan.nodes.push_back(node);
      ++request.num_nodes;
      if (is_chain) ++request.num_chain;
    }
  }
  if (highest_bit < 0) return request;
  const int64_t num_slots = holds_tree ? highest_bit + 1 : 0;
  SK_CHECK(held <= capacity - num_slots, c.op, indexed("block_tables", b).c_str(),
           "room for " + std::to_string(held) + " + " + std::to_string(num_slots) + " positions",
           capacity);
  if (request.num_nodes == 0) return request;

  AttentionNode* nodes = plan.nodes.data() + request.first_node;
  // A job's chain rows must see one gapless range between them.
  if (!sorted) {
    std::stable_sort(
        nodes, nodes + request.num_chain,
        [](const AttentionNode& x, const AttentionNode& y) { return x.last < y.last; });
  }
  const int64_t page = c.args.page;
  int64_t first = context;
  for (int64_t i = 0; i < request.num_nodes; ++i) first = std::min(first, nodes[i].first);
  const int64_t prefix_blocks = (context + page - 1) / page;
  for (int64_t block = first / page; block < prefix_blocks; ++block) check_page(c, b, block);
  int64_t checked = -1;
  for (int64_t i = 0; i < request.num_nodes; ++i) {
    for (int64_t position = std::max(nodes[i].first, context); position <= nodes[i].last;
         ++position) {
      const int64_t slot =
          nodes[i].is_chain ? position : context + plan.slots[nodes[i].path + position - context];
      if (slot / page == checked) continue;
      checked = slot / page;
      check_page(c, b, checked);
    }
  }
  return request;
}

// Cuts a request's nodes into jobs' worth of rows and its leaves into aligned runs.
void plan_request(const Call& c, int64_t b, const Request& request, int64_t wanted_runs,
                  Plan& plan) {
  const TreeAttentionArgs& a = c.args;
  const int64_t max_nodes = std::max<int64_t>(1, kMaxJobRows / a.group);
  const AttentionNode* nodes = plan.nodes.data() + request.first_node;
  int64_t begin = 0;
  while (begin < request.num_nodes) {
    int64_t end = begin, num_chain = 0, first = nodes[begin].first, last = 0;
    for (; end < request.num_nodes && end - begin < max_nodes; ++end) {
      const AttentionNode& node = nodes[end];
      // Windows that leave a gap among tree keys: what lies in the gap is seen by nobody and may be
      // anything.
      if (node.is_chain ? end > begin && node.first > std::max(request.context, last + 1)
                        : num_chain > 0 && nodes[begin].first > request.context) {
        break;
      }
      num_chain += node.is_chain;
      first = std::min(first, node.first);
      last = std::max(last, node.last);
    }
    const int64_t first_leaf = first / kLeafKeys, end_leaf = last / kLeafKeys + 1;
    int64_t run = std::max<int64_t>(1, attention_split_size(request.context) / kLeafKeys);
    while (run * wanted_runs < end_leaf - first_leaf) run *= 2;
    const int64_t first_run = first_leaf / run, end_run = (end_leaf + run - 1) / run;
    for (int64_t kv_head = 0; kv_head < c.num_kv_heads; ++kv_head) {
      plan.groups.push_back({static_cast<int64_t>(plan.jobs.size()), end_run - first_run, -1});
      for (int64_t r = first_run; r < end_run; ++r) {
        AttentionJob job{};
        job.request = b;
        job.kv_head = kv_head;
        job.context = request.context;
        job.nodes = nodes + begin;
        job.slots = plan.slots.data();
        job.num_nodes = end - begin;
        job.num_chain = num_chain;
        job.first_leaf = r * run;
        job.num_leaves = std::min(run, end_leaf - r * run);
        plan.jobs.push_back(job);
        plan.job_group.push_back(static_cast<int32_t>(plan.groups.size() - 1));
      }
    }
    begin = end;
  }
}

float* aligned(std::vector<char>& memory, int64_t num_floats) {
  const size_t bytes = static_cast<size_t>(num_floats) * sizeof(float) + 64;
  if (memory.size() < bytes) {
    memory.clear();
    memory.resize(bytes);
  }
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((at + 63) / 64 * 64);
}

void attend(const Call& c) {
  const TreeAttentionArgs& a = c.args;
  if (c.num_batch == 0 || c.num_rows == 0 || a.num_heads == 0) return;
  // One plan a thread that calls: it grows to the largest call and is used again.
  thread_local Plan plan;
  thread_local std::vector<Request> requests;
  plan.nodes.clear();
  plan.slots.clear();
  plan.jobs.clear();
  plan.groups.clear();
  plan.job_group.clear();
  requests.clear();
  for (int64_t b = 0; b < c.num_batch; ++b) requests.push_back(read_request(c, b, plan));

  // Everything is checked; from here on memory is written.
  double work = 0;
  int64_t num_requests = 0;
  for (int64_t b = 0; b < c.num_batch; ++b) {
    const Request& request = requests[b];
    if (request.num_nodes < c.num_rows) {
      plan.present.assign(static_cast<size_t>(c.num_rows), false);
      for (int64_t i = 0; i < request.num_nodes; ++i)
        plan.present[plan.nodes[request.first_node + i].row] = true;
      for (int64_t n = 0; n < c.num_rows; ++n) {
        if (plan.present[n]) continue;
        a.dtype == Float::kF32 ? clear_row<float>(a, b, n) : clear_row<uint16_t>(a, b, n);
      }
    }
    if (request.num_nodes == 0) continue;
    ++num_requests;
    const double keys = static_cast<double>(request.context + 1);
    const double rows = static_cast<double>(request.num_nodes * a.num_heads);
    work += keys * (rows + 8 * c.num_kv_heads) * static_cast<double>(a.k_dim + a.v_dim);
  }
  if (num_requests == 0) return;
  const int64_t num_threads =
      work < kSerialWork ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t wanted_runs =
      num_threads == 1
          ? 1
          : std::max<int64_t>(1, kJobsPerThread * num_threads / (num_requests * c.num_kv_heads));
  for (int64_t b = 0; b < c.num_batch; ++b) plan_request(c, b, requests[b], wanted_runs, plan);

  int64_t scratch = 0, partials = 0, num_split = 0;
  for (JobGroup& group : plan.groups) {
    const AttentionJob& job = plan.jobs[group.first_job];
    const int64_t num_rows = job.num_nodes * a.group;
    scratch = std::max(scratch, round_up(scratch_floats(a, num_rows, job.num_leaves), 16));
    if (group.num_jobs == 1) continue;
    ++num_split;
    group.partial = partials;
    partials += group.num_jobs * partial_floats(a, num_rows);
  }
  const int64_t num_jobs = static_cast<int64_t>(plan.jobs.size());
  const int64_t num_workers = std::min(num_threads, num_jobs);
  float* const memory = aligned(plan.memory, num_workers * scratch + partials);
  float* const partial_memory = memory + num_workers * scratch;
  if (num_split > 0) {
    const int64_t num_groups = static_cast<int64_t>(plan.groups.size());
    if (plan.num_pending < num_groups) {
      plan.pending.reset(new std::atomic<int64_t>[static_cast<size_t>(num_groups)]);
      plan.num_pending = num_groups;
    }
    for (int64_t g = 0; g < num_groups; ++g)
      plan.pending[g].store(plan.groups[g].num_jobs, std::memory_order_relaxed);
  }

  const Bf16Math math = bf16_math();
  const auto run = SK_KERNEL(tree_attention_run);
  const auto merge = SK_KERNEL(tree_attention_merge);
  const Plan* const shared = &plan;
  std::atomic<int64_t> next_job{0}, next_worker{0};
  const auto work_off = [&](int64_t, int64_t) {
    float* const own = memory + next_worker.fetch_add(1, std::memory_order_relaxed) * scratch;
    for (int64_t j; (j = next_job.fetch_add(1, std::memory_order_relaxed)) < num_jobs;) {
      const AttentionJob& job = shared->jobs[j];
      const int64_t g = shared->job_group[j];
      const JobGroup& group = shared->groups[g];
      if (group.num_jobs == 1) {
        run(a, job, math, own, nullptr);
        continue;
      }
      float* const first = partial_memory + group.partial;
      run(a, job, math, own,
          first + (j - group.first_job) * partial_floats(a, job.num_nodes * a.group));
      // Whoever finishes last merges; the order of the merge is fixed, whoever does it.
      if (shared->pending[g].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        merge(a, shared->jobs[group.first_job], math, first, group.num_jobs);
      }
    }
  };
  if (num_workers == 1) {
    work_off(0, 1);
  } else {
    torch::stable::parallel_for(0, num_workers, 1, work_off);
  }
}

void set_strides(const Tensor& t, int64_t (&stride)[3]) {
  for (int i = 0; i < 3; ++i) stride[i] = t.stride(i);
}

// What both forms take after their tensors.
struct Options {
  const std::optional<Tensor>& sinks;
  double scale, logit_cap;
  int64_t window;
  ContextShard shard;
};

void check_cache(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  check_same_device(op, name, t, q);
  const ScalarType s = t.scalar_type();
  SK_CHECK(s == q.scalar_type() || s == ScalarType::Float8_e4m3fn, op, name,
           std::string(torch::headeronly::toString(q.scalar_type())) + " or Float8_e4m3fn",
           torch::headeronly::toString(s));
}

// The factors of an fp8 cache; null for the others.
const float* cache_scale_of(const char* op, const char* name, const std::optional<Tensor>& scale,
                            const Tensor& cache, int64_t num, int64_t* stride) {
  check_cache_scale(op, name, scale, cache, num);
  if (!scale) return nullptr;
  *stride = scale->stride(0);
  return static_cast<const float*>(scale->data_ptr());
}

// The checks that both forms share. `q` gives the rows and heads; k_cache is [P, page, Hkv, Dk] or
// [P, page, Dk].
Call common_call(const char* op, const char* k_name, const Tensor& q, const Tensor& k_cache,
                 int64_t k_dim, int64_t v_dim, int64_t num_kv_heads, const Tensor& block_tables,
                 const Tensor& context_lens, const Tensor& ancestors, const Options& options,
                 const Tensor& out, const Tensor& lse) {
  const int64_t num_batch = q.size(0), num_rows = q.size(1), num_heads = q.size(2);
  SK_CHECK(k_cache.size(1) >= 1, op, k_name, "a page size of at least 1", k_cache.size(1));
  SK_CHECK(num_heads == 0 || (num_kv_heads >= 1 && num_heads % num_kv_heads == 0), op, k_name,
           "a number of heads that divides " + std::to_string(num_heads), num_kv_heads);
  SK_CHECK(k_dim >= 1 && k_dim <= kMaxHeadDim && v_dim <= kMaxHeadDim, op, k_name,
           "1 to " + std::to_string(kMaxHeadDim) + " columns",
           std::to_string(k_dim) + " and " + std::to_string(v_dim));
  check_same_device(op, "block_tables", block_tables, q);
  check_int(op, "block_tables", block_tables);
  check_shape(op, "block_tables", block_tables, {num_batch, -1});
  check_same_device(op, "context_lens", context_lens, q);
  check_int(op, "context_lens", context_lens);
  check_shape(op, "context_lens", context_lens, {num_batch});
  check_same_device(op, "ancestors", ancestors, q);
  check_dtype(op, "ancestors", ancestors, ScalarType::Int);
  check_shape(op, "ancestors", ancestors, {num_batch, num_rows, -1});
  SK_CHECK(ancestors.size(2) <= kMaxWords, op, "ancestors", "at most 32 words a row",
           ancestors.size(2));
  // In fp32, in which scores are: a cap that became 0 there would be none.
  SK_CHECK(std::abs(options.scale) <= FLT_MAX, op, "scale", "a finite float32", options.scale);
  SK_CHECK(std::abs(options.logit_cap) <= FLT_MAX &&
               !(0 < options.logit_cap && options.logit_cap < FLT_MIN),
           op, "logit_cap", "a finite float32, normal if positive", options.logit_cap);
  if (options.sinks) {
    check_same_device(op, "sinks", *options.sinks, q);
    check_dtype(op, "sinks", *options.sinks, ScalarType::Float);
    check_shape(op, "sinks", *options.sinks, {num_heads});
  }
  const ContextShard& shard = options.shard;
  SK_CHECK(shard.num_shards >= 1 && shard.num_shards <= kMaxShards, op, "num_shards",
           "1 to " + std::to_string(kMaxShards), shard.num_shards);
  SK_CHECK(shard.index >= 0 && shard.index < shard.num_shards, op, "shard_index",
           "0 <= index < " + std::to_string(shard.num_shards), shard.index);
  SK_CHECK(shard.run >= 1 && shard.run <= kMaxShardRun, op, "shard_run",
           "1 to " + std::to_string(kMaxShardRun), shard.run);
  check_same_device(op, "out", out, q);
  check_dtype(op, "out", out, q.scalar_type());
  check_shape(op, "out", out, {num_batch, num_rows, num_heads, v_dim});
  check_last_dim(op, "out", out);
  check_same_device(op, "lse", lse, q);
  check_dtype(op, "lse", lse, ScalarType::Float);
  check_shape(op, "lse", lse, {num_batch, num_rows, num_heads});

  Call c{op, {},   IntMatrix(block_tables), IntMatrix(context_lens), nullptr, {}, 0, 0, 0, 0, 0, 0,
         0,  shard};
  TreeAttentionArgs& a = c.args;
  a.out = out.data_ptr();
  a.lse = static_cast<float*>(lse.data_ptr());
  set_strides(out, a.out_stride);
  set_strides(lse, a.lse_stride);
  a.tables = c.tables.data.data;
  a.wide_tables = c.tables.data.wide;
  a.table_stride[0] = c.tables.row;
  a.table_stride[1] = c.tables.column;
  a.page = k_cache.size(1);
  a.k_dim = k_dim;
  a.v_dim = v_dim;
  a.num_heads = num_heads;
  a.group = num_heads ? num_heads / num_kv_heads : 1;
  a.scale = static_cast<float>(options.scale);
  a.logit_cap = static_cast<float>(options.logit_cap);
  if (options.sinks && shard.holds_tree()) {
    a.sinks = static_cast<const float*>(options.sinks->data_ptr());
    a.sink_stride = options.sinks->stride(0);
  }
  a.dtype = float_kind(q.scalar_type());
  a.cache_dtype = float_kind(k_cache.scalar_type());
  c.words = static_cast<const int32_t*>(ancestors.data_ptr());
  set_strides(ancestors, c.word_stride);
  c.num_batch = num_batch;
  c.num_rows = num_rows;
  c.num_kv_heads = num_kv_heads;
  c.num_words = ancestors.size(2);
  c.num_pages = k_cache.size(0);
  c.num_blocks = block_tables.size(1);
  c.window = options.window;
  return c;
}

void check_query(const char* op, const char* name, const Tensor& t) {
  check_cpu(op, name, t);
  check_any_float(op, name, t);
  check_shape(op, name, t, {-1, -1, -1, -1});
  check_last_dim(op, name, t);
}

void tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables,
                    Tensor context_lens, Tensor ancestors, std::optional<Tensor> k_scale,
                    std::optional<Tensor> v_scale, std::optional<Tensor> sinks, double scale,
                    double logit_cap, int64_t window, int64_t shard_index, int64_t num_shards,
                    int64_t shard_run, Tensor out, Tensor lse) {
  constexpr char kOp[] = "tree_attention";
  check_query(kOp, "q", q);
  const int64_t k_dim = q.size(3);
  check_cache(kOp, "k_cache", k_cache, q);
  check_shape(kOp, "k_cache", k_cache, {-1, -1, -1, k_dim});
  check_last_dim(kOp, "k_cache", k_cache);
  check_same_device(kOp, "v_cache", v_cache, q);
  check_dtype(kOp, "v_cache", v_cache, k_cache.scalar_type());
  check_shape(kOp, "v_cache", v_cache, {k_cache.size(0), k_cache.size(1), k_cache.size(2), -1});
  check_last_dim(kOp, "v_cache", v_cache);
  const int64_t num_kv_heads = k_cache.size(2);
  const Options options{sinks, scale, logit_cap, window, {shard_index, num_shards, shard_run}};
  Call c = common_call(kOp, "k_cache", q, k_cache, k_dim, v_cache.size(3), num_kv_heads,
                       block_tables, context_lens, ancestors, options, out, lse);
  TreeAttentionArgs& a = c.args;
  a.k_scale = cache_scale_of(kOp, "k_scale", k_scale, k_cache, num_kv_heads, &a.k_scale_stride);
  a.v_scale = cache_scale_of(kOp, "v_scale", v_scale, v_cache, num_kv_heads, &a.v_scale_stride);
  a.q[0] = q.data_ptr();
  a.q_dim[0] = k_dim;
  set_strides(q, a.q_stride[0]);
  a.k = k_cache.data_ptr();
  a.v = v_cache.data_ptr();
  check_outputs_apart(kOp, {{"out", &out}, {"lse", &lse}},
                      {{"q", &q},
                       {"k_cache", &k_cache},
                       {"v_cache", &v_cache},
                       {"block_tables", &block_tables},
                       {"context_lens", &context_lens},
                       {"ancestors", &ancestors},
                       {"k_scale", given(k_scale)},
                       {"v_scale", given(v_scale)},
                       {"sinks", given(sinks)}});
  set_strides(k_cache, a.k_stride);
  set_strides(v_cache, a.v_stride);
  attend(c);
}

void tree_attention_mla(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_tables,
                        Tensor context_lens, Tensor ancestors, std::optional<Tensor> cache_scale,
                        std::optional<Tensor> sinks, double scale, double logit_cap, int64_t window,
                        int64_t shard_index, int64_t num_shards, int64_t shard_run, Tensor out,
                        Tensor lse) {
  constexpr char kOp[] = "tree_attention_mla";
  check_query(kOp, "q_latent", q_latent);
  const int64_t rank = q_latent.size(3);
  check_query(kOp, "q_rope", q_rope);
  check_dtype(kOp, "q_rope", q_rope, q_latent.scalar_type());
  check_shape(kOp, "q_rope", q_rope, {q_latent.size(0), q_latent.size(1), q_latent.size(2), -1});
  const int64_t k_dim = rank + q_rope.size(3);
  check_cache(kOp, "cache", cache, q_latent);
  check_shape(kOp, "cache", cache, {-1, -1, k_dim});
  check_last_dim(kOp, "cache", cache);
  SK_CHECK(rank >= 1, kOp, "q_latent", "at least one column", rank);
  const Options options{sinks, scale, logit_cap, window, {shard_index, num_shards, shard_run}};
  Call c = common_call(kOp, "cache", q_latent, cache, k_dim, rank, 1, block_tables, context_lens,
                       ancestors, options, out, lse);
  TreeAttentionArgs& a = c.args;
  a.k_scale = a.v_scale =
      cache_scale_of(kOp, "cache_scale", cache_scale, cache, 1, &a.k_scale_stride);
  const Tensor* pieces[2] = {&q_latent, &q_rope};
  for (int i = 0; i < 2; ++i) {
    a.q[i] = pieces[i]->data_ptr();
    a.q_dim[i] = pieces[i]->size(3);
    set_strides(*pieces[i], a.q_stride[i]);
  }
  a.k = a.v = cache.data_ptr();
  check_outputs_apart(kOp, {{"out", &out}, {"lse", &lse}},
                      {{"q_latent", &q_latent},
                       {"q_rope", &q_rope},
                       {"cache", &cache},
                       {"block_tables", &block_tables},
                       {"context_lens", &context_lens},
                       {"ancestors", &ancestors},
                       {"cache_scale", given(cache_scale)},
                       {"sinks", given(sinks)}});
  for (int i = 0; i < 2; ++i) a.k_stride[i] = a.v_stride[i] = cache.stride(i);
  attend(c);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("tree_attention_mla", TORCH_BOX(&tree_attention_mla));
}

}  // namespace spec_kernels

extern "C" __attribute__((visibility("default"))) int64_t
spec_kernels_attention_splits(int64_t context_len) {
  return spec_kernels::attention_splits(context_len);
}
