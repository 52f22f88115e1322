#include "common/simd.h"
#include "moe_experts/moe_experts.h"

// AVX512-BF16 and AMX-BF16 are used through the assembler alone: these objects must run on any
// AVX-512 machine, and the caller asks for a form only where the machine has it.
#if defined(__AVX512F__) && SK_HAS_BF16_ISA
#define SK_BF16_FORMS 1
#endif

namespace spec_kernels {
namespace SK_ISA {
namespace {

// A tile of rows x outs accumulators fills the vector registers of the instruction set. Its shape
// has no say in the bits.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kInt4TileRows = 4, kTileOuts = 4, kSingleRowOuts = 8;
#elif defined(__AVX2__)
constexpr int kTileRows = 1, kInt4TileRows = 1, kTileOuts = 4, kSingleRowOuts = 4;
#else
constexpr int kTileRows = 1, kInt4TileRows = 1, kTileOuts = 2, kSingleRowOuts = 2;
#endif

// fp32 rows times fp32 or (widened) bf16 weights: lane i accumulates elements i, i + 16, ...
template <class Weight>
struct FusedMultiply {
  using X = float;
  using W = Weight;
  using Vector = F32x16;
  static constexpr int64_t kStep = kLanes;
  static constexpr int kRows = kTileRows;

  template <class T>
  SK_INLINE Vector read(const T* p) {
    return load(p);
  }
  template <class T>
  SK_INLINE Vector read_partial(const T* p, int64_t n) {
    return load_partial(p, n);
  }
  SK_INLINE void accumulate(F32x16& acc, Vector x, Vector w) { acc = fma(x, w, acc); }
};

#if SK_BF16_FORMS
// bf16 rows times bf16 weights: lane i accumulates pairs i, i + 16, ...
struct Bf16Dot {
  using X = bf16;
  using W = bf16;
  using Vector = __m512i;
  static constexpr int64_t kStep = 2 * kLanes;
  static constexpr int kRows = kTileRows;

  SK_INLINE Vector read(const bf16* p) { return _mm512_loadu_si512(p); }
  SK_INLINE Vector read_partial(const bf16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
  }
  SK_INLINE void accumulate(F32x16& acc, Vector x, Vector w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
  }
};
#endif

// fp32 rows times INT4 weights, as FusedMultiply has it.
struct Int4Multiply {
  using X = float;
  using W = uint32_t;
  static constexpr int kRows = kInt4TileRows;

  // What a group's scale makes of the sixteen nibbles, or the scale itself.
  SK_INLINE F32x16 factor(float scale) {
#if defined(__AVX512F__)
    return F32x16{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7} * scale;
#else
    return splat(scale);
#endif
  }

  // The sixteen elements of two words.
  SK_INLINE F32x16 values(const uint32_t* words, F32x16 factor) {
#if defined(__AVX512F__)
    uint64_t both;
    std::memcpy(&both, words, sizeof(both));
    const __m512i spread =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                 _mm512_set1_epi64(static_cast<int64_t>(both)));
    const __m512i nibbles = _mm512_srlv_epi32(
        spread, _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28));
    // A permutation looks at the lowest four bits of an index alone.
    return (F32x16)_mm512_permutexvar_ps(nibbles, (__m512)factor);
#else
    const uint32_t a = words[0], b = words[1];
    const U32x16 spread = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
    const U32x16 shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const I32x16 stored = (I32x16)((spread >> shifts) & 15u);
    return __builtin_convertvector(stored - 8, F32x16) * factor;
#endif
  }
};

// A long depth is walked in steps for all rows and outs of a block, so that the step's rows and
// weights stay in the caches close by; the accumulators wait here in between, unreduced, and the
// bits are those of one walk.
constexpr int64_t kDepthStep = 1024;
constexpr int64_t kCarriedRows = 48;
typedef F32x16 Carry[kCarriedRows][kMoeBlock];

struct DepthStep {
  int64_t begin, end;
  bool first, last;
};

// Adds the products of a step of the depth to a tile of accumulators.
template <class Dot, int kRows, int kOuts>
struct Walk {
  SK_INLINE void run(const MoeProduct& p, const typename Dot::X* const* x, int64_t out,
                     const DepthStep& depth, F32x16 (&acc)[kRows][kOuts]) {
    const auto* w = static_cast<const typename Dot::W*>(p.w) + out * p.w_stride;
    const auto add = [&](auto&& read, int64_t k) __attribute__((always_inline)) {
      typename Dot::Vector weights[kOuts];
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o) weights[o] = read(w + o * p.w_stride + k);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const typename Dot::Vector v = read(x[r] + k);
#pragma GCC unroll 8
        for (int o = 0; o < kOuts; ++o) Dot::accumulate(acc[r][o], v, weights[o]);
      }
    };
    int64_t k = depth.begin;
    for (; k + Dot::kStep <= depth.end; k += Dot::kStep) {
      add([](const auto* q) __attribute__((always_inline)) { return Dot::read(q); }, k);
    }
    if (k < depth.end) {
      const int64_t left = depth.end - k;
      add([=](const auto* q) __attribute__((always_inline)) { return Dot::read_partial(q, left); },
          k);
    }
  }
};

