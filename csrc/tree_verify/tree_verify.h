// The walk down a draft tree along the target's choices, the rule by which the target chooses, and
// the rules by which it accepts drafts.
//
// The rule is written so that every backend gets the same bits whatever order it adds in. Values
// are logits + bias in fp32; NaN and what is not allowed count as -inf. Weights are exp((value -
// greatest) / temperature) in fp32, by products and sums that are rounded one by one (no fused
// multiply-add), truncated to multiples of 2^-kWeightBits: sums of integers have no order. The
// token is the first id whose cumulative weight exceeds coin * total; the comparison is exact and
// half-open, so weight zero is never chosen. The coin depends on seed and absolute position alone,
// so plain decoding and any tree choose the same token.
//
// Drafts that were drawn from q are accepted by recursive rejection (accept_by_draft), in the same
// integers: q is truncated to multiples of 2^-kWeightBits, the test itself is exact, and q is
// brought to the target's total by a ratio of 32 bits, rounded down.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "common/tree.h"

namespace spec_kernels {

// Twins of VerifyStatus in spec_kernels/ops/tree_verify/reference.py.
enum VerifyStatus : int32_t {
  kNoToken = 1,  // a visited row is all NaN, -inf or masked: id 0 stands in, the walk ends
  // A link on the walk points outside the tree or to a node without a slot, or a child does not
  // come after its parent.
  kBadLink = 2,
  kSiblingCycle = 4,  // a list of siblings has more entries than the tree has nodes
  kBadParameter = 8,  // a sampling parameter out of range; on CPU it raises instead
  kBadDraft = 16,     // a visited row of draft_probs has an entry outside [0, 2): it counts as 0
};

// Third word of the counter. Twins of Purpose in the same file.
enum Purpose : uint32_t { kSample = 0, kAccept = 1, kResidual = 2, kDraft = 3 };

constexpr int kWeightBits = 40;
constexpr int kCoinBits = 24;
// kMaxVocab weights of 2^kWeightBits stay below 2^63.
constexpr int64_t kMaxVocab = int64_t{1} << 22;
// Children of one node that can be rejected; those that follow are not tried, which is lossless
// too.
constexpr int kMaxRejections = 64;

struct Philox {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
SK_HOST_DEVICE inline Philox philox4x32(Philox counter, uint32_t key0, uint32_t key1) {
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53u} * c[0];
    const uint64_t right = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(right >> 32) ^ c[1] ^ key0;
    c[1] = static_cast<uint32_t>(right);
    c[2] = static_cast<uint32_t>(left >> 32) ^ c[3] ^ key1;
    c[3] = static_cast<uint32_t>(left);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// 32 random bits. `ordinal` tells apart coins of one purpose at one position.
SK_HOST_DEVICE inline uint32_t coin_word(uint64_t seed, uint64_t position, Purpose purpose,
                                         uint32_t ordinal) {
  const Philox counter = {
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), purpose, ordinal}};
  return philox4x32(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32))
      .word[0];
}

// kCoinBits of them: the coin is this over 2^kCoinBits, in [0, 1).
SK_HOST_DEVICE inline uint32_t coin_bits(uint64_t seed, uint64_t position, Purpose purpose,
                                         uint32_t ordinal = 0) {
  return coin_word(seed, position, purpose, ordinal) >> (32 - kCoinBits);
}

// floor(coin * total): for integers, cumulative > coin * total iff cumulative > this. Split to stay
// within 64 bits.
SK_HOST_DEVICE inline uint64_t coin_times(uint32_t bits, uint64_t total) {
  constexpr uint64_t kLow = (uint64_t{1} << kCoinBits) - 1;
  return bits * (total >> kCoinBits) + ((bits * (total & kLow)) >> kCoinBits);
}

// ---- Weights. `Math` is the arithmetic of a backend, on one element or on a vector V of them:
// each of its products and sums is rounded, none is fused.

// e^x is not needed below: it would weigh nothing.
constexpr float kLeastLog = -30.0f;

SK_HOST_DEVICE inline float inverse_temperature(float temperature) {
  const float inverse = 1.0f / temperature;
  return inverse < FLT_MIN ? FLT_MIN : inverse > FLT_MAX ? FLT_MAX : inverse;
}

// The logarithm of the relative probability, from 0 down to kLeastLog. It never rises as the value
// falls, since each rounding keeps order.
template <class Math, class V>
SK_HOST_DEVICE inline V log_weight(V value, float greatest, float inverse) {
  // inf - inf counts as 0: +inf entries share the weight.
  const V difference = Math::zero_where_equal(value, greatest, Math::add(value, -greatest));
  return Math::at_least(Math::mul(difference, inverse), kLeastLog);
}

