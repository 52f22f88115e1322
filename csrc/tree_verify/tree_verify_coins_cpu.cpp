#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "common/check.h"
#include "tree_verify/tree_verify_coins.h"

namespace spec_kernels {
namespace {

constexpr char kChoices[] = "tree_verify_choices";
constexpr char kCoins[] = "tree_verify_coins";

// The arguments that both ops share.
struct Flat {
  const Tensor &tokens, &first_child, &next_sibling, &slots;
  const Tensor &predictions, &accept_index, &num_accepted, &status;

  void check(const char* op) const {
    const auto check_ints = [op](const char* name, const Tensor& t,
                                 std::initializer_list<int64_t> shape) {
      check_cpu(op, name, t);
      check_int(op, name, t);
      check_shape(op, name, t, shape);
    };
    check_ints("tokens", tokens, {-1, -1});
    const int64_t batch = tokens.size(0);
    const int64_t num_nodes = tokens.size(1);
    SK_CHECK(num_nodes >= 1 && num_nodes <= kMaxNodes, op, "tokens",
             "1 to " + std::to_string(kMaxNodes) + " nodes", shape_string(tokens));
    check_ints("first_child", first_child, {batch, num_nodes});
    check_ints("next_sibling", next_sibling, {batch, num_nodes});
    check_ints("slots", slots, {batch, num_nodes});
    check_ints("predictions", predictions, {-1});
    check_ints("accept_index", accept_index, {batch, -1});
    SK_CHECK(accept_index.size(1) >= 1, op, "accept_index", "at least one column",
             shape_string(accept_index));
    SK_CHECK(
        accept_index.scalar_type() == ScalarType::Long || predictions.size(0) <= int64_t{1} << 31,
        op, "accept_index", "int64 for so many slots", "int32");
    check_ints("num_accepted", num_accepted, {batch});
    check_ints("status", status, {batch});
  }
};

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
void verify(const Flat& f, const Decide& decide, const Choose& choose) {
  const int64_t batch = f.tokens.size(0);
  const int64_t num_nodes = f.tokens.size(1);
  const int64_t num_slots = f.predictions.size(0);
  const int64_t room = f.accept_index.size(1);
  const int64_t longest = std::min(room, num_nodes);
  const IntMatrix token_of(f.tokens), child_of(f.first_child), sibling_of(f.next_sibling),
      slot_of(f.slots);
  std::vector<int32_t> paths(static_cast<size_t>(batch * longest));
  std::vector<Outcome> outcomes(static_cast<size_t>(batch));
  torch::stable::parallel_for(0, batch, 1, [&](int64_t begin, int64_t last) {
    for (int64_t b = begin; b < last; ++b) {
      const auto tokens = [&](int64_t i) { return token_of(b, i); };
      const auto children = [&](int64_t i) { return child_of(b, i); };
      const auto siblings = [&](int64_t i) { return sibling_of(b, i); };
      const auto slots = [&](int64_t i) { return slot_of(b, i); };
      Outcome& outcome = outcomes[static_cast<size_t>(b)];
      if (slots(0) < 0 || slots(0) >= num_slots) {
        outcome.status = slots(0) < 0 ? 0 : kBadLink;
        continue;
      }
      const SlottedLinks<decltype(children), decltype(slots)> first_child{children, slots,
                                                                          num_nodes, num_slots};
      const SlottedLinks<decltype(siblings), decltype(slots)> next_sibling{siblings, slots,
                                                                           num_nodes, num_slots};
      int32_t* path = paths.data() + b * longest;
      path[0] = 0;
      const WalkEnd end = walk_path(
          room, [&](int64_t node) { return decide(b, node, tokens, first_child, next_sibling); },
          [&](int64_t depth, int64_t child) { path[depth] = static_cast<int32_t>(child); });
      const Chosen chosen = choose(b, end, tokens, first_child, next_sibling);
      outcome = {end.depth, std::max<int64_t>(chosen.token, 0), end.status | chosen.status};
    }
  });
  // In the order of requests, so that slots which are not distinct mean the same for any threads.
  const MutableIntMatrix predicted(f.predictions), accepted(f.accept_index), count(f.num_accepted),
      flags(f.status);
  for (int64_t b = 0; b < batch; ++b) {
    const Outcome& outcome = outcomes[static_cast<size_t>(b)];
    const int32_t* path = paths.data() + b * longest;
    count.set(b, 0, std::max<int64_t>(outcome.depth, 0));
    flags.set(b, 0, outcome.status);
    for (int64_t i = 0; i <= outcome.depth; ++i) {
      const int64_t slot = slot_of(b, path[i]);
      accepted.set(b, i, slot);
      predicted.set(slot, 0, i < outcome.depth ? token_of(b, path[i + 1]) : outcome.token);
    }
  }
}

void tree_verify_choices(Tensor tokens, Tensor first_child, Tensor next_sibling, Tensor slots,
                         Tensor choices, Tensor predictions, Tensor accept_index,
                         Tensor num_accepted, Tensor status) {
  const Flat flat{tokens,      first_child,  next_sibling, slots,
                  predictions, accept_index, num_accepted, status};
  flat.check(kChoices);
  check_cpu(kChoices, "choices", choices);
  check_int(kChoices, "choices", choices);
  check_shape(kChoices, "choices", choices, {predictions.size(0)});
  check_outputs_apart(kChoices,
                      {{"predictions", &predictions},
                       {"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"status", &status}},
                      {{"tokens", &tokens},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"slots", &slots},
                       {"choices", &choices}});

  const IntMatrix choice_of(choices), slot_of(slots);
  const int64_t greatest = predictions.scalar_type() == ScalarType::Int
                               ? std::numeric_limits<int32_t>::max()
                               : std::numeric_limits<int64_t>::max();
  const int64_t num_nodes = tokens.size(1);
  const auto choice = [&](int64_t b, int64_t node) {
    const int64_t token = choice_of(slot_of(b, node), 0);
    return token >= 0 && token <= greatest ? token : int64_t{-1};
  };
  verify(
      flat,
      [&](int64_t b, int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const int64_t token = choice(b, node);
        if (token < 0) return ChildSearch{-1, 0};
        return find_child(node, token, num_nodes, tokens, first, next);
      },
      [&](int64_t b, const WalkEnd& end, const auto&...) {
        const int64_t token = choice(b, end.node);
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
  const Flat flat{tokens,      first_child,  next_sibling, slots,
                  predictions, accept_index, num_accepted, status};
  flat.check(kCoins);
  const int64_t batch = tokens.size(0);
  const int64_t num_nodes = tokens.size(1);
  const auto check_floats = [&](const char* name, const Tensor& t,
                                std::initializer_list<int64_t> shape) {
    check_cpu(kCoins, name, t);
    check_dtype(kCoins, name, t, ScalarType::Float);
    check_shape(kCoins, name, t, shape);
  };
  check_floats("target_probs", target_probs, {batch, num_nodes, -1});
  check_last_dim(kCoins, "target_probs", target_probs);
  const int64_t vocab = target_probs.size(2);
  SK_CHECK(vocab >= 1 && vocab <= kMaxVocab, kCoins, "target_probs",
           "1 to " + std::to_string(kMaxVocab) + " tokens", shape_string(target_probs));
  if (draft_probs) {
    check_floats("draft_probs", *draft_probs, {batch, num_nodes, vocab});
    check_last_dim(kCoins, "draft_probs", *draft_probs);
  }
  check_floats("coins", coins, {batch, num_nodes});
  check_floats("final_coins", final_coins, {batch});
  SK_CHECK(threshold_single >= 0.0 && threshold_single <= 1.0, kCoins, "threshold_single", "0 to 1",
           threshold_single);
  SK_CHECK(threshold_acc >= 0.0 && threshold_acc <= 1.0, kCoins, "threshold_acc", "0 to 1",
           threshold_acc);
  check_outputs_apart(kCoins,
                      {{"predictions", &predictions},
                       {"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"status", &status}},
                      {{"tokens", &tokens},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"slots", &slots},
                       {"target_probs", &target_probs},
                       {"draft_probs", draft_probs ? &*draft_probs : nullptr},
                       {"coins", &coins},
                       {"final_coins", &final_coins}});

  const Thresholds thresholds = {static_cast<float>(threshold_single),
                                 std::max(static_cast<float>(threshold_acc), kMinThreshold)};
  const auto row = [](const Tensor& t, int64_t b, int64_t node) {
    return static_cast<const float*>(t.data_ptr()) + b * t.stride(0) + node * t.stride(1);
  };
  verify(
      flat,
      [&](int64_t b, int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const float* target = row(target_probs, b, node);
        return accept_by_coin(
            node, num_nodes, vocab, clamped_coin(*row(coins, b, node)), thresholds, tokens,
            [&](int64_t token) { return target[token]; }, first, next);
      },
      [&](int64_t b, const WalkEnd& end, const auto& tokens, const auto& first, const auto& next) {
        thread_local Residual residual;
        const float* target = row(target_probs, b, end.node);
        const float* draft = draft_probs && !end.full ? row(*draft_probs, b, end.node) : nullptr;
        residual.fill(target, draft, vocab);
        if (!end.full) {
          Children<std::decay_t<decltype(first)>, std::decay_t<decltype(next)>> it(
              end.node, num_nodes, first, next);
          for (; !it.done(); it.next()) {
            const int64_t token = tokens(it.child());
            if (token >= 0 && token < vocab) residual.values[static_cast<size_t>(token)] = 0.0f;
          }
        }
        if (!residual.any()) {
          residual.fill(target, nullptr, vocab);
          if (!residual.any()) return Chosen{-1, kNoToken};
        }
        const float coin = clamped_coin(
            static_cast<const float*>(final_coins.data_ptr())[b * final_coins.stride(0)]);
        return Chosen{residual.sample(static_cast<uint32_t>(coin * (1 << kCoinBits))), 0};
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("tree_verify_choices", TORCH_BOX(&tree_verify_choices));
  m.impl("tree_verify_coins", TORCH_BOX(&tree_verify_coins));
}

}  // namespace spec_kernels
