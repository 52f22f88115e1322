#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "common/indexed.h"
#include "draft_sample/draft_sample_args.h"
#include "tree_verify/tree_verify_cpu.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "draft_sample";
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Scratch : RowScratch {
  std::vector<float> q;
  std::vector<int64_t> ids;
};

// One row of one request.
class Drafter {
 public:
  Drafter(const DraftSampleArgs& args, int64_t request, int64_t row, Scratch& scratch)
      : a_(args), b_(request), p_(row), s_(scratch) {}

  void run() {
    const Row row = {a_.logits.at(b_, p_), nullptr, nullptr, a_.vocab, a_.dtype};
    w_ = read_row(row, s_);
    find_likeliest();
    if (a_.draws(b_)) {
      draw();
    } else {
      take_likeliest();
    }
  }

 private:
  // The best ids in s_.ids, best first, ties to the lower id; -inf comes last.
  void find_likeliest() {
    const size_t wanted = static_cast<size_t>(a_.num_drafts);
    std::vector<Candidate>& best = s_.candidates;
    gather_best(a_.num_drafts, s_);
    const size_t found = std::min(wanted, best.size());
    std::partial_sort(best.begin(), best.begin() + static_cast<int64_t>(found), best.end(), better);
    s_.ids.clear();
    for (size_t i = 0; i < found; ++i) s_.ids.push_back(best[i].id);
    for (int64_t id = 0; s_.ids.size() < wanted; ++id) {
      if (s_.values[static_cast<size_t>(id)] == kLowest) s_.ids.push_back(id);
    }
  }

  void put(int64_t draft, int64_t id, float confidence) const {
    a_.tokens(b_, p_, draft) = a_.target_id(id);
    a_.confidence(b_, p_, draft) = confidence;
  }

  void take_likeliest() {
    const float inverse = weigh(1.0f);
    for (int64_t i = 0; i < a_.num_drafts; ++i) {
      const int64_t id = s_.ids[static_cast<size_t>(i)];
      const bool is_value = s_.values[static_cast<size_t>(id)] > kLowest;
      put(i, id, is_value ? s_.q[static_cast<size_t>(id)] * inverse : 0.0f);
    }
  }

  // Leaves the weights in s_.q; returns what brings their sum to 1, and 0 where there is no value.
  float weigh(float temperature) {
    s_.q.resize(s_.values.size());
    s_.sums.resize(static_cast<size_t>(s_.num_blocks()));
    if (w_.greatest == kLowest) {
      std::fill(s_.q.begin(), s_.q.end(), 0.0f);
      return 0.0f;
    }
    w_.inverse_temperature = inverse_temperature(temperature);
    const auto kernel = SK_KERNEL(drafter_weights);
    float* weights = s_.q.data();
    uint64_t* sums = s_.sums.data();
    for_chunks(s_.num_blocks(), kBlocksPerChunk,
               [&](int64_t, int64_t begin, int64_t end) { kernel(w_, begin, end, weights, sums); });
    return inverse_total(sum_of_blocks());
  }

  uint64_t sum_of_blocks() const {
    uint64_t total = 0;
    for (const uint64_t sum : s_.sums) total += sum;
    return total;
  }

  // Leaves q in s_.q, its weights in s_.sums and q at the target ids in probs; returns the sum of
  // the weights.
  uint64_t find_q() {
    const float inverse = weigh(a_.temperature.at_or(b_, 1.0f));
    const auto kernel = SK_KERNEL(drafter_probs);
    float* q = s_.q.data();
    uint64_t* sums = s_.sums.data();
    for_chunks(s_.num_blocks(), kBlocksPerChunk,
               [&](int64_t, int64_t begin, int64_t end) { kernel(inverse, begin, end, q, sums); });
    float* probs = a_.probs.at(b_, p_);
    if (a_.target_ids) {
      for (int64_t id = 0; id < a_.vocab; ++id) probs[a_.target_id(id)] = q[id];
    } else {
      std::copy_n(q, a_.vocab, probs);
    }
    return sum_of_blocks();
  }

  // The id that the coin picks of what is left.
  int64_t pick(uint32_t coin, uint64_t total) const {
    if (total == 0) return a_.vocab - 1;
    uint64_t below = draft_below(coin, total);
    int64_t block = 0;
    for (; below >= s_.sums[static_cast<size_t>(block)]; ++block)
      below -= s_.sums[static_cast<size_t>(block)];
    return SK_KERNEL(find_draft)(s_.q.data(), block, below);
  }

  void draw() {
    uint64_t total = find_q();
    size_t best = 0;  // the first of s_.ids that was not drawn; what was drawn has q = 0 from then
    for (int64_t i = 0; i < a_.num_drafts; ++i) {
      while (best < s_.ids.size() && s_.q[static_cast<size_t>(s_.ids[best])] == 0.0f) ++best;
      const float greatest = best < s_.ids.size() ? s_.q[static_cast<size_t>(s_.ids[best])] : 0.0f;
      const int64_t id = pick(a_.coin(b_, i), total);
      put(i, id, greatest);
      float& q = s_.q[static_cast<size_t>(id)];
      const uint64_t weight = draft_weight(q);
      total -= weight;
      s_.sums[static_cast<size_t>(id / kBlock)] -= weight;
      q = 0.0f;
    }
  }

  const DraftSampleArgs& a_;
  const int64_t b_, p_;
  Scratch& s_;
  Weights w_{};
};

// Raises before anything is written.
void check_values(const DraftSampleArgs& a) {
  bool any_draws = false;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (a.context_lens(b) < 0) continue;
    const float temperature = a.temperature.at_or(b, 0.0f);
    SK_CHECK(is_temperature(temperature), kOp, indexed("temperature", b).c_str(),
             "a finite number >= 0", temperature);
    any_draws |= a.draws(b);
  }
  if (!any_draws || !a.target_ids) return;
  uint64_t outside = 0;  // its sign bit, of any
  const uint64_t last = static_cast<uint64_t>(a.num_ids) - 1;
  for (int64_t id = 0; id < a.vocab; ++id) {
    const uint64_t target = static_cast<uint64_t>(a.target_id(id));
    outside |= target | (last - target);
  }
  if (outside >> 63 == 0) return;
  for (int64_t id = 0; id < a.vocab; ++id) {
    const int64_t target = a.target_id(id);
    SK_CHECK(target >= 0 && target < a.num_ids, kOp, indexed("target_ids", id).c_str(),
             "0 <= id < " + std::to_string(a.num_ids), target);
  }
}

void draft_sample(Tensor logits, std::optional<Tensor> target_ids, Tensor context_lens,
                  int64_t depth, std::optional<Tensor> temperature, std::optional<Tensor> seeds,
                  Tensor tokens, Tensor confidence, std::optional<Tensor> probs) {
  check_cpu(kOp, "logits", logits);
  const DraftSampleArgs a = draft_sample_args(kOp, logits, target_ids, context_lens, depth,
                                              temperature, seeds, tokens, confidence, probs);
  if (tokens.numel() == 0) return;
  check_values(a);
  // A lone row leaves the threads to its chunks.
  torch::stable::parallel_for(0, a.batch * a.num_rows, 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / a.num_rows, p = i % a.num_rows;
      if (a.context_lens(b) >= 0) {
        Drafter(a, b, p, scratch).run();
        continue;
      }
      for (int64_t k = 0; k < a.num_drafts; ++k) {
        a.tokens(b, p, k) = 0;
        a.confidence(b, p, k) = 0.0f;
      }
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("draft_sample", TORCH_BOX(&draft_sample));
}

}  // namespace spec_kernels