// The depth, and so every step of it, is a multiple of kMoeInt4Group.
template <int kRows, int kOuts>
struct Walk<Int4Multiply, kRows, kOuts> {
  SK_INLINE void run(const MoeProduct& p, const float* const* x, int64_t out,
                     const DepthStep& depth, F32x16 (&acc)[kRows][kOuts]) {
    const auto* w = static_cast<const uint32_t*>(p.w) + out * p.w_stride;
    const auto* scale = reinterpret_cast<const bf16*>(p.scale) + out * p.scale_stride;
    for (int64_t k = depth.begin; k < depth.end;) {
      const int64_t g = k / p.group;
      const int64_t group_end = (g + 1) * p.group;
      const int64_t end = group_end < depth.end ? group_end : depth.end;
      F32x16 factors[kOuts];
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o)
        factors[o] = Int4Multiply::factor(to_float(scale[o * p.scale_stride + g]));
      for (; k < end; k += kLanes) {
        F32x16 weights[kOuts];
#pragma GCC unroll 8
        for (int o = 0; o < kOuts; ++o)
          weights[o] = Int4Multiply::values(w + o * p.w_stride + k / kMoeInt4PerWord, factors[o]);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const F32x16 v = load(x[r] + k);
#pragma GCC unroll 8
          for (int o = 0; o < kOuts; ++o) acc[r][o] = fma(v, weights[o], acc[r][o]);
        }
      }
    }
  }
};

template <class Dot, int kRows, int kOuts>
void tile(const MoeProduct& p, const typename Dot::X* const* x, const DepthStep& depth, Carry carry,
          int64_t row, int64_t out) {
  F32x16 acc[kRows][kOuts] = {};
  if (!depth.first) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o) acc[r][o] = carry[row + r][out + o];
    }
  }
  Walk<Dot, kRows, kOuts>::run(p, x, out, depth, acc);
  if (!depth.last) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o) carry[row + r][out + o] = acc[r][o];
    }
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* to = p.y + (row + r) * p.y_stride + out;
    if constexpr (kOuts % 4 == 0) {
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; o += 4) {
        const F32x4 sums = reduce_add(acc[r][o], acc[r][o + 1], acc[r][o + 2], acc[r][o + 3]);
        std::memcpy(to + o, &sums, sizeof(sums));
      }
    } else {
#pragma GCC unroll 8
      for (int o = 0; o < kOuts; ++o) to[o] = reduce_add(acc[r][o]);
    }
  }
}

