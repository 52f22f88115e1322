#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common/check.h"
#include "tree_build/tree_build.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_build";
constexpr int64_t kCandidatesPerTask = 4096;
constexpr int64_t kMaxPool = int64_t{1}
                             << 28;  // a view may repeat one score for ever; working memory may not

struct Pool {
  const float* scores;
  int64_t score_stride[2];
  IntView candidates, parent_slots, root_tokens;
  int64_t candidate_stride[2], slot_stride[2], root_stride;
  int64_t size;
};

struct Tree {
  MutableIntView tokens, parents, depths, first_child, next_sibling, pool_index, status;
  uint32_t* ancestors;
  int64_t num_nodes, num_words;
};

// Working memory of one thread.
struct Scratch {
  std::vector<int32_t> kept;        // pool indices
  std::vector<int32_t> node_of;     // [P] node of a kept candidate, -1 otherwise
  std::vector<int32_t> last_child;  // [N]
  std::vector<int32_t> depths;      // [N]
};

void select(const Pool& pool, int64_t b, int64_t room, std::vector<int32_t>& kept) {
  const float* scores = pool.scores + b * pool.score_stride[0];
  const auto score = [&](int32_t i) { return scores[i * pool.score_stride[1]]; };
  kept.clear();
  for (int64_t i = 0; i < pool.size; ++i) {
    // A NaN compares false, and so is absent like -inf.
    const bool present = score(static_cast<int32_t>(i)) > -std::numeric_limits<float>::infinity();
    if (present &&
        pool.candidates[b * pool.candidate_stride[0] + i * pool.candidate_stride[1]] >= 0) {
      kept.push_back(static_cast<int32_t>(i));
    }
  }
  if (static_cast<int64_t>(kept.size()) > room) {
    std::nth_element(kept.begin(), kept.begin() + room, kept.end(), [&](int32_t x, int32_t y) {
      return score(x) != score(y) ? score(x) > score(y) : x < y;
    });
    kept.resize(static_cast<size_t>(room));
    std::sort(kept.begin(), kept.end());
  }
}

void build(const Pool& pool, const Tree& tree, int64_t b, Scratch& scratch) {
  const int64_t row = b * tree.num_nodes;
  uint32_t* words = tree.ancestors + row * tree.num_words;
  std::fill(words, words + tree.num_nodes * tree.num_words, 0u);
  for (int64_t i = row; i < row + tree.num_nodes; ++i) {
    tree.tokens.set(i, 0);
    tree.parents.set(i, -1);
    tree.depths.set(i, 0);
    tree.first_child.set(i, -1);
    tree.next_sibling.set(i, -1);
    tree.pool_index.set(i, -1);
  }
  tree.status.set(b, 0);
  const int64_t root = pool.root_tokens[b * pool.root_stride];
  if (root < 0) return;

  select(pool, b, tree.num_nodes - 1, scratch.kept);
  scratch.node_of.assign(static_cast<size_t>(pool.size), -1);
  scratch.last_child.assign(static_cast<size_t>(tree.num_nodes), -1);
  scratch.depths.assign(static_cast<size_t>(tree.num_nodes), 0);
  tree.tokens.set(row, root);
  words[0] = 1u;
  int32_t status = 0;
  int32_t node = 0;
  for (const int32_t slot : scratch.kept) {
    ++node;
    const int64_t parent_slot =
        pool.parent_slots[b * pool.slot_stride[0] + slot * pool.slot_stride[1]];
    int32_t parent = -1;
    if (parent_slot < -1 || parent_slot >= slot) {
      status |= kBadParent;
    } else {
      parent = parent_slot == -1 ? 0 : scratch.node_of[static_cast<size_t>(parent_slot)];
      if (parent < 0) status |= kMissingParent;
    }
    scratch.node_of[static_cast<size_t>(slot)] = node;

    const int32_t above = std::max(parent, 0);  // an unlinked node still sees the root
    const int32_t depth = scratch.depths[static_cast<size_t>(above)] + 1;
    scratch.depths[static_cast<size_t>(node)] = depth;
    uint32_t* own = words + node * tree.num_words;
    std::copy_n(words + above * tree.num_words, above / 32 + 1,
                own);  // an ancestor's bits end at its own
    own[node / 32] |= 1u << (node % 32);
    tree.tokens.set(
        row + node,
        pool.candidates[b * pool.candidate_stride[0] + slot * pool.candidate_stride[1]]);
    tree.parents.set(row + node, parent);
    tree.depths.set(row + node, depth);
    tree.pool_index.set(row + node, slot);
    if (parent < 0) continue;
    int32_t& last = scratch.last_child[static_cast<size_t>(parent)];
    if (last < 0) {
      tree.first_child.set(row + parent, node);
    } else {
      tree.next_sibling.set(row + last, node);
    }
    last = node;
  }
  tree.status.set(b, status);
}

// Narrow outputs must not cut the ids of wide inputs.
void check_fits(const char* name, const Tensor& ids, const MutableIntView& tokens) {
  if (tokens.wide || ids.scalar_type() == ScalarType::Int) return;
  const IntView view(ids);
  const int64_t num_columns = ids.dim() > 1 ? ids.size(1) : 1;
  const int64_t column = ids.dim() > 1 ? ids.stride(1) : 0;
  for (int64_t b = 0; b < ids.size(0); ++b) {
    for (int64_t i = 0; i < num_columns; ++i) {
      const int64_t id = view[b * ids.stride(0) + i * column];
      SK_CHECK(id <= std::numeric_limits<int32_t>::max(), kOp, name,
               "ids that fit the int32 of tokens", id);
    }
  }
}

void tree_build(Tensor scores, Tensor candidates, Tensor parent_slots, Tensor root_tokens,
                Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor first_child,
                Tensor next_sibling, Tensor pool_index, Tensor status) {
  check_cpu(kOp, "scores", scores);
  check_dtype(kOp, "scores", scores, ScalarType::Float);
  check_shape(kOp, "scores", scores, {-1, -1});
  const int64_t batch = scores.size(0);
  Pool pool{};
  pool.size = scores.size(1);
  SK_CHECK(pool.size <= kMaxPool, kOp, "scores",
           "at most " + std::to_string(kMaxPool) + " candidates", pool.size);
  const auto check_input = [&](const char* name, const Tensor& t,
                               std::initializer_list<int64_t> shape) {
    check_cpu(kOp, name, t);
    check_int(kOp, name, t);
    check_shape(kOp, name, t, shape);
  };
  check_input("candidates", candidates, {batch, pool.size});
  check_input("parent_slots", parent_slots, {batch, pool.size});
  check_input("root_tokens", root_tokens, {batch});

  SK_CHECK(tokens.dim() == 2 && tokens.size(1) >= 1 && tokens.size(1) <= kMaxNodes, kOp, "tokens",
           "shape [B, N], 1 <= N <= 1024", shape_string(tokens));
  Tree tree{};
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
  check_fits("candidates", candidates, tree.tokens);
  check_fits("root_tokens", root_tokens, tree.tokens);
  const int64_t work = pool.size + tree.num_nodes * tree.num_words;
  torch::stable::parallel_for(0, batch, std::max<int64_t>(1, kCandidatesPerTask / work),
                              [&](int64_t begin, int64_t end) {
                                Scratch scratch;
                                for (int64_t b = begin; b < end; ++b) build(pool, tree, b, scratch);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("tree_build", TORCH_BOX(&tree_build)); }

}  // namespace spec_kernels