// e^x for kLeastLog <= x <= 0 to about 2 ulp: the bits of exp_weights in reference.py.
template <class Math, class V>
SK_HOST_DEVICE inline V exp_weight(V x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const V n = Math::add(Math::add(Math::mul(x, 1.44269504f), kMagic), -kMagic);
  V r = Math::add(x, Math::mul(n, -0.693359375f));
  r = Math::add(r, Math::mul(n, 2.12194440e-4f));
  V p = Math::add(Math::mul(r, 1.9875691500e-4f), 1.3981999507e-3f);
  p = Math::add(Math::mul(p, r), 8.3334519073e-3f);
  p = Math::add(Math::mul(p, r), 4.1665795894e-2f);
  p = Math::add(Math::mul(p, r), 1.6666665459e-1f);
  p = Math::add(Math::mul(p, r), 5.0000001201e-1f);
  p = Math::add(Math::add(Math::mul(p, Math::mul(r, r)), r), 1.0f);
  return Math::times_power_of_two(p, n);
}

// x in [0, 2), or -0, as a multiple of 2^-kWeightBits, truncated.
SK_HOST_DEVICE inline uint64_t to_fixed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint64_t mantissa = (bits & 0x7FFFFFu) | 0x800000u;
  const int shift = static_cast<int>(bits >> 23 & 0xFFu) - 127 + kWeightBits - 23;
  if (shift >= 0) return mantissa << shift;
  return shift > -24 ? mantissa >> -shift : 0;  // zero and subnormal floats too
}

// The mass that a nucleus must reach. Rounding may put it above the total: then all are kept.
SK_HOST_DEVICE inline uint64_t nucleus_mass(float top_p, uint64_t total) {
  const double mass = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return mass < 1.0 ? 1 : static_cast<uint64_t>(mass);
}

// ---- Links.

struct ChildSearch {
  int64_t child;  // -1 = none
  int32_t status;
};

// The children of `node`, one by one in list order. Bounded by num_nodes steps whatever the links
// hold; no id is used before it is known to lie in (node, num_nodes). Children after their parent
// keep accept_index increasing, and so any walk finite.
template <class FirstChild, class NextSibling>
class Children {
 public:
  SK_HOST_DEVICE Children(int64_t node, int64_t num_nodes, const FirstChild& first_child,
                          const NextSibling& next_sibling)
      : node_(node), num_nodes_(num_nodes), next_sibling_(next_sibling) {
    visit(first_child(node));
  }

  SK_HOST_DEVICE bool done() const { return child_ < 0; }
  SK_HOST_DEVICE int64_t child() const { return child_; }
  SK_HOST_DEVICE uint32_t ordinal() const { return static_cast<uint32_t>(ordinal_); }
  // Why the list ended, once done.
  SK_HOST_DEVICE int32_t status() const { return status_; }

  SK_HOST_DEVICE void next() {
    if (++ordinal_ == num_nodes_) {
      child_ = -1;
      status_ = mutant("tree_verify_bound") ? 0 : kSiblingCycle;
    } else {
      visit(next_sibling_(child_));
    }
  }

 private:
  SK_HOST_DEVICE void visit(int64_t child) {
    const bool inside =
        (child > node_ || mutant("tree_verify_upward")) && child >= 0 && child < num_nodes_;
    if (!inside && child != -1) status_ = kBadLink;
    child_ = inside ? child : -1;
  }

  int64_t node_, num_nodes_;
  const NextSibling& next_sibling_;
  int64_t child_ = -1;
  int64_t ordinal_ = 0;
  int32_t status_ = 0;
};

// The first child in list order that carries `token`.
template <class Tokens, class FirstChild, class NextSibling>
SK_HOST_DEVICE SK_FORCE_INLINE ChildSearch find_child(int64_t node, int64_t token,
                                                      int64_t num_nodes, const Tokens& tokens,
                                                      const FirstChild& first_child,
                                                      const NextSibling& next_sibling) {
  Children<FirstChild, NextSibling> it(node, num_nodes, first_child, next_sibling);
  for (; !it.done(); it.next()) {
    if (tokens(it.child()) == token) return {it.child(), 0};
  }
  return {-1, it.status()};
}

// ---- Acceptance of drafts that were drawn from q.

struct Wide {
  uint64_t high, low;
};

