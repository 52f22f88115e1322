#include "tree_verify/tree_verify_cpu.h"

#include <torch/csrc/stable/library.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_verify";
constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Most nuclei are smaller than this, and cheap to find among the best values.
constexpr int64_t kSmallNucleus = 128;

struct Scratch : RowScratch {
  std::vector<uint64_t> histograms;
  DraftRow drafts;
};

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
  Sampler(const TreeVerifyArgs& args, int64_t request, const Parameters& parameters,
          Scratch& scratch)
      : args_(args),
        request_(request),
        p_(parameters),
        s_(scratch),
        num_blocks_((args.vocab + kBlock - 1) / kBlock) {}

  void move_to(int64_t node) {
    row_.logits = args_.logits.at(request_, node);
    row_.bias = static_cast<const float*>(args_.bias.at(request_, node));
    row_.allowed = static_cast<const uint32_t*>(args_.allowed.at(request_, node));
    row_.vocab = args_.vocab;
    row_.dtype = args_.dtype;
    s_.drafts.probs = args_.draft_probs.at(request_, node);
    w_.rejected = nullptr;
  }

  int64_t greedy() const { return choose_greedy(row_); }

  // False when there is no token to choose.
  bool weigh() {
    const Parameters& p = p_;
    w_ = read_row(row_, s_);
    if (w_.greatest == kLowest) return false;
    w_.inverse_temperature = inverse_temperature(p.temperature);
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
    total_ = sum_weights(w_, s_);
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
  bool weigh_drafts() {
    DraftRow& q = s_.drafts;
    q.vocab = row_.vocab;
    q.dtype = args_.draft_dtype;
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
    total_ = sum_weights(w_, s_);
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
  // Leaves the k best in candidates and cuts off the rest; ties to the lower id.
  void cut_top_k(int64_t k) {
    const bool more = gather_best(k, s_);
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

  // top-p among the candidates that top-k left.
  void cut_top_p_of_candidates(float top_p) {
    const uint64_t total = weigh_candidates();
    cut_where_reached(0, nucleus_mass(top_p, total));
  }

  // top-p among all values.
  void cut_top_p(float top_p) {
    const uint64_t enough = nucleus_mass(top_p, sum_weights(w_, s_));
    gather_best(kSmallNucleus, s_);
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

  const TreeVerifyArgs& args_;
  int64_t request_;
  const Parameters& p_;
  Scratch& s_;
  Row row_{};
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
  const TreeVerifyArgs args = tree_verify_args(
      kOp, logits, tokens, first_child, next_sibling, context_lens, temperature, top_k, top_p,
      min_p, seeds, logit_bias, allowed, draft_probs, typical_epsilon, typical_delta, accept_index,
      num_accepted, out_tokens, status);
  tree_verify_on_cpu(kOp, args);
}

}  // namespace

Weights read_row(const Row& row, RowScratch& scratch) {
  const int64_t num_blocks = (row.vocab + kBlock - 1) / kBlock;
  scratch.values.resize(static_cast<size_t>(num_blocks * kBlock));
  scratch.block_max.resize(static_cast<size_t>(num_blocks));
  float* values = scratch.values.data();
  float* block_max = scratch.block_max.data();
  const auto kernel = SK_KERNEL(row_values);
  for_chunks(num_blocks, kBlocksPerChunk, [&](int64_t, int64_t begin, int64_t end) {
    kernel(row, begin, end, values, block_max);
  });
  Weights w{};
  w.values = values;
  w.block_max = block_max;
  w.greatest = *std::max_element(scratch.block_max.begin(), scratch.block_max.end());
  w.cut = {kLowest, row.vocab};
  return w;
}

uint64_t sum_weights(const Weights& w, RowScratch& scratch) {
  scratch.sums.resize(scratch.block_max.size());
  const auto kernel = SK_KERNEL(block_weights);
  for_chunks(scratch.num_blocks(), kBlocksPerChunk, [&](int64_t, int64_t begin, int64_t end) {
    kernel(w, begin, end, scratch.sums.data());
  });
  uint64_t total = 0;
  for (const uint64_t sum : scratch.sums) total += sum;
  return total;
}

bool gather_best(int64_t count, RowScratch& scratch) {
  const int64_t num_blocks = scratch.num_blocks();
  float bound = kLowest;
  if (count <= num_blocks) {
    // The count-th greatest block maximum is a lower bound of the count-th greatest value.
    std::vector<float>& sorted = scratch.sorted_max;
    sorted = scratch.block_max;
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end(),
                     [](float x, float y) { return x > y; });
    bound = sorted[static_cast<size_t>(count - 1)];
  }
  scratch.candidates.clear();
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (scratch.block_max[static_cast<size_t>(block)] < bound) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      const float v = scratch.values[static_cast<size_t>(i)];
      if (v >= bound && v > kLowest) scratch.candidates.push_back({0, v, static_cast<int32_t>(i)});
    }
  }
  return bound > kLowest;
}

void tree_verify_on_cpu(const char* op, const TreeVerifyArgs& args) {
  std::vector<Parameters> parameters(static_cast<size_t>(args.batch));
  for (int64_t b = 0; b < args.batch; ++b) {
    if (args.context_lens(b) < 0) continue;
    Parameters& p = parameters[static_cast<size_t>(b)];
    p = args.parameters(b);
    const BadParameter bad = out_of_range(p);
    if (bad != BadParameter::kNone) refuse(op, bad, value_of(p, bad));
  }
  const auto walk = [&](int64_t b) {
    thread_local Scratch scratch;
    const Parameters& p = parameters[static_cast<size_t>(b)];
    Sampler sampler(args, b, p, scratch);
    const Walked walked = walk_tree(
        args.rules(b, p), [&](int64_t i) { return args.tokens(b, i); },
        [&](int64_t i) { return args.first_child(b, i); },
        [&](int64_t i) { return args.next_sibling(b, i); }, sampler,
        [&](int64_t node) { sampler.move_to(node); },
        [&](int64_t depth, int64_t node, int64_t token) {
          args.accept_index.set(b, depth, node);
          args.out_tokens.set(b, depth, token);
        });
    args.num_accepted.set(b, 0, walked.depth);
    args.status.set(b, 0, walked.status);
  };
  // One request at a time per thread; a lone request leaves the threads to the chunks of its rows.
  torch::stable::parallel_for(0, args.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t i = 0; i < args.num_columns; ++i) {
        args.accept_index.set(b, i, -1);
        args.out_tokens.set(b, i, -1);
      }
      args.num_accepted.set(b, 0, 0);
      args.status.set(b, 0, 0);
      if (args.context_lens(b) >= 0) walk(b);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("tree_verify", TORCH_BOX(&tree_verify)); }

}  // namespace spec_kernels