template <class Dot, int kRows>
int64_t tiles(const MoeProduct& p, const DepthStep& depth, Carry carry, int64_t r) {
  constexpr int kOuts = kRows == 1 ? kSingleRowOuts : kTileOuts;
  for (; r + kRows <= p.num_rows; r += kRows) {
    const typename Dot::X* x[kRows];
    for (int i = 0; i < kRows; ++i) {
      x[i] = static_cast<const typename Dot::X*>(p.x) +
             (p.x_index ? p.x_index[r + i] : r + i) * p.x_stride;
    }
    int64_t o = 0;
    for (; o + kOuts <= p.num_outs; o += kOuts) tile<Dot, kRows, kOuts>(p, x, depth, carry, r, o);
    for (; o < p.num_outs; ++o) tile<Dot, kRows, 1>(p, x, depth, carry, r, o);
  }
  return r;
}

template <class Dot>
void product_step(const MoeProduct& p, const DepthStep& depth, Carry carry) {
  int64_t r = 0;
  if constexpr (Dot::kRows > 1) {
    r = tiles<Dot, Dot::kRows>(p, depth, carry, r);
    r = tiles<Dot, 4>(p, depth, carry, r);
    r = tiles<Dot, 2>(p, depth, carry, r);
  }
  tiles<Dot, 1>(p, depth, carry, r);
}

template <class Dot>
void product(const MoeProduct& whole) {
  for (int64_t r = 0; r < whole.num_rows; r += kCarriedRows) {
    MoeProduct p = whole;
    p.num_rows = whole.num_rows - r < kCarriedRows ? whole.num_rows - r : kCarriedRows;
    if (p.x_index) {
      p.x_index += r;
    } else {
      p.x = static_cast<const typename Dot::X*>(p.x) + r * p.x_stride;
    }
    p.y += r * p.y_stride;
    if (p.num_rows <= Dot::kRows || p.depth <= kDepthStep) {
      product_step<Dot>(p, DepthStep{0, p.depth, true, true}, nullptr);
      continue;
    }
    Carry carry;
    for (int64_t k = 0; k < p.depth; k += kDepthStep) {
      const int64_t end = p.depth - k < kDepthStep ? p.depth : k + kDepthStep;
      product_step<Dot>(p, DepthStep{k, end, k == 0, end == p.depth}, carry);
    }
  }
}

#if SK_BF16_FORMS
// Weights are the left operand as they lie in memory (16 weight rows x 32 of the depth), packed
// rows the right one, so that a tile of results is [16 weight rows][16 rows]. Tiles 0-3 accumulate,
// 4-5 hold weights, 6-7 rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  void set(int tile, int64_t rows, int64_t bytes) {
    num_rows[tile] = static_cast<uint8_t>(rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

#define SK_TILE_LOAD(tile, base, stride)                                                         \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"(static_cast<int64_t>(stride)) \
               : "memory")
#define SK_TILE_STORE(tile, base, stride)                          \
  asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), \
               "r"(static_cast<int64_t>(stride))                   \
               : "memory")
#define SK_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile ::)
#define SK_TILE_DOT(acc, w, x) asm volatile("tdpbf16ps %%tmm" #x ", %%tmm" #w ", %%tmm" #acc ::)

