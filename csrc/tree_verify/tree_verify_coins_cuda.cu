// Given choices: a thread walks a request. Given probabilities and coins: a block does, whose
// threads walk alike and then sum the last row together; a row is read where a draft stands, the
// last one three times (greatest, sum, the share that holds the coin), its row of draft_probs too.
//
// Computed, not measured: 0.66 MB for a row of V = 163840, three passes at some 50 bytes a clock of
// one multiprocessor, 20 to 30 us with draft_probs; each step of a walk is two dependent reads,
// about 1 us.
#include <algorithm>
#include <type_traits>

#include "tree_verify/tree_verify_coins_args.h"
#include "tree_verify/tree_verify_cuda.cuh"

namespace spec_kernels {
namespace {

constexpr int kRequestsPerBlock = 64;
constexpr int kFilterBits = 8192;

// Walks request b: `decide` finds a child of a node, `choose` names the token after the last one
// (-1: there is none). Where slots are not distinct, any of the requests that share one settles it.
template <class Args, class Decide, class Choose>
__device__ __forceinline__ void verify(const Args& a, int64_t b, bool writes, const Decide& decide,
                                       const Choose& choose) {
  const auto tokens = [&](int64_t i) { return a.tokens(b, i); };
  const auto children = [&](int64_t i) { return a.first_child(b, i); };
  const auto siblings = [&](int64_t i) { return a.next_sibling(b, i); };
  const auto slots = [&](int64_t i) { return a.slots(b, i); };
  const int64_t root = slots(0);
  if (root < 0 || root >= a.num_slots) {
    if (!writes) return;
    a.num_accepted.set(b, 0, 0);
    a.status.set(b, 0, root < 0 ? 0 : kBadLink);
    return;
  }
  const SlottedLinks<decltype(children), decltype(slots)> first_child{children, slots, a.num_nodes,
                                                                      a.num_slots};
  const SlottedLinks<decltype(siblings), decltype(slots)> next_sibling{siblings, slots, a.num_nodes,
                                                                       a.num_slots};
  int64_t slot = root;
  if (writes) a.accept_index.set(b, 0, root);
  const WalkEnd end = walk_path(
      a.num_columns, [&](int64_t node) { return decide(node, tokens, first_child, next_sibling); },
      [&](int64_t depth, int64_t child) {
        if (writes) a.predictions.set(slot, 0, tokens(child));
        slot = slots(child);
        if (writes) a.accept_index.set(b, depth, slot);
      });
  const int64_t token = choose(end, tokens, first_child, next_sibling);
  if (!writes) return;
  a.predictions.set(slot, 0, token < 0 ? 0 : token);
  a.num_accepted.set(b, 0, end.depth);
  a.status.set(b, 0, end.status | (token < 0 ? kNoToken : 0));
}

__global__ void __launch_bounds__(kRequestsPerBlock)
    tree_verify_choices_kernel(const __grid_constant__ TreeVerifyChoicesArgs a) {
  const int64_t b = int64_t{blockIdx.x} * kRequestsPerBlock + threadIdx.x;
  if (b >= a.batch) return;
  verify(
      a, b, true,
      [&](int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const int64_t token = a.choice(b, node);
        if (token < 0) return ChildSearch{-1, 0};
        return find_child(node, token, a.num_nodes, tokens, first, next);
      },
      [&](const WalkEnd& end, const auto&...) { return a.choice(b, end.node); });
}

struct BlockState {
  BlockSums sums;
  uint32_t filter[kFilterBits / 32];  // by the low bits of an id: whether it may be a child's token
};

// What is left at the last node to choose from.
template <class Tokens, class FirstChild, class NextSibling>
struct Residual {
  const float *target, *draft;  // draft: or null
  int64_t node, num_nodes, vocab;
  const Tokens& tokens;
  const FirstChild& first_child;
  const NextSibling& next_sibling;
  BlockState& s;
  bool filtered;

  __device__ __forceinline__ void exclude_children() {
    const int thread = static_cast<int>(threadIdx.x);
    __syncthreads();
    for (int i = thread; i < kFilterBits / 32; i += static_cast<int>(blockDim.x)) s.filter[i] = 0;
    __syncthreads();
    if (thread == 0) {
      Children<FirstChild, NextSibling> it(node, num_nodes, first_child, next_sibling);
      for (; !it.done(); it.next()) {
        const uint32_t bit = static_cast<uint32_t>(tokens(it.child())) % kFilterBits;
        s.filter[bit / 32] |= 1u << bit % 32;
      }
    }
    __syncthreads();
    filtered = true;
  }

  __device__ __forceinline__ bool excluded(int id) const {
    const uint32_t bit = static_cast<uint32_t>(id) % kFilterBits;
    if (!filtered || !(s.filter[bit / 32] >> bit % 32 & 1u)) return false;
    return find_child(node, id, num_nodes, tokens, first_child, next_sibling).child >= 0;
  }

  __device__ __forceinline__ float value(int id) const {
    const bool reduced = draft && !mutant("tree_verify_coins_draft");
    const float v = positive(reduced ? target[id] - draft[id] : target[id]);
    return v > 0.0f && excluded(id) ? 0.0f : v;
  }

