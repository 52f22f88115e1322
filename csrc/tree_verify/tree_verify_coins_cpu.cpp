#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/check.h"
#include "tree_verify/tree_verify_coins_args.h"

namespace spec_kernels {
namespace {

struct Chosen {
  int64_t token;  // -1: there is none
  int32_t status;
};

struct Outcome {
  int64_t depth = -1;  // no path
  int64_t token = 0;
  int32_t status = 0;
};

// Walks every request: `decide` finds a child of a node, `choose` names the token after the last
// one; both are given accessors of the request's tokens and links.
template <class Decide, class Choose>
void verify(const FlatTreeArgs& a, const Decide& decide, const Choose& choose) {
  const int64_t longest = std::min(a.num_columns, a.num_nodes);
  std::vector<int32_t> paths(static_cast<size_t>(a.batch * longest));
  std::vector<Outcome> outcomes(static_cast<size_t>(a.batch));
  torch::stable::parallel_for(0, a.batch, 1, [&](int64_t begin, int64_t last) {
    for (int64_t b = begin; b < last; ++b) {
      const auto tokens = [&](int64_t i) { return a.tokens(b, i); };
      const auto children = [&](int64_t i) { return a.first_child(b, i); };
      const auto siblings = [&](int64_t i) { return a.next_sibling(b, i); };
      const auto slots = [&](int64_t i) { return a.slots(b, i); };
      Outcome& outcome = outcomes[static_cast<size_t>(b)];
      if (slots(0) < 0 || slots(0) >= a.num_slots) {
        outcome.status = slots(0) < 0 ? 0 : kBadLink;
        continue;
      }
      const SlottedLinks<decltype(children), decltype(slots)> first_child{children, slots,
                                                                          a.num_nodes, a.num_slots};
      const SlottedLinks<decltype(siblings), decltype(slots)> next_sibling{
          siblings, slots, a.num_nodes, a.num_slots};
      int32_t* path = paths.data() + b * longest;
      path[0] = 0;
      const WalkEnd end = walk_path(
          a.num_columns,
          [&](int64_t node) { return decide(b, node, tokens, first_child, next_sibling); },
          [&](int64_t depth, int64_t child) { path[depth] = static_cast<int32_t>(child); });
      const Chosen chosen = choose(b, end, tokens, first_child, next_sibling);
      outcome = {end.depth, std::max<int64_t>(chosen.token, 0), end.status | chosen.status};
    }
  });
  // In the order of requests, so that slots which are not distinct mean the same for any threads.
  for (int64_t b = 0; b < a.batch; ++b) {
    const Outcome& outcome = outcomes[static_cast<size_t>(b)];
    const int32_t* path = paths.data() + b * longest;
    a.num_accepted.set(b, 0, std::max<int64_t>(outcome.depth, 0));
    a.status.set(b, 0, outcome.status);
    for (int64_t i = 0; i <= outcome.depth; ++i) {
      const int64_t slot = a.slots(b, path[i]);
      a.accept_index.set(b, i, slot);
      a.predictions.set(slot, 0, i < outcome.depth ? a.tokens(b, path[i + 1]) : outcome.token);
    }
  }
}

void tree_verify_choices(Tensor tokens, Tensor first_child, Tensor next_sibling, Tensor slots,
                         Tensor choices, Tensor predictions, Tensor accept_index,
                         Tensor num_accepted, Tensor status) {
  check_cpu("tree_verify_choices", "tokens", tokens);
  const TreeVerifyChoicesArgs a =
      tree_verify_choices_args(tokens, first_child, next_sibling, slots, choices, predictions,
                               accept_index, num_accepted, status);
  verify(
      a,
      [&](int64_t b, int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const int64_t token = a.choice(b, node);
        if (token < 0) return ChildSearch{-1, 0};
        return find_child(node, token, a.num_nodes, tokens, first, next);
      },
      [&](int64_t b, const WalkEnd& end, const auto&...) {
        const int64_t token = a.choice(b, end.node);
        return Chosen{token, token < 0 ? kNoToken : 0};
      });
}

// Weights of one row; kept from call to call, since a row is too large to be mapped anew each time.
struct Residual {
  std::vector<float> values;
  std::vector<uint64_t> sums;
  float greatest = 0.0f;

