// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "common/check.h"
#include "tree_verify/tree_verify_coins.h"

namespace spec_kernels {

struct FlatTreeArgs {
  int64_t batch, num_nodes, num_slots, num_columns;
  IntMatrix tokens, first_child, next_sibling, slots;
  MutableIntMatrix predictions, accept_index, num_accepted, status;
};

struct TreeVerifyChoicesArgs : FlatTreeArgs {
  IntMatrix choices;
  int64_t greatest;  // id that fits predictions

  // The token after a node that has a slot; -1: there is none.
  SK_HOST_DEVICE int64_t choice(int64_t b, int64_t node) const {
    const int64_t token = choices(slots(b, node));
    return token >= 0 && token <= greatest ? token : -1;
  }
};

// Rows (request, node) of adjacent floats, or single ones.
struct FloatRows {
  const float* data = nullptr;  // null: not given
  int64_t request = 0, node = 0;

  FloatRows() = default;
  explicit FloatRows(const Tensor& t)
      : data(static_cast<const float*>(t.data_ptr())),
        request(t.stride(0)),
        node(t.dim() > 1 ? t.stride(1) : 0) {}
  SK_HOST_DEVICE const float* at(int64_t b, int64_t i = 0) const {
    return data + b * request + i * node;
  }
};

struct TreeVerifyCoinsArgs : FlatTreeArgs {
  int64_t vocab;
  FloatRows target_probs, draft_probs, coins, final_coins;
  Thresholds thresholds;
};

namespace tree_verify_coins_detail {

inline void check_ints(const char* op, const char* name, const Tensor& t, const Tensor& like,
                       std::initializer_list<int64_t> shape) {
  check_same_device(op, name, t, like);
  check_int(op, name, t);
  check_shape(op, name, t, shape);
}

// `args` is filled but for what the op adds.
inline void flat_tree_args(const char* op, FlatTreeArgs& args, const Tensor& tokens,
                           const Tensor& first_child, const Tensor& next_sibling,
                           const Tensor& slots, const Tensor& predictions,
                           const Tensor& accept_index, const Tensor& num_accepted,
                           const Tensor& status) {
  check_ints(op, "tokens", tokens, tokens, {-1, -1});
  args.batch = tokens.size(0);
  args.num_nodes = tokens.size(1);
  SK_CHECK(args.num_nodes >= 1 && args.num_nodes <= kMaxNodes, op, "tokens",
           "1 to " + std::to_string(kMaxNodes) + " nodes", shape_string(tokens));
  check_ints(op, "first_child", first_child, tokens, {args.batch, args.num_nodes});
  check_ints(op, "next_sibling", next_sibling, tokens, {args.batch, args.num_nodes});
  check_ints(op, "slots", slots, tokens, {args.batch, args.num_nodes});
  check_ints(op, "predictions", predictions, tokens, {-1});
  args.num_slots = predictions.size(0);
  check_ints(op, "accept_index", accept_index, tokens, {args.batch, -1});
  args.num_columns = accept_index.size(1);
  SK_CHECK(args.num_columns >= 1, op, "accept_index", "at least one column",
           shape_string(accept_index));
  SK_CHECK(accept_index.scalar_type() == ScalarType::Long || args.num_slots <= int64_t{1} << 31, op,
           "accept_index", "int64 for so many slots", "int32");
  check_ints(op, "num_accepted", num_accepted, tokens, {args.batch});
  check_ints(op, "status", status, tokens, {args.batch});
  args.tokens = IntMatrix(tokens);
  args.first_child = IntMatrix(first_child);
  args.next_sibling = IntMatrix(next_sibling);
  args.slots = IntMatrix(slots);
  args.predictions = MutableIntMatrix(predictions);
  args.accept_index = MutableIntMatrix(accept_index);
  args.num_accepted = MutableIntMatrix(num_accepted);
  args.status = MutableIntMatrix(status);
}

}  // namespace tree_verify_coins_detail

inline TreeVerifyChoicesArgs tree_verify_choices_args(
    const Tensor& tokens, const Tensor& first_child, const Tensor& next_sibling,
    const Tensor& slots, const Tensor& choices, const Tensor& predictions,
    const Tensor& accept_index, const Tensor& num_accepted, const Tensor& status) {
  constexpr char kOp[] = "tree_verify_choices";
  TreeVerifyChoicesArgs args{};
  tree_verify_coins_detail::flat_tree_args(kOp, args, tokens, first_child, next_sibling, slots,
                                           predictions, accept_index, num_accepted, status);
  tree_verify_coins_detail::check_ints(kOp, "choices", choices, tokens, {args.num_slots});
  check_outputs_apart(kOp,
                      {{"predictions", &predictions},
                       {"accept_index", &accept_index},
                       {"num_accepted", &num_accepted},
                       {"status", &status}},
                      {{"tokens", &tokens},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"slots", &slots},
                       {"choices", &choices}});
  args.choices = IntMatrix(choices);
  args.greatest = args.predictions.data.wide ? std::numeric_limits<int64_t>::max()
                                             : std::numeric_limits<int32_t>::max();
  return args;
}

inline TreeVerifyCoinsArgs tree_verify_coins_args(
    const Tensor& tokens, const Tensor& first_child, const Tensor& next_sibling,
    const Tensor& slots, const Tensor& target_probs, const std::optional<Tensor>& draft_probs,
    const Tensor& coins, const Tensor& final_coins, double threshold_single, double threshold_acc,
    const Tensor& predictions, const Tensor& accept_index, const Tensor& num_accepted,
    const Tensor& status) {
  constexpr char kOp[] = "tree_verify_coins";
  TreeVerifyCoinsArgs args{};
  tree_verify_coins_detail::flat_tree_args(kOp, args, tokens, first_child, next_sibling, slots,
                                           predictions, accept_index, num_accepted, status);
  const auto check_floats = [&](const char* name, const Tensor& t,
                                std::initializer_list<int64_t> shape) {
    check_same_device(kOp, name, t, tokens);
    check_dtype(kOp, name, t, ScalarType::Float);
    check_shape(kOp, name, t, shape);
  };
  check_floats("target_probs", target_probs, {args.batch, args.num_nodes, -1});
  check_last_dim(kOp, "target_probs", target_probs);
  args.vocab = target_probs.size(2);
  SK_CHECK(args.vocab >= 1 && args.vocab <= kMaxVocab, kOp, "target_probs",
           "1 to " + std::to_string(kMaxVocab) + " tokens", shape_string(target_probs));
  if (draft_probs) {
    check_floats("draft_probs", *draft_probs, {args.batch, args.num_nodes, args.vocab});
    check_last_dim(kOp, "draft_probs", *draft_probs);
  }
  check_floats("coins", coins, {args.batch, args.num_nodes});
  check_floats("final_coins", final_coins, {args.batch});
  SK_CHECK(threshold_single >= 0.0 && threshold_single <= 1.0, kOp, "threshold_single", "0 to 1",
           threshold_single);
  SK_CHECK(threshold_acc >= 0.0 && threshold_acc <= 1.0, kOp, "threshold_acc", "0 to 1",
           threshold_acc);
  check_outputs_apart(kOp,
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
  args.target_probs = FloatRows(target_probs);
  if (draft_probs) args.draft_probs = FloatRows(*draft_probs);
  args.coins = FloatRows(coins);
  args.final_coins = FloatRows(final_coins);
  args.thresholds = {static_cast<float>(threshold_single),
                     std::max(static_cast<float>(threshold_acc), kMinThreshold)};
  return args;
}

}  // namespace spec_kernels