SK_HOST_DEVICE inline Wide multiply(uint64_t a, uint64_t b) {
  const uint64_t a1 = a >> 32, a0 = a & 0xFFFFFFFFu, b1 = b >> 32, b0 = b & 0xFFFFFFFFu;
  const uint64_t low = a0 * b0;
  const uint64_t middle = a1 * b0 + (low >> 32);
  const uint64_t other = a0 * b1 + (middle & 0xFFFFFFFFu);
  return {a1 * b1 + (middle >> 32) + (other >> 32), (other << 32) | (low & 0xFFFFFFFFu)};
}

// coin < (p / p_total) / (q / q_total), exactly: all products stay below 2^126. Half-open, so p = 0
// is never accepted and p / p_total >= q / q_total always is. Needs q > 0.
SK_HOST_DEVICE inline bool accepts(uint32_t coin, uint64_t p, uint64_t p_total, uint64_t q,
                                   uint64_t q_total) {
  const Wide theirs = multiply(q, p_total), ours = multiply(p, q_total);
  const Wide low = multiply(theirs.low, coin);
  const Wide left = {theirs.high * coin + low.high, low.low};
  const Wide right = {(ours.high << kCoinBits) | (ours.low >> (64 - kCoinBits)),
                      ours.low << kCoinBits};
  return left.high != right.high ? left.high < right.high : left.low < right.low;
}

// An entry of a row of q is sound within [0, 2); above 1, by rounding, it counts as 1.
SK_HOST_DEVICE inline bool is_sound_draft(float q) { return q >= 0.0f && q < 2.0f; }

// The weight of a sound entry, truncated like the target's.
SK_HOST_DEVICE inline uint64_t draft_weight(float q) { return to_fixed(q < 1.0f ? q : 1.0f); }

// mantissa * 2^-shift, with 2^31 <= mantissa < 2^32.
struct Ratio {
  uint32_t mantissa;
  int32_t shift;
};

SK_HOST_DEVICE inline int leading_zeros(uint64_t x) {
  int n = 0;
  for (int step = 32; step > 0; step >>= 1) {
    if (x >> (64 - step) == 0) {
      n += step;
      x <<= step;
    }
  }
  return n;
}

// p_total / q_total, both > 0: at most the quotient, and short of it by less than 2^-30 of it.
// Never above, so the amounts subtracted below sum to at most p_total: a rejection, which is
// possible only where p(x) / p_total < q(x) / q_total, leaves a residual > 0.
SK_HOST_DEVICE inline Ratio make_ratio(uint64_t p_total, uint64_t q_total) {
  const int p_zeros = leading_zeros(p_total), q_zeros = leading_zeros(q_total);
  const uint64_t quotient = (p_total << p_zeros) / (((q_total << q_zeros) >> 32) + 1);
  const int half = static_cast<int>(quotient >> 32 != 0);
  return {static_cast<uint32_t>(quotient >> half), 32 + p_zeros - q_zeros - half};
}

// high * 2^16 + low times the ratio, rounded down by less than 1 + 2^-15 of the ratio, for
// high <= 2^24 and low < 2^16: by products of 32 bits.
SK_HOST_DEVICE inline uint64_t scaled(uint64_t high, uint64_t low, Ratio ratio) {
  const uint64_t product = high * ratio.mantissa + ((low * ratio.mantissa) >> 16);
  const int shift = ratio.shift - 16;
  if (shift < 0) return product << -shift;  // below q_total * ratio <= p_total
  return shift < 64 ? product >> shift : 0;
}

// Recursive rejection over the children of one node, which were drawn one after the other without
// replacement from q (a chain is the case of one child). A child x is accepted with probability
// min(1, p(x) / q(x)); where it is rejected,
//     p <- norm(max(p - q, 0)),  q <- norm(q without x),
// and the next is tried. If none is accepted the bonus token is to be drawn from the p that is
// left; so what is emitted is distributed as the p that one began with. A child of q(x) = 0 (an
// equal token stood before, or it was no draw from q) is passed over, which leaves p as it is.
//
// `row` holds both distributions in integers as they stand:
//   weight(id), draft(id)          p and q of an id in [0, vocab)
//   weight_total(), draft_total()  their sums
//   reject(id, ratio)              id gets weight and draft 0; every other weight w becomes
//                                  max(w - scaled(draft, ratio), 0); weight_total is summed anew
// Since scaled() >= 0, after several rejections the weight of any id that was not itself rejected
// is max(w - sum over rejections of scaled(draft, ratio), 0): nothing but the ratios need be kept.
template <class Tokens, class FirstChild, class NextSibling, class Row>
SK_HOST_DEVICE SK_FORCE_INLINE ChildSearch accept_by_draft(int64_t node, int64_t num_nodes,
                                                           int64_t vocab, uint64_t seed,
                                                           uint64_t position, const Tokens& tokens,
                                                           const FirstChild& first_child,
                                                           const NextSibling& next_sibling,
                                                           Row& row) {
  int num_rejected = 0;
  Children<FirstChild, NextSibling> it(node, num_nodes, first_child, next_sibling);
  for (; !it.done(); it.next()) {
    const int64_t token = tokens(it.child());
    if (token < 0 || token >= vocab) continue;
    const uint64_t q = row.draft(token);
    if (q == 0) continue;
    const uint32_t coin =
        coin_bits(seed, position, kAccept, mutant("tree_verify_ordinal") ? 0 : it.ordinal());
    if (accepts(coin, row.weight(token), row.weight_total(), q, row.draft_total()))
      return {it.child(), 0};
    row.reject(token, make_ratio(row.weight_total(), row.draft_total()));
    if (++num_rejected == kMaxRejections) return {-1, 0};
  }
  return {-1, it.status()};
}

