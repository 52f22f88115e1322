#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "common/check.h"
#include "tree_verify/tree_verify.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_verify";
constexpr float kLowest = -std::numeric_limits<float>::infinity();
// A row is cut into chunks of fixed size for threads; a multiple of kBlock.
constexpr int64_t kChunk = 32768;
constexpr int64_t kBlocksPerChunk = kChunk / kBlock;
// Most nuclei are smaller than this, and cheap to find among the best values.
constexpr int64_t kSmallNucleus = 128;

struct Parameters {
  float temperature = 0.0f;
  int64_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
};

// Working memory of one thread, kept from call to call: a row is too large to be mapped anew each
// time.
struct Scratch {
  std::vector<float> values, block_max, sorted_max;
  std::vector<uint64_t> sums, histograms;
  std::vector<Candidate> candidates;
  DraftRow drafts;
};

bool better(const Candidate& x, const Candidate& y) {
  return x.value != y.value ? x.value > y.value : x.id < y.id;
}

template <class F>
void for_chunks(int64_t size, int64_t chunk, const F& f) {
  torch::stable::parallel_for(0, (size + chunk - 1) / chunk, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c, c * chunk, std::min(size, (c + 1) * chunk));
  });
}

int64_t choose_greedy(const Row& row) {
  const auto kernel = SK_KERNEL(row_argmax);
  Best found[kMaxVocab / kChunk];
  for_chunks(row.vocab, kChunk,
             [&](int64_t c, int64_t begin, int64_t end) { found[c] = kernel(row, begin, end); });
  Best best = found[0];
  for (int64_t c = 1; c * kChunk < row.vocab; ++c) {
    if (found[c].value > best.value) best = found[c];
  }
  return best.value == kLowest ? -1 : best.id;
}

// The target's distribution at one node, over values that stand in `scratch`, and q beside it: the
// `row` of accept_by_draft.
class Sampler {
 public:
  Sampler(const Row& row, Scratch& scratch)
      : row_(row), s_(scratch), num_blocks_((row.vocab + kBlock - 1) / kBlock) {}

  // False when there is no token to choose.
  bool weigh(const Parameters& p) {
    prepare();
    if (w_.greatest == kLowest) return false;
    w_.inverse_temperature = std::min(std::max(1.0f / p.temperature, FLT_MIN), FLT_MAX);
    const bool top_k = p.top_k > 0 && p.top_k < row_.vocab;
    if (top_k) cut_top_k(p.top_k);
    if (p.top_p < 1.0f) {
      if (top_k) {
        cut_top_p_of_candidates(p.top_p);
      } else {
        cut_top_p(p.top_p);
      }
    }
    w_.min_p = p.min_p;
    total_ = sum_weights();
    return true;
  }

  int64_t draw(uint32_t coin) const {
    uint64_t below = coin_times(coin, total_);
    int64_t block = 0;
    for (; below >= s_.sums[static_cast<size_t>(block)]; ++block)
      below -= s_.sums[static_cast<size_t>(block)];
    return SK_KERNEL(find_in_block)(w_, block, below);
  }

  // False when q has an unsound entry.
  bool weigh_drafts(const void* probs, Float dtype) {
    DraftRow& q = s_.drafts;
    q.probs = probs;
    q.vocab = row_.vocab;
    q.dtype = dtype;
    q.num_rejected = 0;
    const auto kernel = SK_KERNEL(draft_sum);
    uint64_t sums[kMaxVocab / kChunk] = {};
    bool sound[kMaxVocab / kChunk];
    for_chunks(q.vocab, kChunk, [&](int64_t c, int64_t begin, int64_t end) {
      sums[c] = kernel(q, begin, end, &sound[c]);
    });
    bool all_sound = true;
    draft_total_ = 0;
    for (int64_t c = 0; c * kChunk < q.vocab; ++c) {
      draft_total_ += sums[c];
      all_sound &= sound[c];
    }
    return all_sound;
  }

  uint64_t weight(int64_t id) const { return SK_KERNEL(weight_of)(w_, id); }
  uint64_t weight_total() const { return total_; }

