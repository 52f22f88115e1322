// out[t] = sum over the experts chosen for row t of weight * down(silu(gate(x)) * up(x)), plus the
// shared expert.
//
// Weights dominate: with few rows each is read once a call, for all rows that chose its expert. So
// (row, expert) pairs are grouped by expert into segments, and threads share out blocks of weight
// rows. Every product is one accumulation in a fixed order that knows nothing of the rows beside
// it, and a row sums its experts in the order of choice, so a row's bits depend on that row alone,
// on any number of threads.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace spec_kernels {

// How products with the weights are formed. One call uses one form for the routed experts, and one
// for the shared expert, whatever the number of rows.
enum class MoeForm {
  kF32,      // x fp32, weights fp32
  kWiden,    // x fp32, weights bf16 widened on the way
  kBf16Dot,  // x and weights bf16, AVX512-BF16
  kAmx,      // x packed bf16 (moe_pack), weights bf16, AMX
  kInt4,     // x fp32, weights packed INT4, whose exact values are made in registers
};

// INT4: element j of a weight row is the nibble at bits 4 * (j % 8) of word j / 8 and stands for
// nibble - 8; every `group` neighbours share a scale.
constexpr int64_t kMoeInt4PerWord = 8;
constexpr int64_t kMoeInt4Group = 32;  // groups are multiples of it

constexpr int64_t kMoeBlock = 32;  // weight rows a task

// y[r][o] = sum over k of x[r][k] * w[o][k], fp32.
struct MoeProduct {
  const void* x;           // of num_rows rows, or what moe_pack made of them
  int64_t x_stride;        // elements between rows; unused when packed
  const int64_t* x_index;  // row r of the product is row x_index[r] of x; null: row r
  int64_t num_rows;
  const void* w;
  int64_t w_stride;       // elements between weight rows; of kInt4, words
  const uint16_t* scale;  // of kInt4 alone: bf16 bits of the groups of weight row 0
  int64_t scale_stride, group;
  int64_t num_outs;  // at most kMoeBlock
  int64_t depth;
  float* y;
  int64_t y_stride;
};

// Packed rows stand in groups of 16 (the last may be narrower): [depth / 2][rows of the group]
// pairs of bf16, the depth padded with zeros to a multiple of 32.
constexpr int64_t kMoePackRows = 16;
constexpr int64_t kMoePackDepth = 32;
inline int64_t moe_packed_depth(int64_t depth) {
  return (depth + kMoePackDepth - 1) / kMoePackDepth * kMoePackDepth;
}

SK_DECLARE_KERNEL(void moe_product(const MoeProduct& p, MoeForm form))
SK_DECLARE_KERNEL(void moe_pack(const uint16_t* x, int64_t x_stride, const int64_t* x_index,
                                int64_t num_rows, int64_t depth, uint16_t* packed))
// Ends the use of tiles by this thread; to be called after its last kAmx product.
SK_DECLARE_KERNEL(void moe_release_tiles())
SK_DECLARE_KERNEL(void moe_widen(const uint16_t* x, int64_t n, float* y))
SK_DECLARE_KERNEL(void moe_sigmoid(float* x, int64_t n))
// act = silu(gate) * up, rounded through `dtype`; stored as bf16 bits if `narrow`, else as fp32.
SK_DECLARE_KERNEL(void moe_activate(const float* gate, const float* up, int64_t n, Float dtype,
                                    bool narrow, void* act))
// out = sum over i of weights[i] * rows[i], in ascending i; a null `shared` adds nothing. All rows
// have n <= kMoeBlock elements.
SK_DECLARE_KERNEL(void moe_combine(const float* const* rows, const float* weights, int64_t num_rows,
                                   const float* shared, int64_t n, Float dtype, void* out))

}  // namespace spec_kernels