  // Calls f(value, id) for this lane's elements: one of each tile.
  template <class F>
  __device__ __forceinline__ void each(Part part, const F& f) const {
#pragma unroll 4
    for (int t = part.first; t < part.last; ++t) {
      const int id = t * kWarp + lane_id();
      if (id < vocab) f(value(id), id);
    }
  }

  // -1: nothing is left.
  __device__ __forceinline__ int64_t sample(uint32_t coin) const {
    const int n = divide_up(static_cast<int>(vocab), kWarp);
    float own = 0.0f;
    each(own_share(0, n), [&](float v, int) { own = v > own ? v : own; });
    // Floats that are not negative compare as their bits do.
    const uint64_t found = block_max(s.sums, float_bits(own));
    if (found == 0) return -1;
    float greatest;
    const uint32_t bits = static_cast<uint32_t>(found);
    memcpy(&greatest, &bits, sizeof(bits));
    const int32_t top = weight_exponent(greatest);
    const auto lane_sum = [&](Part part) {
      uint64_t sum = 0;
      each(part, [&](float v, int) { sum += residual_weight(v, top); });
      return sum;
    };
    uint64_t below = coin_times(coin, sum_tiles(s.sums, n, lane_sum));
    const Place at = find_tile(s.sums, n, below, lane_sum);
    return int64_t{at.tile} * kWarp + at.lane;
  }
};

__global__ void __launch_bounds__(kMaxThreads, 1)
    tree_verify_coins_kernel(const __grid_constant__ TreeVerifyCoinsArgs a) {
  SK_SHARED(BlockState, state);
  const int64_t b = blockIdx.x;
  verify(
      a, b, threadIdx.x == 0,
      [&](int64_t node, const auto& tokens, const auto& first, const auto& next) {
        const float* target = a.target_probs.at(b, node);
        return accept_by_coin(
            node, a.num_nodes, a.vocab, clamped_coin(*a.coins.at(b, node)), a.thresholds, tokens,
            [&](int64_t token) { return target[token]; }, first, next);
      },
      [&](const WalkEnd& end, const auto& tokens, const auto& first, const auto& next) {
        const float* draft =
            a.draft_probs.data && !end.full ? a.draft_probs.at(b, end.node) : nullptr;
        Residual<std::decay_t<decltype(tokens)>, std::decay_t<decltype(first)>,
                 std::decay_t<decltype(next)>>
            rest{a.target_probs.at(b, end.node),
                 draft,
                 end.node,
                 a.num_nodes,
                 a.vocab,
                 tokens,
                 first,
                 next,
                 state,
                 false};
        if (!end.full && !mutant("tree_verify_coins_children")) rest.exclude_children();
        const uint32_t coin = bits_of_coin(*a.final_coins.at(b));
        int64_t token = rest.sample(coin);
        if (token < 0) {  // rounding has left nothing: the row itself
          rest.draft = nullptr;
          rest.filtered = false;
          token = rest.sample(coin);
        }
        return token;
      });
}

void tree_verify_choices(Tensor tokens, Tensor first_child, Tensor next_sibling, Tensor slots,
                         Tensor choices, Tensor predictions, Tensor accept_index,
                         Tensor num_accepted, Tensor status) {
  constexpr char kOp[] = "tree_verify_choices";
  check_cuda_tensor(kOp, "tokens", tokens);
  const TreeVerifyChoicesArgs args =
      tree_verify_choices_args(tokens, first_child, next_sibling, slots, choices, predictions,
                               accept_index, num_accepted, status);
  if (args.batch == 0) return;
  const int32_t device = tokens.get_device_index();
  const DeviceGuard guard(device);
  const int64_t blocks = (args.batch + kRequestsPerBlock - 1) / kRequestsPerBlock;
  launch_kernel(kOp, &tree_verify_choices_kernel, one_block_each(kOp, "tokens", blocks),
                dim3(kRequestsPerBlock), 0, current_stream(device), args);
}

void tree_verify_coins(Tensor tokens, Tensor first_child, Tensor next_sibling, Tensor slots,
                       Tensor target_probs, std::optional<Tensor> draft_probs, Tensor coins,
                       Tensor final_coins, double threshold_single, double threshold_acc,
                       Tensor predictions, Tensor accept_index, Tensor num_accepted,
                       Tensor status) {
  constexpr char kOp[] = "tree_verify_coins";
  check_cuda_tensor(kOp, "tokens", tokens);
  const TreeVerifyCoinsArgs args = tree_verify_coins_args(
      tokens, first_child, next_sibling, slots, target_probs, draft_probs, coins, final_coins,
      threshold_single, threshold_acc, predictions, accept_index, num_accepted, status);
  if (args.batch == 0) return;
  const int32_t device = tokens.get_device_index();
  const DeviceGuard guard(device);
  const int64_t num_warps =
      std::clamp<int64_t>((args.vocab + 4 * kWarp - 1) / (4 * kWarp), 2, kMaxWarps);
  launch_kernel(kOp, &tree_verify_coins_kernel, one_block_each(kOp, "tokens", args.batch),
                dim3(static_cast<unsigned>(num_warps * kWarp)), 0, current_stream(device), args);
}

}  // namespace

SK_CUDA_LIBRARY_IMPL(m) {
  m.impl("tree_verify_choices", TORCH_BOX(&tree_verify_choices));
  m.impl("tree_verify_coins", TORCH_BOX(&tree_verify_coins));
}

}  // namespace spec_kernels
