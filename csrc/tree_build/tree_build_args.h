// Validation shared by the CPU and CUDA registrations: tensors in, plain pointers and strides out.
#pragma once

#include <initializer_list>
#include <string>

#include "common/check.h"
#include "tree_build/tree_build.h"

namespace spec_kernels {

struct TreeBuildArgs {
  int64_t batch;
  CandidatePool pool;
  TreeOutputs tree;
};

inline TreeBuildArgs tree_build_args(const Tensor& scores, const Tensor& candidates,
                                     const Tensor& parent_slots, const Tensor& root_tokens,
                                     const Tensor& tokens, const Tensor& parents,
                                     const Tensor& depths, const Tensor& ancestors,
                                     const Tensor& first_child, const Tensor& next_sibling,
                                     const Tensor& pool_index, const Tensor& status) {
  constexpr char kOp[] = "tree_build";
  // A view may repeat one score for ever; working memory may not.
  constexpr int64_t kMaxPool = int64_t{1} << 28;
  check_dtype(kOp, "scores", scores, ScalarType::Float);
  check_shape(kOp, "scores", scores, {-1, -1});
  TreeBuildArgs args{};
  const int64_t batch = args.batch = scores.size(0);
  CandidatePool& pool = args.pool;
  pool.size = scores.size(1);
  SK_CHECK(pool.size <= kMaxPool, kOp, "scores",
           "at most " + std::to_string(kMaxPool) + " candidates", pool.size);
  const auto check_input = [&](const char* name, const Tensor& t,
                               std::initializer_list<int64_t> shape) {
    check_same_device(kOp, name, t, scores);
    check_int(kOp, name, t);
    check_shape(kOp, name, t, shape);
  };
  check_input("candidates", candidates, {batch, pool.size});
  check_input("parent_slots", parent_slots, {batch, pool.size});
  check_input("root_tokens", root_tokens, {batch});

  SK_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && tokens.size(1) <= kMaxNodes, kOp, "tokens",
           "shape [B, N], 1 <= N <= 1024", shape_string(tokens));
  TreeOutputs& tree = args.tree;
  tree.num_nodes = tokens.size(1);
  tree.num_words = tree_words(tree.num_nodes);
  const auto output = [&](const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
    check_input(name, t, shape);
    check_contiguous(kOp, name, t);
    return MutableIntView(t);
  };
  tree.tokens = output("tokens", tokens, {batch, tree.num_nodes});
  tree.parents = output("parents", parents, {batch, tree.num_nodes});
  tree.depths = output("depths", depths, {batch, tree.num_nodes});
  tree.first_child = output("first_child", first_child, {batch, tree.num_nodes});
  tree.next_sibling = output("next_sibling", next_sibling, {batch, tree.num_nodes});
  tree.pool_index = output("pool_index", pool_index, {batch, tree.num_nodes});
  tree.status = output("status", status, {batch});
  output("ancestors", ancestors, {batch, tree.num_nodes, tree.num_words});
  check_dtype(kOp, "ancestors", ancestors, ScalarType::Int);
  tree.ancestors = static_cast<uint32_t*>(ancestors.data_ptr());

  check_outputs_apart(kOp,
                      {{"tokens", &tokens},
                       {"parents", &parents},
                       {"depths", &depths},
                       {"ancestors", &ancestors},
                       {"first_child", &first_child},
                       {"next_sibling", &next_sibling},
                       {"pool_index", &pool_index},
                       {"status", &status}},
                      {{"scores", &scores},
                       {"candidates", &candidates},
                       {"parent_slots", &parent_slots},
                       {"root_tokens", &root_tokens}});

  pool.scores = static_cast<const float*>(scores.data_ptr());
  pool.candidates = IntView(candidates);
  pool.parent_slots = IntView(parent_slots);
  pool.root_tokens = IntView(root_tokens);
  pool.root_stride = root_tokens.stride(0);
  for (int64_t i = 0; i < 2; ++i) {
    pool.score_stride[i] = scores.stride(i);
    pool.candidate_stride[i] = candidates.stride(i);
    pool.slot_stride[i] = parent_slots.stride(i);
  }
  return args;
}

[[noreturn]] inline void fail_token(const char* name, int64_t id) {
  fail("tree_build", name, "ids that fit the int32 of tokens", id);
}

}  // namespace spec_kernels