  void fill(const float* target, const float* draft, int64_t vocab) {
    values.resize(static_cast<size_t>(vocab));
    for (int64_t i = 0; i < vocab; ++i)
      values[static_cast<size_t>(i)] = positive(draft ? target[i] - draft[i] : target[i]);
  }

  bool any() {
    greatest = *std::max_element(values.begin(), values.end());
    return greatest > 0.0f;
  }

  int64_t sample(uint32_t coin) {
    const int64_t vocab = static_cast<int64_t>(values.size());
    const int64_t num_blocks = (vocab + kBlock - 1) / kBlock;
    const int32_t top = weight_exponent(greatest);
    sums.assign(static_cast<size_t>(num_blocks), 0);
    uint64_t total = 0;
    for (int64_t block = 0; block < num_blocks; ++block) {
      uint64_t sum = 0;
      const int64_t end = std::min(vocab, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; ++i)
        sum += residual_weight(values[static_cast<size_t>(i)], top);
      sums[static_cast<size_t>(block)] = sum;
      total += sum;
    }
    uint64_t below = coin_times(coin, total);
    size_t block = 0;
    for (; below >= sums[block]; ++block) below -= sums[block];
    int64_t id = static_cast<int64_t>(block) * kBlock;
    for (;; ++id) {
      const uint64_t weight = residual_weight(values[static_cast<size_t>(id)], top);
      if (below < weight) return id;
      below -= weight;
    }
  }
};

void tree_verify_coins(Tensor tokens, Tensor first_child, Tensor next_sibling, Tensor slots,
                       Tensor target_probs, std::optional<Tensor> draft_probs, Tensor coins,
                       Tensor final_coins, double threshold_single, double threshold_acc,
                       Tensor predictions, Tensor accept_index, Tensor num_accepted,
                       Tensor status) {
  check_cpu("tree_verify_coins", "tokens", tokens);
  const TreeVerifyCoinsArgs a = tree_verify_coins_args(
      tokens, first_child, next_sibling, slots, target_probs, draft_probs, coins, final_coins,
      threshold_single, threshold_acc, predictions, accept_index, num_accepted, status);
  verify(
      a,
      [&](int64_t b, int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const float* target = a.target_probs.at(b, node);
        return accept_by_coin(
            node, a.num_nodes, a.vocab, clamped_coin(*a.coins.at(b, node)), a.thresholds, tokens,
            [&](int64_t token) { return target[token]; }, first, next);
      },
      [&](int64_t b, const WalkEnd& end, const auto& tokens, const auto& first, const auto& next) {
        thread_local Residual residual;
        const float* target = a.target_probs.at(b, end.node);
        const float* draft =
            a.draft_probs.data && !end.full ? a.draft_probs.at(b, end.node) : nullptr;
        residual.fill(target, draft, a.vocab);
        if (!end.full) {
          Children<std::decay_t<decltype(first)>, std::decay_t<decltype(next)>> it(
              end.node, a.num_nodes, first, next);
          for (; !it.done(); it.next()) {
            const int64_t token = tokens(it.child());
            if (token >= 0 && token < a.vocab) residual.values[static_cast<size_t>(token)] = 0.0f;
          }
        }
        if (!residual.any()) {
          residual.fill(target, nullptr, a.vocab);
          if (!residual.any()) return Chosen{-1, kNoToken};
        }
        return Chosen{residual.sample(bits_of_coin(*a.final_coins.at(b))), 0};
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("tree_verify_choices", TORCH_BOX(&tree_verify_choices));
  m.impl("tree_verify_coins", TORCH_BOX(&tree_verify_coins));
}

}  // namespace spec_kernels