// ---- Typical acceptance: lossy.

// The weight that a draft must exceed, of weights that sum to `total`: min(epsilon, delta e^-H) of
// it. `relative_entropy` is e^-(sum of weight * -log(weight / 2^kWeightBits) / total), and
// e^-H = relative_entropy * 2^kWeightBits / total.
SK_HOST_DEVICE inline double typical_limit(uint64_t total, float relative_entropy, double epsilon,
                                           double delta) {
  const double by_epsilon = epsilon * static_cast<double>(total);
  const double by_delta =
      delta * static_cast<double>(uint64_t{1} << kWeightBits) * relative_entropy;
  return by_epsilon < by_delta ? by_epsilon : by_delta;
}

// The child of greatest weight above the limit; of equal ones the first in list order.
template <class Tokens, class FirstChild, class NextSibling, class WeightAt>
SK_HOST_DEVICE SK_FORCE_INLINE ChildSearch accept_typical(
    int64_t node, int64_t num_nodes, int64_t vocab, double limit, const Tokens& tokens,
    const FirstChild& first_child, const NextSibling& next_sibling, const WeightAt& weight) {
  int64_t found = -1;
  uint64_t best = 0;
  Children<FirstChild, NextSibling> it(node, num_nodes, first_child, next_sibling);
  for (; !it.done(); it.next()) {
    const int64_t token = tokens(it.child());
    if (token < 0 || token >= vocab) continue;
    const uint64_t own = weight(token);
    if (own > best && static_cast<double>(own) > limit) {
      best = own;
      found = it.child();
    }
  }
  return {found, it.status()};
}

// ---- The walk of one request.

struct WalkRules {
  int64_t num_nodes, vocab, num_columns;  // num_columns: room for the root and accepted drafts
  uint64_t context_len, seed;
  bool greedy, drafts, typical;
  double epsilon, delta;
};

struct Step {
  int64_t token;  // -1: there is none
  ChildSearch found;
  int32_t status;
};

// What a request emits after `node`, and the child that carries it. `row` is the distribution
// there:
//   greedy()          the id of the greatest value, -1 if there is none
//   weigh()           finds the weights; false if there is no token to choose
//   weigh_drafts()    finds those of q; false if one is unsound
//   draw(coin)        the id that the coin picks from the weights as they stand
//   any_rejected(), limit(epsilon, delta), and what accept_by_draft asks for
template <class Tokens, class FirstChild, class NextSibling, class Row>
SK_HOST_DEVICE SK_FORCE_INLINE Step take_step(const WalkRules& rules, int64_t node, int64_t depth,
                                              const Tokens& tokens, const FirstChild& first_child,
                                              const NextSibling& next_sibling, Row& row) {
  const uint64_t position = rules.context_len + static_cast<uint64_t>(depth) + 1;
  const bool room = depth + 1 < rules.num_columns;
  Step step = {-1, {-1, 0}, 0};
  if (rules.greedy) {
    step.token = row.greedy();
  } else if (row.weigh()) {
    const bool has_child =
        room && (rules.drafts || rules.typical) &&
        !Children<FirstChild, NextSibling>(node, rules.num_nodes, first_child, next_sibling).done();
    if (has_child && rules.drafts) {
      if (!row.weigh_drafts()) step.status = kBadDraft;
      step.found = accept_by_draft(node, rules.num_nodes, rules.vocab, rules.seed, position, tokens,
                                   first_child, next_sibling, row);
    } else if (has_child) {
      step.found = accept_typical(node, rules.num_nodes, rules.vocab,
                                  row.limit(rules.epsilon, rules.delta), tokens, first_child,
                                  next_sibling, [&](int64_t id) { return row.weight(id); });
    }
    if (step.found.child >= 0) {
      step.token = tokens(step.found.child);
      return step;
    }
    // As long as nothing was rejected the distribution is the target's own, and so is the choice.
    step.token = row.draw(
        coin_bits(rules.seed, position,
                  row.any_rejected() && !mutant("tree_verify_purpose") ? kResidual : kSample));
    if (has_child) return step;
  }
  if (step.token < 0) {
    step.status |= kNoToken;
  } else if (room) {
    step.found = find_child(node, step.token, rules.num_nodes, tokens, first_child, next_sibling);
  }
  return step;
}