  uint64_t draft(int64_t id) const {
    const DraftRow& q = s_.drafts;
    for (int r = 0; r < q.num_rejected; ++r) {
      if (q.token[r] == id) return 0;
    }
    float probability;
    if (q.dtype == Float::kBf16) {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(q.probs)[id]} << 16;
      std::memcpy(&probability, &bits, sizeof(bits));
    } else {
      probability = static_cast<const float*>(q.probs)[id];
    }
    return is_sound_draft(probability) ? draft_weight(probability) : 0;
  }
  uint64_t draft_total() const { return draft_total_; }

  void reject(int64_t id, Ratio ratio) {
    DraftRow& q = s_.drafts;
    draft_total_ -= draft(id);
    q.token[q.num_rejected] = id;
    q.ratio[q.num_rejected++] = ratio;
    w_.rejected = &q;
    total_ = sum_weights();
  }

  bool any_rejected() const { return w_.rejected != nullptr; }

  // What a draft's weight must exceed for typical acceptance.
  double limit(double epsilon, double delta) const {
    const auto kernel = SK_KERNEL(surprise);
    uint64_t sums[kMaxVocab / kChunk] = {};
    for_chunks(num_blocks_, kBlocksPerChunk,
               [&](int64_t c, int64_t begin, int64_t end) { sums[c] = kernel(w_, begin, end); });
    uint64_t sum = 0;
    for (const uint64_t part : sums) sum += part;
    const float mean = static_cast<float>(static_cast<double>(sum) / static_cast<double>(total_));
    return typical_limit(total_, SK_KERNEL(exp_of)(-mean), epsilon, delta);
  }

 private:
  void prepare() {
    s_.values.resize(static_cast<size_t>(num_blocks_ * kBlock));
    s_.block_max.resize(static_cast<size_t>(num_blocks_));
    s_.sums.resize(static_cast<size_t>(num_blocks_));
    float* values = s_.values.data();
    float* block_max = s_.block_max.data();
    const auto kernel = SK_KERNEL(row_values);
    for_chunks(num_blocks_, kBlocksPerChunk, [&](int64_t, int64_t begin, int64_t end) {
      kernel(row_, begin, end, values, block_max);
    });
    w_.values = values;
    w_.block_max = block_max;
    w_.greatest = *std::max_element(s_.block_max.begin(), s_.block_max.end());
    w_.cut = {kLowest, row_.vocab};
    w_.rejected = nullptr;
  }

  uint64_t sum_weights() {
    const auto kernel = SK_KERNEL(block_weights);
    for_chunks(num_blocks_, kBlocksPerChunk, [&](int64_t, int64_t begin, int64_t end) {
      kernel(w_, begin, end, s_.sums.data());
    });
    uint64_t total = 0;
    for (const uint64_t sum : s_.sums) total += sum;
    return total;
  }

  // Collects at least the `count` best values (all finite ones if there are fewer): the count-th
  // greatest block maximum is a lower bound of the count-th greatest value. Returns false when
  // every value > -inf was collected.
  bool gather(int64_t count) {
    float bound = kLowest;
    if (count <= num_blocks_) {
      s_.sorted_max = s_.block_max;
      std::nth_element(s_.sorted_max.begin(), s_.sorted_max.begin() + (count - 1),
                       s_.sorted_max.end(), [](float x, float y) { return x > y; });
      bound = s_.sorted_max[static_cast<size_t>(count - 1)];
    }
    s_.candidates.clear();
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (s_.block_max[static_cast<size_t>(block)] < bound) continue;
      for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
        const float v = s_.values[static_cast<size_t>(i)];
        if (v >= bound && v > kLowest) s_.candidates.push_back({0, v, static_cast<int32_t>(i)});
      }
    }
    return bound > kLowest;
  }

  // Leaves the k best in candidates and cuts off the rest; ties to the lower id.
  void cut_top_k(int64_t k) {
    const bool more = gather(k);
    if (!more && static_cast<int64_t>(s_.candidates.size()) <= k) return;
    std::nth_element(s_.candidates.begin(), s_.candidates.begin() + (k - 1), s_.candidates.end(),
                     better);
    s_.candidates.resize(static_cast<size_t>(k));
    w_.cut = {s_.candidates.back().value, s_.candidates.back().id};
  }

  uint64_t weigh_candidates() {
    SK_KERNEL(candidate_weights)
    (w_, s_.candidates.data(), static_cast<int64_t>(s_.candidates.size()));
    uint64_t total = 0;
    for (const Candidate& c : s_.candidates) total += c.weight;
    return total;
  }

  // The mass that a nucleus must reach. Rounding may put it above the total: then all are kept.
  static uint64_t share(float top_p, uint64_t total) {
    const double mass = std::ceil(static_cast<double>(top_p) * static_cast<double>(total));
    return std::max<uint64_t>(1, static_cast<uint64_t>(mass));
  }

  // top-p among the candidates that top-k left.
  void cut_top_p_of_candidates(float top_p) {
    const uint64_t total = weigh_candidates();
    cut_where_reached(0, share(top_p, total));
  }

  // top-p among all values.
  void cut_top_p(float top_p) {
    const uint64_t enough = share(top_p, sum_weights());
    gather(kSmallNucleus);
    if (weigh_candidates() >= enough) {
      cut_where_reached(0, enough);
      return;
    }
    // A histogram names the bin in which the mass is reached; only that bin is put in order.
    const int64_t num_chunks = (num_blocks_ + kBlocksPerChunk - 1) / kBlocksPerChunk;
    s_.histograms.assign(static_cast<size_t>(num_chunks * kNumBins), 0);
    const auto histogram = SK_KERNEL(weight_histogram);
    for_chunks(num_blocks_, kBlocksPerChunk, [&](int64_t c, int64_t begin, int64_t end) {
      histogram(w_, begin, end, s_.histograms.data() + c * kNumBins);
    });
    uint64_t* mass = s_.histograms.data();
    for (int64_t i = kNumBins; i < num_chunks * kNumBins; ++i) mass[i % kNumBins] += mass[i];
    int32_t bin = 0;
    uint64_t before = 0;
    for (; before + mass[bin] < enough; ++bin) {
      if (bin + 1 == kNumBins) return;  // rounding put `enough` above the total: all are kept
      before += mass[bin];
    }
    const auto gather = SK_KERNEL(gather_bin);
    size_t found = 0;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      if (s_.candidates.size() < found + kBlock) s_.candidates.resize(2 * (found + kBlock));
      found += static_cast<size_t>(gather(w_, block, bin, s_.candidates.data() + found));
    }
    s_.candidates.resize(found);
    weigh_candidates();
    cut_where_reached(before, enough);
  }

  // Cuts after the first candidate, best first, at which the mass, `before` included, reaches
  // `enough`.
  void cut_where_reached(uint64_t before, uint64_t enough) {
    std::vector<Candidate>& c = s_.candidates;
    auto low = c.begin();
    auto high = c.end();
    while (high - low > 32) {
      const auto middle = low + (high - low) / 2;
      std::nth_element(low, middle, high, better);
      uint64_t mass = before;
      for (auto it = low; it != middle; ++it) mass += it->weight;
      if (mass >= enough) {
        high = middle;
      } else {
        before = mass;
        low = middle;
      }
    }
    std::sort(low, high, better);
    for (; low + 1 < high && before + low->weight < enough; ++low) before += low->weight;
    w_.cut = {low->value, low->id};
  }

  const Row& row_;
  Scratch& s_;
  int64_t num_blocks_;
  Weights w_{};
  uint64_t total_ = 0, draft_total_ = 0;
};

