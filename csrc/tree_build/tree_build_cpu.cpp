#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "tree_build/tree_build_args.h"

namespace spec_kernels {
namespace {

constexpr char kOp[] = "tree_build";
constexpr int64_t kCandidatesPerTask = 4096;

// Working memory of one thread.
struct Scratch {
  std::vector<int32_t> kept;        // pool indices
  std::vector<int32_t> node_of;     // [P] node of a kept candidate, -1 otherwise
  std::vector<int32_t> last_child;  // [N]
  std::vector<int32_t> depths;      // [N]
};

void select(const CandidatePool& pool, int64_t b, int64_t room, std::vector<int32_t>& kept) {
  const auto key = [&](int32_t i) { return score_key(pool.score(b, i)); };
  kept.clear();
  for (int32_t i = 0; i < static_cast<int32_t>(pool.size); ++i) {
    if (key(i) != 0 && pool.candidate(b, i) >= 0) kept.push_back(i);
  }
  if (static_cast<int64_t>(kept.size()) > room) {
    std::nth_element(kept.begin(), kept.begin() + room, kept.end(), [&](int32_t x, int32_t y) {
      return key(x) != key(y) ? key(x) > key(y) : x < y;
    });
    kept.resize(static_cast<size_t>(room));
    std::sort(kept.begin(), kept.end());
  }
}

void build(const CandidatePool& pool, const TreeOutputs& tree, int64_t b, Scratch& scratch) {
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
  const int64_t root = pool.root(b);
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
    const int64_t parent_slot = pool.parent_slot(b, slot);
    int32_t parent = -1;
    if (!parent_slot_is_sound(parent_slot, slot)) {
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
    tree.tokens.set(row + node, pool.candidate(b, slot));
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
      if (id > std::numeric_limits<int32_t>::max()) fail_token(name, id);
    }
  }
}

void tree_build(Tensor scores, Tensor candidates, Tensor parent_slots, Tensor root_tokens,
                Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor first_child,
                Tensor next_sibling, Tensor pool_index, Tensor status) {
  check_cpu(kOp, "scores", scores);
  const TreeBuildArgs args =
      tree_build_args(scores, candidates, parent_slots, root_tokens, tokens, parents, depths,
                      ancestors, first_child, next_sibling, pool_index, status);
  check_fits("candidates", candidates, args.tree.tokens);
  check_fits("root_tokens", root_tokens, args.tree.tokens);
  const int64_t work = args.pool.size + args.tree.num_nodes * args.tree.num_words;
  torch::stable::parallel_for(0, args.batch, std::max<int64_t>(1, kCandidatesPerTask / work),
                              [&](int64_t begin, int64_t end) {
                                Scratch scratch;
                                for (int64_t b = begin; b < end; ++b)
                                  build(args.pool, args.tree, b, scratch);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) { m.impl("tree_build", TORCH_BOX(&tree_build)); }

}  // namespace spec_kernels