// Transposes 16 x 16 elements of 4 bytes: pairs within 128 bits, then pairs of pairs, then the
// 128-bit lanes twice.
void transpose16(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(m[i], m[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(m[i], m[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(m[i + 8], m[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    m[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    m[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    m[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    m[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// One tile of results, transposed into rows of y.
template <class StoreTile>
SK_INLINE void write_tile(StoreTile&& store_tile, int64_t outs, int64_t rows, float* y,
                          int64_t y_stride) {
  alignas(64) __m512i m[16];
  store_tile(m);
  transpose16(m);
  const auto mask = static_cast<__mmask16>((1u << outs) - 1);
  for (int64_t r = 0; r < rows; ++r) _mm512_mask_storeu_epi32(y + r * y_stride, mask, m[r]);
}

template <bool kTwoW, bool kTwoX>
SK_INLINE void amx_step(const bf16* w, int64_t w_bytes, const bf16* x0, int64_t x0_bytes,
                        const bf16* x1, int64_t x1_bytes) {
  SK_TILE_LOAD(4, w, w_bytes);
  SK_TILE_LOAD(6, x0, x0_bytes);
  SK_TILE_DOT(0, 4, 6);
  if constexpr (kTwoW) {
    SK_TILE_LOAD(5, reinterpret_cast<const char*>(w) + 16 * w_bytes, w_bytes);
    SK_TILE_DOT(2, 5, 6);
  }
  if constexpr (kTwoX) {
    SK_TILE_LOAD(7, x1, x1_bytes);
    SK_TILE_DOT(1, 4, 7);
    if constexpr (kTwoW) SK_TILE_DOT(3, 5, 7);
  }
}

template <bool kTwoW, bool kTwoX>
void amx_block(const MoeProduct& p, const bf16* x, int64_t first_row) {
  const auto* w = static_cast<const bf16*>(p.w);
  const int64_t depth = moe_packed_depth(p.depth);
  const int64_t outs0 = p.num_outs < 16 ? p.num_outs : 16;
  const int64_t outs1 = p.num_outs - outs0;
  const int64_t left = p.num_rows - first_row;
  const int64_t rows0 = left < 16 ? left : 16;
  const int64_t rows1 = left - rows0 < 16 ? left - rows0 : 16;
  TileConfig config;
  config.set(0, outs0, rows0 * 4);
  config.set(4, outs0, 64);
  config.set(6, 16, rows0 * 4);
  if (kTwoW) {
    config.set(2, outs1, rows0 * 4);
    config.set(5, outs1, 64);
  }
  if (kTwoX) {
    config.set(1, outs0, rows1 * 4);
    config.set(7, 16, rows1 * 4);
    if (kTwoW) config.set(3, outs1, rows1 * 4);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
  SK_TILE_ZERO(0);
  if constexpr (kTwoW) SK_TILE_ZERO(2);
  if constexpr (kTwoX) SK_TILE_ZERO(1);
  if constexpr (kTwoW && kTwoX) SK_TILE_ZERO(3);

  const bf16* x0 = x + first_row * depth;
  const bf16* x1 = x0 + 16 * depth;
  const int64_t w_bytes = p.w_stride * 2;
  int64_t k = 0;
  for (; k + kMoePackDepth <= p.depth; k += kMoePackDepth) {
    amx_step<kTwoW, kTwoX>(w + k, w_bytes, x0 + k * rows0, rows0 * 4, x1 + k * rows1, rows1 * 4);
  }
  if (k < p.depth) {
    // The end of a weight row is not a multiple of the tile: a copy padded with zeros, since what
    // follows in memory may be anything, or nothing.
    alignas(64) bf16 tail[kMoeBlock * kMoePackDepth];
    const auto mask = static_cast<__mmask32>((1u << (p.depth - k)) - 1);
    for (int64_t o = 0; o < p.num_outs; ++o) {
      _mm512_store_si512(tail + o * kMoePackDepth,
                         _mm512_maskz_loadu_epi16(mask, w + o * p.w_stride + k));
    }
    amx_step<kTwoW, kTwoX>(tail, kMoePackDepth * 2, x0 + k * rows0, rows0 * 4, x1 + k * rows1,
                           rows1 * 4);
  }

  float* y = p.y + first_row * p.y_stride;
  write_tile([](void* b) { SK_TILE_STORE(0, b, 64); }, outs0, rows0, y, p.y_stride);
  if constexpr (kTwoW)
    write_tile([](void* b) { SK_TILE_STORE(2, b, 64); }, outs1, rows0, y + 16, p.y_stride);
  if constexpr (kTwoX) {
    y += 16 * p.y_stride;
    write_tile([](void* b) { SK_TILE_STORE(1, b, 64); }, outs0, rows1, y, p.y_stride);
    if constexpr (kTwoW)
      write_tile([](void* b) { SK_TILE_STORE(3, b, 64); }, outs1, rows1, y + 16, p.y_stride);
  }
}

void amx_product(const MoeProduct& p) {
  const auto* x = static_cast<const bf16*>(p.x);
  for (int64_t r = 0; r < p.num_rows; r += 2 * kMoePackRows) {
    const bool two_x = p.num_rows - r > kMoePackRows;
    if (p.num_outs > 16) {
      two_x ? amx_block<true, true>(p, x, r) : amx_block<true, false>(p, x, r);
    } else {
      two_x ? amx_block<false, true>(p, x, r) : amx_block<false, false>(p, x, r);
    }
  }
}
#endif

SK_INLINE F32x16 sigmoid(F32x16 x) { return 1.0f / (exp(-x) + 1.0f); }

}  // namespace

void moe_product(const MoeProduct& p, MoeForm form) {
  switch (form) {
    case MoeForm::kF32:
      return product<FusedMultiply<float>>(p);
    case MoeForm::kWiden:
      return product<FusedMultiply<bf16>>(p);
    case MoeForm::kInt4:
      return product<Int4Multiply>(p);
#if SK_BF16_FORMS
    case MoeForm::kBf16Dot:
      return product<Bf16Dot>(p);
    case MoeForm::kAmx:
      return amx_product(p);
#else
    default:
      __builtin_trap();  // never asked for: the machine has no such form
#endif
  }
}

void moe_release_tiles() {
#if SK_BF16_FORMS
  asm volatile("tilerelease" ::);
#endif
}

void moe_pack(const uint16_t* x, int64_t x_stride, const int64_t* x_index, int64_t num_rows,
              int64_t depth, uint16_t* packed) {
#if SK_BF16_FORMS
  const int64_t padded = moe_packed_depth(depth);
  for (int64_t first = 0; first < num_rows; first += kMoePackRows) {
    const int64_t rows = num_rows - first < kMoePackRows ? num_rows - first : kMoePackRows;
    const auto columns = static_cast<__mmask16>((1u << rows) - 1);
    uint16_t* group = packed + first * padded;
    for (int64_t k = 0; k < padded; k += kMoePackDepth) {
      const int64_t left = depth - k < kMoePackDepth ? depth - k : kMoePackDepth;
      const auto elements = static_cast<__mmask32>((uint64_t{1} << left) - 1);
      __m512i m[16] = {};
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = x_index ? x_index[first + r] : first + r;
        m[r] = _mm512_maskz_loadu_epi16(elements, x + row * x_stride + k);
      }
      transpose16(m);
      for (int pair = 0; pair < 16; ++pair) {
        _mm512_mask_storeu_epi32(group + k * rows + 2 * pair * rows, columns, m[pair]);
      }
    }
  }
#else
  __builtin_trap();  // packed rows are for kAmx alone
#endif
}

void moe_widen(const uint16_t* x, int64_t n, float* y) {
  const bf16* from = reinterpret_cast<const bf16*>(x);
  for (int64_t i = 0; i < n; i += kLanes) store_up_to(y + i, load_up_to(from + i, n - i), n - i);
}

void moe_sigmoid(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store_up_to(x + i, sigmoid(load_up_to(x + i, n - i)), n - i);
}

void moe_activate(const float* gate, const float* up, int64_t n, Float dtype, bool narrow,
                  void* act) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    const F32x16 g = load_up_to(gate + i, left);
    F32x16 a = g * sigmoid(g) * load_up_to(up + i, left);
    if (dtype == Float::kBf16) a = round_to<bf16>(a);
    if (narrow) {
      store_up_to(static_cast<bf16*>(act) + i, a, left);
    } else {
      store_up_to(static_cast<float*>(act) + i, a, left);
    }
  }
}

void moe_combine(const float* const* rows, const float* weights, int64_t num_rows,
                 const float* shared, int64_t n, Float dtype, void* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t left = n - i;
    F32x16 sum = {};
    for (int64_t r = 0; r < num_rows; ++r)
      sum = fma(splat(weights[r]), load_up_to(rows[r] + i, left), sum);
    if (shared) sum = sum + load_up_to(shared + i, left);
    if (dtype == Float::kBf16) {
      store_up_to(static_cast<bf16*>(out) + i, sum, left);
    } else {
      store_up_to(static_cast<float*>(out) + i, sum, left);
    }
  }
}

}  // namespace SK_ISA
}  // namespace spec_kernels