void tree_verify(Tensor logits, Tensor tokens, Tensor first_child, Tensor next_sibling,
                 Tensor context_lens, std::optional<Tensor> temperature,
                 std::optional<Tensor> top_k, std::optional<Tensor> top_p,
                 std::optional<Tensor> min_p, std::optional<Tensor> seeds,
                 std::optional<Tensor> logit_bias, std::optional<Tensor> allowed,
                 std::optional<Tensor> draft_probs, double typical_epsilon, double typical_delta,
                 Tensor accept_index, Tensor num_accepted, Tensor out_tokens, Tensor status) {
  check_cpu(kOp, "logits", logits);
  check_float(kOp, "logits", logits);
  check_shape(kOp, "logits", logits, {-1, -1, -1});
  check_last_dim(kOp, "logits", logits);
  const int64_t batch = logits.size(0);
  const int64_t num_nodes = logits.size(1);
  const int64_t vocab = logits.size(2);
  SK_CHECK(num_nodes >= 1 && num_nodes <= kMaxNodes && vocab >= 1 && vocab <= kMaxVocab, kOp,
           "logits",
           "1 to " + std::to_string(kMaxNodes) + " nodes and 1 to " + std::to_string(kMaxVocab) +
               " tokens",
           shape_string(logits));
  const auto check_ints = [&](const char* name, const Tensor& t,
                              std::initializer_list<int64_t> shape) {
    check_cpu(kOp, name, t);
    check_int(kOp, name, t);
    check_shape(kOp, name, t, shape);
  };
  const auto check_typed = [&](const char* name, const Tensor& t, ScalarType type,
                               std::initializer_list<int64_t> shape) {
    check_cpu(kOp, name, t);
    check_dtype(kOp, name, t, type);
    check_shape(kOp, name, t, shape);
  };
  check_ints("tokens", tokens, {batch, num_nodes});
  check_ints("first_child", first_child, {batch, num_nodes});
  check_ints("next_sibling", next_sibling, {batch, num_nodes});
  check_ints("context_lens", context_lens, {batch});
  if (temperature) {
    check_typed("temperature", *temperature, ScalarType::Float, {batch});
    SK_CHECK(seeds.has_value(), kOp, "seeds", "one seed for each request when temperature is given",
             "None");
  }
  if (top_k) check_ints("top_k", *top_k, {batch});
  if (top_p) check_typed("top_p", *top_p, ScalarType::Float, {batch});
  if (min_p) check_typed("min_p", *min_p, ScalarType::Float, {batch});
  if (seeds) check_typed("seeds", *seeds, ScalarType::Long, {batch});
  if (logit_bias) {
    check_typed("logit_bias", *logit_bias, ScalarType::Float, {batch, vocab});
    check_last_dim(kOp, "logit_bias", *logit_bias);
  }
  if (allowed) {
    check_typed("allowed", *allowed, ScalarType::Int, {batch, num_nodes, (vocab + 31) / 32});
    check_last_dim(kOp, "allowed", *allowed);
  }
  if (draft_probs) {
    check_cpu(kOp, "draft_probs", *draft_probs);
    check_float(kOp, "draft_probs", *draft_probs);
    check_shape(kOp, "draft_probs", *draft_probs, {batch, num_nodes, vocab});
    check_last_dim(kOp, "draft_probs", *draft_probs);
  }
  const bool typical = typical_epsilon != 0.0 || typical_delta != 0.0;
  if (typical) {
    SK_CHECK(typical_epsilon > 0.0 && typical_epsilon <= 1.0, kOp, "typical_epsilon",
             "a number in (0, 1]", typical_epsilon);
    SK_CHECK(typical_delta > 0.0 && typical_delta <= DBL_MAX, kOp, "typical_delta",
             "a finite number > 0", typical_delta);
    SK_CHECK(!draft_probs, kOp, "draft_probs", "none beside typical acceptance", "a tensor");
  }
  check_ints("accept_index", accept_index, {batch, -1});
  const int64_t num_columns = accept_index.size(1);
  SK_CHECK(num_columns >= 1, kOp, "accept_index", "at least one column",
           shape_string(accept_index));
  check_ints("num_accepted", num_accepted, {batch});
  check_ints("out_tokens", out_tokens, {batch, num_columns});
  check_ints("status", status, {batch});
  const auto given = [](const std::optional<Tensor>& t) { return t ? &*t : nullptr; };
  check_outputs_apart(kOp,
                      {{"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"out_tokens", &out_tokens},
                       {"status", &status}},
                      {{"logits", &logits},
                       {"tokens", &tokens},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"context_lens", &context_lens},
                       {"temperature", given(temperature)},
                       {"top_k", given(top_k)},
                       {"top_p", given(top_p)},
                       {"min_p", given(min_p)},
                       {"seeds", given(seeds)},
                       {"logit_bias", given(logit_bias)},
                       {"allowed", given(allowed)},
                       {"draft_probs", given(draft_probs)}});

  const IntMatrix lengths(context_lens);
  const auto float_at = [](const std::optional<Tensor>& t, int64_t b, float otherwise) {
    return t ? static_cast<const float*>(t->data_ptr())[b * t->stride(0)] : otherwise;
  };
  const auto int_at = [](const std::optional<Tensor>& t, int64_t b) {
    return t ? IntMatrix(*t)(b) : 0;
  };
  std::vector<Parameters> parameters(static_cast<size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    if (lengths(b) < 0) continue;
    Parameters& p = parameters[static_cast<size_t>(b)];
    p.temperature = float_at(temperature, b, 0.0f);
    p.top_k = int_at(top_k, b);
    p.top_p = float_at(top_p, b, 1.0f);
    p.min_p = float_at(min_p, b, 0.0f);
    p.seed = static_cast<uint64_t>(int_at(seeds, b));
    SK_CHECK(p.temperature >= 0.0f && p.temperature <= FLT_MAX, kOp, "temperature",
             "finite values >= 0", p.temperature);
    SK_CHECK(p.top_p >= 0.0f, kOp, "top_p", "values >= 0", p.top_p);
    SK_CHECK(p.min_p <= 1.0f, kOp, "min_p", "values <= 1", p.min_p);
  }

  const IntMatrix token_of(tokens), child_of(first_child), sibling_of(next_sibling);
  const MutableIntMatrix path(accept_index), count(num_accepted), emitted(out_tokens),
      flags(status);
  const Float dtype = float_kind(logits.scalar_type());
  const auto row_at = [&](int64_t b, int64_t node) {
    Row row{};
    row.logits = static_cast<const char*>(logits.data_ptr()) +
                 (b * logits.stride(0) + node * logits.stride(1)) * float_size(dtype);
    if (logit_bias)
      row.bias = static_cast<const float*>(logit_bias->data_ptr()) + b * logit_bias->stride(0);
    if (allowed) {
      row.allowed = static_cast<const uint32_t*>(allowed->data_ptr()) + b * allowed->stride(0) +
                    node * allowed->stride(1);
    }
    row.vocab = vocab;
    row.dtype = dtype;
    return row;
  };
  const auto draft_row_at = [&](int64_t b, int64_t node) -> const void* {
    return static_cast<const char*>(draft_probs->data_ptr()) +
           (b * draft_probs->stride(0) + node * draft_probs->stride(1)) *
               float_size(float_kind(draft_probs->scalar_type()));
  };
  const auto walk = [&](int64_t b) {
    thread_local Scratch scratch;
    const Parameters& p = parameters[static_cast<size_t>(b)];
    const auto tokens_at = [&](int64_t i) { return token_of(b, i); };
    const auto child_at = [&](int64_t i) { return child_of(b, i); };
    const auto sibling_at = [&](int64_t i) { return sibling_of(b, i); };
    int32_t bits = 0;
    int64_t node = 0;
    int64_t depth = 0;
    path.set(b, 0, 0);
    for (;;) {
      const Row row = row_at(b, node);
      const uint64_t position =
          static_cast<uint64_t>(lengths(b)) + static_cast<uint64_t>(depth) + 1;
      const bool room = depth + 1 < num_columns;
      ChildSearch found = {-1, 0};
      int64_t token = -1;
      const auto follow = [&](int64_t chosen) {
        token = chosen;
        if (room && token >= 0)
          found = find_child(node, token, num_nodes, tokens_at, child_at, sibling_at);
      };
      Sampler sampler(row, scratch);
      if (p.temperature == 0.0f) {
        follow(choose_greedy(row));
      } else if (sampler.weigh(p)) {
        const bool has_child = room && !Children(node, num_nodes, child_at, sibling_at).done();
        if (has_child && draft_probs) {
          const Float kind = float_kind(draft_probs->scalar_type());
          if (!sampler.weigh_drafts(draft_row_at(b, node), kind)) bits |= kBadDraft;
          found = accept_by_draft(node, num_nodes, vocab, p.seed, position, tokens_at, child_at,
                                  sibling_at, sampler);
        } else if (has_child && typical) {
          found = accept_typical(node, num_nodes, vocab,
                                 sampler.limit(typical_epsilon, typical_delta), tokens_at, child_at,
                                 sibling_at, [&](int64_t id) { return sampler.weight(id); });
        } else {
          follow(sampler.draw(coin_bits(p.seed, position, kSample)));
        }
        if (found.child >= 0) {
          token = token_of(b, found.child);
        } else if (token < 0) {
          // As long as nothing was rejected the distribution is the target's own, and so is the
          // choice.
          const Purpose purpose = sampler.any_rejected() ? kResidual : kSample;
          token = sampler.draw(coin_bits(p.seed, position, purpose));
        }
      }
      emitted.set(b, depth, std::max<int64_t>(token, 0));
      if (token < 0) bits |= kNoToken;
      bits |= found.status;
      if (found.child < 0) break;
      node = found.child;
      ++depth;
      path.set(b, depth, node);
    }
    count.set(b, 0, depth);
    flags.set(b, 0, bits);
  };
  // One request at a time per thread; a lone request leaves the threads to the chunks of its rows.
  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t i = 0; i < num_columns; ++i) {
        path.set(b, i, -1);
        emitted.set(b, i, -1);
      }
      count.set(b, 0, 0);
      flags.set(b, 0, 0);
      if (lengths(b) >= 0) walk(b);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("tree_verify", TORCH_BOX(&tree_verify)); }

}  // namespace spec_kernels