struct Walked {
  int64_t depth;
  int32_t status;
};

// `visit(node)` makes `row` that of a node; `emit(depth, node, token)` is told of each.
template <class Tokens, class FirstChild, class NextSibling, class Row, class Visit, class Emit>
SK_HOST_DEVICE SK_FORCE_INLINE Walked walk_tree(const WalkRules& rules, const Tokens& tokens,
                                                const FirstChild& first_child,
                                                const NextSibling& next_sibling, Row& row,
                                                const Visit& visit, const Emit& emit) {
  Walked walked = {0, 0};
  for (int64_t node = 0;; ++walked.depth) {
    visit(node);
    const Step step = take_step(rules, node, walked.depth, tokens, first_child, next_sibling, row);
    emit(walked.depth, node, step.token < 0 ? 0 : step.token);
    walked.status |= step.status | step.found.status;
    node = step.found.child;
    if (node < 0) return walked;
  }
}

// ---- CPU row kernels. A row is cut into blocks, so that selection can skip whole blocks by their
// greatest value.

constexpr int64_t kBlock = 128;
// Bins by the logarithm of the relative probability, 0 down to -30: a first sieve for top-p.
constexpr int kBinsPerNat = 8;
constexpr int kNumBins = 30 * kBinsPerNat + 1;

struct Row {
  const void* logits;
  const float* bias;        // or null
  const uint32_t* allowed;  // or null
  int64_t vocab;
  Float dtype;
};

// One row of draft_probs, and what was rejected of the siblings drawn from it.
struct DraftRow {
  const void* probs;
  int64_t vocab;
  Float dtype;
  int num_rejected;
  int64_t token[kMaxRejections];
  Ratio ratio[kMaxRejections];
};

struct Best {
  float value;  // -inf: nothing to choose
  int64_t id;
};

struct Candidate {
  uint64_t weight;
  float value;
  int32_t id;
};

// The values of a row, padded with -inf to whole blocks, and what turns them into weights. Kept are
// values above cut.value, those equal to it up to cut.id, and of these the weights >= min_p; where
// drafts were rejected, what the rejections leave of them.
struct Weights {
  const float* values;
  const float* block_max;
  float greatest;
  float inverse_temperature;
  float min_p;
  Best cut;
  const DraftRow* rejected;  // null: none was
};

SK_DECLARE_KERNEL(Best row_argmax(const Row& row, int64_t begin, int64_t end))
SK_DECLARE_KERNEL(void row_values(const Row& row, int64_t first_block, int64_t last_block,
                                  float* values, float* block_max))
SK_DECLARE_KERNEL(void block_weights(const Weights& w, int64_t first_block, int64_t last_block,
                                     uint64_t* sums))
// Adds the weight of every value to its bin (no cut, no min_p).
SK_DECLARE_KERNEL(void weight_histogram(const Weights& w, int64_t first_block, int64_t last_block,
                                        uint64_t* mass))
// Appends the block's values of one bin; at most kBlock.
SK_DECLARE_KERNEL(int64_t gather_bin(const Weights& w, int64_t block, int32_t bin, Candidate* out))
// Sum of -log(relative probability) times weight, in the unit of weights.
SK_DECLARE_KERNEL(uint64_t surprise(const Weights& w, int64_t first_block, int64_t last_block))
SK_DECLARE_KERNEL(float exp_of(float x))  // by the bits of the weights; -30 <= x <= 0
SK_DECLARE_KERNEL(uint64_t weight_of(const Weights& w, int64_t id))
// Sum of the weights of q in [begin, end), multiples of 16 but for the row's end; unsound entries
// count as 0 and clear *sound.
SK_DECLARE_KERNEL(uint64_t draft_sum(const DraftRow& row, int64_t begin, int64_t end, bool* sound))
SK_DECLARE_KERNEL(int64_t find_in_block(const Weights& w, int64_t block, uint64_t below))
SK_DECLARE_KERNEL(void candidate_weights(const Weights& w, Candidate* candidates,
                                         int64_t num_candidates))

}  // namespace spec_kernels
