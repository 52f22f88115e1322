// Included by tree_attention_cpu_kernels.cpp once for each SK_MATH; no include guard, for that
// reason.
//
// A leaf of keys is packed once and serves every row of the job. Keys are packed transposed, in
// groups of 16: word u of group g holds unit u of its 16 keys, where a unit is one fp32, or a pair
// of bf16 for the dot and AMX forms. Values are packed only where their form must change: to fp32
// for anything narrower under FMA, to pairs of keys for dot and AMX. Packing is where every cache
// type becomes one of these two, exactly: what follows knows no other. C is the cache's type, Q the
// type of queries and outputs.
namespace {

#if SK_MATH == SK_MATH_FMA
typedef float Weight;        // type of a softmax weight on its way into the second product
constexpr int kKeyStep = 1;  // keys that the second product takes at a time
#else
typedef bf16 Weight;
constexpr int kKeyStep = 32;
#endif
// Not powers of two, so that rows do not share cache sets; whole cache lines, so that a tile row is
// one.
constexpr int64_t kScoreStride = kLeafKeys + 16;
constexpr int64_t kWeightStride = SK_MATH == SK_MATH_FMA ? kScoreStride : kLeafKeys + 32;

// Partial result of `num_rows` rows, in caller's memory.
struct Partial {
  float* max;
  float* sum;
  float* acc;

  Partial(const TreeAttentionArgs& a, int64_t num_rows, float* memory)
      : max(memory), sum(memory + round_up(num_rows, 16)), acc(sum + round_up(num_rows, 16)) {}
};

struct Work {
  const TreeAttentionArgs& a;
  const AttentionJob& job;
  int64_t num_rows, key_units, key_words, columns;
  float score_scale;  // of a product of a query and a key as it is stored
  uint32_t* q;        // [rows up to a multiple of 32][key_words]
  uint32_t* keys;     // [16 groups][key_words][16]
  uint32_t* values;
  float* scores;          // [kTileRows][kScoreStride]
  Weight* weights;        // [kTileRows][kWeightStride]; fp32 weights overwrite the scores
  const void** key_rows;  // [kLeafKeys], null where no row looks
  const void** value_rows;
  const float** packed_rows;  // [kLeafKeys], rows of `values`; used under FMA
  float* levels;
  int tile_rows[2] = {-1, -1};  // rows for which the AMX tiles stand configured

  Work(const TreeAttentionArgs& args, const AttentionJob& the_job, float* scratch)
      : a(args),
        job(the_job),
        num_rows(the_job.num_nodes * args.group),
        columns(packed_columns(args)),
        score_scale(args.scale * head_scale(args.k_scale, args.k_scale_stride, the_job.kv_head)) {
    key_units = SK_MATH == SK_MATH_FMA ? a.k_dim : (a.k_dim + 1) / 2;
    key_words = round_up(key_units, 16);
    float* at = scratch;
    const auto take = [&](int64_t floats) {
      float* p = at;
      at += floats;
      return p;
    };
    q = reinterpret_cast<uint32_t*>(take(round_up(num_rows, kTileRows) * key_words));
    keys = reinterpret_cast<uint32_t*>(take(kLeafKeys * key_words));
    values = reinterpret_cast<uint32_t*>(take((kLeafKeys + 1) * columns));
    scores = take(kTileRows * kScoreStride);
    weights =
        reinterpret_cast<Weight*>(SK_MATH == SK_MATH_FMA ? scores : take(kTileRows * kScoreStride));
    key_rows = reinterpret_cast<const void**>(take(2 * kLeafKeys));
    value_rows = reinterpret_cast<const void**>(take(2 * kLeafKeys));
    packed_rows = reinterpret_cast<const float**>(take(2 * kLeafKeys));
    for (int64_t i = 0; i < kLeafKeys; ++i)
      packed_rows[i] = reinterpret_cast<const float*>(values) + i * columns;
    levels = at;
  }

  Partial level(int64_t i) const {
    return Partial(a, num_rows, levels + i * partial_floats(a, num_rows));
  }
};

// ---- packing

template <class Q>
void pack_query(const Work& w) {
  const TreeAttentionArgs& a = w.a;
  for (int64_t r = 0; r < w.num_rows; ++r) {
    const int64_t head = w.job.kv_head * a.group + r % a.group;
    uint32_t* out = w.q + r * w.key_words;
    std::memset(out, 0, static_cast<size_t>(w.key_words) * sizeof(uint32_t));
    int64_t at = 0;
    for (int piece = 0; piece < 2; ++piece) {
      const int64_t num = a.q_dim[piece];
      if (num == 0) continue;
      const int64_t* stride = a.q_stride[piece];
      const Q* in = static_cast<const Q*>(a.q[piece]) + w.job.request * stride[0] +
                    w.job.nodes[r / a.group].row * stride[1] + head * stride[2];
#if SK_MATH == SK_MATH_FMA
      float* to = reinterpret_cast<float*>(out) + at;
      int64_t i = 0;
      for (; i + 16 <= num; i += 16) store(to + i, load(in + i));
      if (i < num) store_partial(to + i, load_partial(in + i, num - i), num - i);
#else
      std::memcpy(reinterpret_cast<Q*>(out) + at, in, static_cast<size_t>(num) * sizeof(Q));
#endif
      at += num;
    }
  }
}

// Points key_rows and value_rows of leaf positions [begin, end) at the cache. `node` gives the path
// of positions from the context on; null means that tree slots stand in the order of positions.
void resolve(const Work& w, int64_t start, int64_t begin, int64_t end, const AttentionNode* node) {
  const TreeAttentionArgs& a = w.a;
  const AttentionJob& job = w.job;
  const int64_t table = job.request * a.table_stride[0];
  const int64_t item = float_size(a.cache_dtype);
  const char* k = static_cast<const char*>(a.k) + job.kv_head * a.k_stride[2] * item;
  const char* v = static_cast<const char*>(a.v) + job.kv_head * a.v_stride[2] * item;
  const int64_t k_step = a.k_stride[1] * item, v_step = a.v_stride[1] * item;
  const bool scattered = node && !node->is_chain;
  int64_t i = begin;
  while (i < end) {
    const int64_t position = start + i;
    int64_t logical = position;
    int64_t run = end - i;
    if (scattered && position >= job.context) {
      logical = job.context + job.slots[node->path + position - job.context];
      run = 1;
    } else if (scattered) {
      run = least(run, job.context - position);
    }
    const int64_t slot = logical % a.page;
    run = least(run, a.page - slot);
    const int64_t entry = table + logical / a.page * a.table_stride[1];
    const int64_t page = a.wide_tables ? static_cast<const int64_t*>(a.tables)[entry]
                                       : static_cast<const int32_t*>(a.tables)[entry];
    const char* key = k + page * a.k_stride[0] * item + slot * k_step;
    const char* value = v + page * a.v_stride[0] * item + slot * v_step;
    for (const int64_t stop = i + run; i < stop; ++i, key += k_step, value += v_step) {
      w.key_rows[i] = key;
      w.value_rows[i] = value;
    }
  }
}

// Nobody looks at leaf positions [begin, end): they are packed as zeros.
void resolve_none(const Work& w, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) w.key_rows[i] = w.value_rows[i] = nullptr;
}

SK_INLINE bool all_point(const void* const* rows, int num) {
  bool all = true;
  for (int i = 0; i < num; ++i) all = all && rows[i];
  return all;
}

// load_words: words u .. u+15 of a row of `num` elements, zeros beyond its end.
#if SK_MATH == SK_MATH_FMA
template <class C>
SK_INLINE void load_words(const C* in, int64_t u, int64_t num, uint32_t* out) {
  const F32x16 v = num - u >= 16 ? load(in + u) : load_partial(in + u, num - u);
  std::memcpy(out, &v, 64);
}
#else
// fp8 to bf16, exactly: the exponent's bias moves from 7 to 127, the eight subnormals are looked
// up.
SK_INLINE __m512i to_bf16_bits(__m256i fp8_bits) {
  const __m512i x = _mm512_cvtepu8_epi16(fp8_bits);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
  const __m512i normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3c00));
  const __m512i subnormal = _mm512_castsi128_si512(
      _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  __m512i bits = _mm512_mask_permutexvar_epi16(
      normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, subnormal);
  bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epu16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                               _mm512_set1_epi16(0x7fc0));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8);
  return _mm512_or_si512(bits, sign);
}

// Thirty-two adjacent elements as bf16; with a mask, only those inside exist, the others are zero.
SK_INLINE __m512i load_pairs(const bf16* in) { return _mm512_loadu_si512(in); }
SK_INLINE __m512i load_pairs(const bf16* in, __mmask32 inside) {
  return _mm512_maskz_loadu_epi16(inside, in);
}
SK_INLINE __m512i load_pairs(const fp8* in) {
  return to_bf16_bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
}
SK_INLINE __m512i load_pairs(const fp8* in, __mmask32 inside) {
  return to_bf16_bits(_mm256_maskz_loadu_epi8(inside, in));
}

template <class C>
SK_INLINE void load_words(const C* in, int64_t u, int64_t num, uint32_t* out) {
  const int64_t rest = num - 2 * u;
  _mm512_storeu_si512(
      out, rest >= 32 ? load_pairs(in + 2 * u) : load_pairs(in + 2 * u, (1u << rest) - 1));
}
#endif

template <class C>
void pack_keys(const Work& w, int64_t first_group, int64_t end_group) {
  // Words that can be read in place: same units in memory, a whole block of 16 inside the row.
  const int64_t in_place =
      sizeof(C) == (SK_MATH == SK_MATH_FMA ? 4 : 2) ? w.a.k_dim * sizeof(C) / 64 * 16 : 0;
  for (int64_t g = first_group; g < end_group; ++g) {
    const void* const* rows = w.key_rows + g * 16;
    uint32_t* out = w.keys + g * w.key_words * 16;
    int64_t u = 0;
    if (all_point(rows, 16)) {
      // Sixteen rows at once are more streams than hardware follows; a prefetch of null is
      // harmless.
      const void* const* next = rows + (g + 1 < end_group ? 16 : 0);
      for (; u < in_place; u += 16) {
        for (int i = 0; i < 16; ++i) __builtin_prefetch(static_cast<const uint32_t*>(next[i]) + u);
        transpose(RowsAt{rows, u}, out + u * 16);
      }
    }
    for (; u < w.key_words; u += 16) {
      uint32_t words[16 * 16] = {};
      for (int i = 0; i < 16; ++i) {
        if (rows[i]) load_words(static_cast<const C*>(rows[i]), u, w.a.k_dim, words + 16 * i);
      }
      transpose(Block{words}, out + u * 16);
    }
  }
}

// Values of leaf positions [begin, end), both multiples of kKeyStep; under FMA rows nobody sees are
// never read.
#if SK_MATH == SK_MATH_FMA
template <class C>
void pack_values(const Work& w, int64_t begin, int64_t end) {
  if constexpr (sizeof(C) == sizeof(float)) return;  // read where they stand
  const int64_t full = w.a.v_dim / 16 * 16;
  for (int64_t i = begin; i < end; ++i) {
    const C* in = static_cast<const C*>(w.value_rows[i]);
    if (!in) continue;
    float* out = reinterpret_cast<float*>(w.values) + i * w.columns;
    for (int64_t c = 0; c < full; c += 16) store(out + c, load(in + c));
    if (full < w.a.v_dim) store(out + full, load_partial(in + full, w.a.v_dim - full));
  }
}
#else
// Tile of columns 16 t .. of the 32 keys from 32 s on, as words that each hold a pair of keys. The
// product walks s, so that is the inner order; the spare line keeps stores to neighbouring t out of
// one cache set. Within each 32 columns the unpack instructions deal quads alternately to the two
// tiles; `finish` deals them back.
constexpr int64_t kTileColumn = kLeafKeys / 32 * 256 + 16;
SK_INLINE int64_t value_tile(int64_t s, int64_t t) { return t * kTileColumn + s * 256; }

// Columns c .. c+31 of 32 keys; only those `inside` exist, and without kWhole a row may be null.
// Loads that are masked out altogether still need a mapped address: at null each costs a trap into
// microcode.
template <bool kWhole, class C>
SK_INLINE void pack_value_block(const void* const* rows, int64_t c, __mmask32 inside,
                                uint32_t* out) {
  const auto row = [&](int i) {
    if (kWhole) return load_pairs(static_cast<const C*>(rows[i]) + c);
    return load_pairs(rows[i] ? static_cast<const C*>(rows[i]) + c : reinterpret_cast<C*>(out),
                      rows[i] ? inside : 0);
  };
  for (int i = 0; i < 32; i += 2, out += 16) {
    const __m512i x = row(i), y = row(i + 1);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(x, y));
    _mm512_storeu_si512(out + kTileColumn, _mm512_unpackhi_epi16(x, y));
  }
}

template <class C>
void pack_values(const Work& w, int64_t begin, int64_t end) {
  const int64_t full = w.a.v_dim / 32 * 32;
  for (int64_t s = begin / 32; s < end / 32; ++s) {
    const void* const* rows = w.value_rows + s * 32;
    int64_t c = 0;
    if (all_point(rows, 32)) {
      for (; c < full; c += 32)
        pack_value_block<true, C>(rows, c, 0xffffffffu, w.values + value_tile(s, c / 16));
    }
    for (; c < w.columns; c += 32) {
      const __mmask32 inside = w.a.v_dim - c >= 32 ? 0xffffffffu : (1u << (w.a.v_dim - c)) - 1;
      pack_value_block<false, C>(rows, c, inside, w.values + value_tile(s, c / 16));
    }
  }
}
#endif

template <class C>
bool values_finite(const Work& w, int64_t begin, int64_t end) {
  const int64_t full = w.a.v_dim / 16 * 16;
  for (int64_t i = begin; i < end; ++i) {
    const C* in = static_cast<const C*>(w.value_rows[i]);
    F32x16 sum = {};
    for (int64_t c = 0; c < full; c += 16) {
      const F32x16 v = load(in + c);
      sum = sum + (v - v);
    }
    if (full < w.a.v_dim) {
      const F32x16 v = load_partial(in + full, w.a.v_dim - full);
      sum = sum + (v - v);
    }
    if (!is_finite(sum)) return false;
  }
  return true;
}

// ---- products

#if SK_MATH == SK_MATH_AMX

// Tiles 0-3: results [row half][column half]; 4, 5: left operands of the row halves; 6, 7: right
// operands.
void configure(Work& w, int rows) {
  const int half[2] = {rows < 16 ? rows : 16, rows < 16 ? 0 : rows - 16};
  if (half[0] == w.tile_rows[0] && half[1] == w.tile_rows[1]) return;
  w.tile_rows[0] = half[0];
  w.tile_rows[1] = half[1];
  struct __attribute__((packed)) {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  const uint8_t second = static_cast<uint8_t>(half[1] ? half[1] : 1);
  const uint8_t shape[8] = {static_cast<uint8_t>(half[0]),
                            static_cast<uint8_t>(half[0]),
                            second,
                            second,
                            static_cast<uint8_t>(half[0]),
                            second,
                            16,
                            16};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = shape[i];
    config.bytes[i] = 64;
  }
  _tile_loadconfig(&config);
}

// c[rows][32] = sum over steps of a[rows][step] * b[step][32]: rows of `a` are `a_stride` bytes
// apart and advance 64 bytes a step; right-hand tiles follow each other. `lower`: rows beyond 16;
// `two`: columns beyond 16.
SK_INLINE void tile_product(const void* a, int64_t a_stride, const uint32_t* b0, const uint32_t* b1,
                            int64_t steps, bool lower, bool two, float* c, int64_t c_stride) {
  const char* left = static_cast<const char*>(a);
  _tile_zero(0);
  if (two) _tile_zero(1);
  if (lower) _tile_zero(2);
  if (lower && two) _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, b0 + s * 256, 64);
    _tile_loadd(4, left + s * 64, a_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (lower) {
      _tile_loadd(5, left + 16 * a_stride + s * 64, a_stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (two) {
      _tile_loadd(7, b1 + s * 256, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (lower) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_stride * 4);
  if (two) _tile_stored(1, c + 16, c_stride * 4);
  if (lower) _tile_stored(2, c + 16 * c_stride, c_stride * 4);
  if (lower && two) _tile_stored(3, c + 16 * c_stride + 16, c_stride * 4);
}

void score_tile(Work& w, int64_t row, int rows, int64_t first_group, int64_t end_group) {
  configure(w, rows);
  for (int64_t g = first_group; g < end_group; g += 2) {
    const uint32_t* b = w.keys + g * w.key_words * 16;
    tile_product(w.q + row * w.key_words, w.key_words * 4, b, b + w.key_words * 16,
                 w.key_words / 16, rows > 16, g + 1 < end_group, w.scores + g * 16, kScoreStride);
  }
}

void value_tile_product(Work& w, int rows, int64_t begin, int64_t end, float* acc) {
  configure(w, rows);
  const int64_t s0 = begin / 32;
  const int64_t steps = (end + 31) / 32 - s0;
  for (int64_t t = 0; t < w.columns / 16; t += 2) {
    const uint32_t* b = w.values + value_tile(s0, t);
    tile_product(w.weights + s0 * 32, kWeightStride * 2, b, b + kTileColumn, steps, rows > 16, true,
                 acc + t * 16, w.columns);
  }
}

#else

// Sums stay in vectors of the machine's own width, kPieces of them for 16 lanes: compilers keep
// wider ones in memory.
#if SK_MATH == SK_MATH_DOT
typedef uint32_t Broadcast;
SK_INLINE F32Native multiply_add(Broadcast a, const uint32_t* b, F32Native c) {
  const __m512i x = _mm512_set1_epi32(static_cast<int>(a));
  return (F32x16)_mm512_dpbf16_ps((__m512)c, (__m512bh)x, (__m512bh)_mm512_loadu_si512(b));
}
#else
typedef float Broadcast;
SK_INLINE F32Native multiply_add(Broadcast a, const float* b, F32Native c) {
#if defined(__AVX512F__)
  return fma(splat(a), load(b), c);
#elif defined(__FMA__)
  return (F32Native)_mm256_fmadd_ps(_mm256_set1_ps(a), _mm256_loadu_ps(b), (__m256)c);
#else
  F32Native x;
  std::memcpy(&x, b, sizeof(x));
  return a * x + c;
#endif
}
#endif

SK_INLINE void store_pieces(float* out, const F32Native* pieces) {
  for (int p = 0; p < kPieces; ++p)
    std::memcpy(out + p * kNativeLanes, pieces + p, sizeof(F32Native));
}

// How many rows and sixteens of results stay in registers, by instruction set.
#if defined(__AVX512F__)
constexpr int kRows = 8;
#else
constexpr int kRows = 2;
#endif
template <int kNum>
struct Vectors {
#if defined(__AVX512F__)
  static constexpr int value = kNum <= 2 ? 8 : kNum <= 4 ? 6 : kNum <= 6 ? 4 : 3;
#else
  static constexpr int value = kPieces > 2 ? 1 : 2;
#endif
};

template <int kNum>
struct Constant {
  static constexpr int value = kNum;
};

// Calls f with n, 1 to kNum, as a constant.
template <int kNum, class F>
SK_INLINE void with_rows(int n, const F& f) {
  if constexpr (kNum > 1) {
    if (n < kNum) return with_rows<kNum - 1>(n, f);
  }
  f(Constant<kNum>{});
}

// Covers [begin, end) with calls of f(at, constant): as many of kNum as fit, then of half as many,
// down to one.
template <int kNum, class F>
SK_INLINE void cover(int64_t begin, int64_t end, const F& f) {
  for (; begin + kNum <= end; begin += kNum) f(begin, Constant<kNum>{});
  if constexpr (kNum > 1) cover<kNum / 2>(begin, end, f);
}

// scores[r][16 v ..] = sum over units of q[r][unit] * keys[group v][unit]
template <int kNum, int kVectors>
void score_block(const Broadcast* q, int64_t q_stride, const Broadcast* keys, int64_t key_words,
                 int64_t key_units, float* scores) {
  F32Native sum[kNum][kVectors][kPieces] = {};
  for (int64_t u = 0; u < key_units; ++u) {
#pragma GCC unroll 8
    for (int r = 0; r < kNum; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int p = 0; p < kPieces; ++p) {
          sum[r][v][p] =
              multiply_add(q[r * q_stride + u], keys + (v * key_words + u) * 16 + p * kNativeLanes,
                           sum[r][v][p]);
        }
      }
    }
  }
  for (int r = 0; r < kNum; ++r) {
    for (int v = 0; v < kVectors; ++v) store_pieces(scores + r * kScoreStride + v * 16, sum[r][v]);
  }
}

void score_tile(Work& w, int64_t row, int rows, int64_t first_group, int64_t end_group) {
  const Broadcast* keys = reinterpret_cast<const Broadcast*>(w.keys);
  for (int r = 0; r < rows; r += kRows) {
    const Broadcast* q = reinterpret_cast<const Broadcast*>(w.q) + (row + r) * w.key_words;
    float* scores = w.scores + r * kScoreStride;
    with_rows<kRows>(rows - r < kRows ? rows - r : kRows, [&](auto num) {
      constexpr int kNum = decltype(num)::value;
      cover<Vectors<kNum>::value>(first_group, end_group, [&](int64_t g, auto vectors) {
        score_block<kNum, decltype(vectors)::value>(q, w.key_words, keys + g * w.key_words * 16,
                                                    w.key_words, w.key_units, scores + g * 16);
      });
    });
  }
}

#if SK_MATH == SK_MATH_FMA

// acc[r][column ..] = sum over keys [begin, end), in ascending order, of weight[r][key] *
// value[key][column ..]
template <int kNum, int kVectors, bool kTail>
void value_block(const Work& w, const float* const* rows, const float* weights, int64_t begin,
                 int64_t end, int64_t column, float* acc) {
  F32Native sum[kNum][kVectors][kPieces] = {};
  const int64_t rest = w.a.v_dim - column;
  for (int64_t i = begin; i < end; ++i) {
    const float* value = rows[i] + column;
    float tail[16] = {};
    if constexpr (kTail) {
      std::memcpy(tail, value, static_cast<size_t>(rest) * sizeof(float));
      value = tail;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kNum; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int p = 0; p < kPieces; ++p) {
          sum[r][v][p] = multiply_add(weights[r * kWeightStride + i],
                                      value + v * 16 + p * kNativeLanes, sum[r][v][p]);
        }
      }
    }
  }
  for (int r = 0; r < kNum; ++r) {
    for (int v = 0; v < kVectors; ++v)
      store_pieces(acc + r * w.columns + column + v * 16, sum[r][v]);
  }
}

void value_tile_product(Work& w, int rows, int64_t begin, int64_t end, float* acc) {
  const int64_t full = w.a.v_dim / 16 * 16;
  const float* const* const values = w.a.cache_dtype == Float::kF32
                                         ? reinterpret_cast<const float* const*>(w.value_rows)
                                         : w.packed_rows;
  for (int r = 0; r < rows; r += kRows) {
    const float* weights = w.weights + r * kWeightStride;
    float* out = acc + r * w.columns;
    with_rows<kRows>(rows - r < kRows ? rows - r : kRows, [&](auto num) {
      constexpr int kNum = decltype(num)::value;
      cover<Vectors<kNum>::value>(0, full / 16, [&](int64_t v, auto vectors) {
        value_block<kNum, decltype(vectors)::value, false>(w, values, weights, begin, end, v * 16,
                                                           out);
      });
      if (full < w.a.v_dim) value_block<kNum, 1, true>(w, values, weights, begin, end, full, out);
    });
  }
}

#else

template <int kNum, int kVectors>
void value_block(const Work& w, const bf16* weights, int64_t begin, int64_t end, int64_t tile,
                 float* acc) {
  F32x16 sum[kNum][kVectors] = {};
  for (int64_t i = begin; i < end; i += 2) {
    const uint32_t* values = w.values + value_tile(i / 32, tile) + (i % 32) / 2 * 16;
#pragma GCC unroll 8
    for (int r = 0; r < kNum; ++r) {
      uint32_t pair;
      std::memcpy(&pair, weights + r * kWeightStride + i, sizeof(pair));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sum[r][v] = multiply_add(pair, values + v * kTileColumn, sum[r][v]);
    }
  }
  for (int r = 0; r < kNum; ++r) {
    for (int v = 0; v < kVectors; ++v) store(acc + r * w.columns + (tile + v) * 16, sum[r][v]);
  }
}

void value_tile_product(Work& w, int rows, int64_t begin, int64_t end, float* acc) {
  const int64_t tiles = w.columns / 16;
  begin = begin / 2 * 2;
  end = round_up(end, 2);
  for (int r = 0; r < rows; r += kRows) {
    const bf16* weights = w.weights + r * kWeightStride;
    float* out = acc + r * w.columns;
    with_rows<kRows>(rows - r < kRows ? rows - r : kRows, [&](auto num) {
      constexpr int kNum = decltype(num)::value;
      cover<Vectors<kNum>::value>(0, tiles, [&](int64_t t, auto vectors) {
        value_block<kNum, decltype(vectors)::value>(w, weights, begin, end, t, out);
      });
    });
  }
}

#endif
#endif

// ---- softmax

SK_INLINE void store_weights(float* out, F32x16 p) { store(out, p); }
SK_INLINE void store_weights(bf16* out, F32x16 p) {
#if SK_MATH != SK_MATH_FMA
  const __m256bh h = _mm512_cvtneps_pbh((__m512)p);
  std::memcpy(out, &h, 32);
#else
  store(out, p);
#endif
}

// Scores of leaf positions [begin, end), multiples of 16, to weights exp(score - max); only [first,
// last) is visible. Lane i of the running sum takes the positions that are i modulo 16.
SK_INLINE void softmax_row(const Work& w, float* scores, Weight* weights, int64_t begin,
                           int64_t end, int64_t first, int64_t last, float* max_out,
                           float* sum_out) {
  const I32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t seen_begin = first / 16 * 16;
  const int64_t seen_end = round_up(last, 16);
  F32x16 top = splat(-kInf);
  for (int64_t i = seen_begin; i < seen_end; i += 16) {
    F32x16 s = load(scores + i) * w.score_scale;
    if (w.a.logit_cap > 0) s = tanh(s / w.a.logit_cap) * w.a.logit_cap;
    if (i < first || i + 16 > last) {
      const I32x16 position = lane + static_cast<int32_t>(i);
      s = (position >= static_cast<int32_t>(first)) & (position < static_cast<int32_t>(last))
              ? s
              : splat(-kInf);
    }
    store(scores + i, s);
    top = max(top, s);
  }
  const float row_max = first < last ? reduce_max(top) : -kInf;
  const F32x16 shift = splat(row_max == -kInf ? 0.0f : row_max);
  F32x16 sum = {};
  for (int64_t i = begin; i < end; i += 16) {
    F32x16 p = {};
    if (i >= seen_begin && i < seen_end) {
      p = exp_weight(load(scores + i) - shift);
      sum = sum + p;
    }
    store_weights(weights + i, p);
  }
  *sum_out = reduce_add(sum);
  // The maximum passes over a NaN, and -inf means that nothing was seen: neither a NaN score nor
  // scores of -inf alone, whose values may be NaN, must look so.
  *max_out = *sum_out != *sum_out               ? *sum_out
             : first < last && row_max == -kInf ? -kMaxFloat
                                                : row_max;
}

// ---- leaves

SK_INLINE int64_t clip(int64_t position, int64_t start) {
  return least(most(position - start, 0), kLeafKeys);
}

// Rows [row, end) against the packed leaf; what each sees is its own range, clipped to the leaf.
void attend_rows(Work& w, int64_t start, int64_t row, int64_t end, const Partial& out) {
  const int64_t group = w.a.group;
  for (; row < end; row += kTileRows) {
    const int rows = static_cast<int>(least(kTileRows, end - row));
    int64_t first[kTileRows], last[kTileRows];
    int64_t begin = kLeafKeys, stop = 0;
    for (int r = 0; r < rows; ++r) {
      const AttentionNode& node = w.job.nodes[(row + r) / group];
      first[r] = clip(node.first, start);
      last[r] = clip(node.last + 1, start);
      if (first[r] < last[r]) {
        begin = least(begin, first[r]);
        stop = most(stop, last[r]);
      }
    }
    if (begin >= stop) {
      for (int r = 0; r < rows; ++r) {
        out.max[row + r] = -kInf;
        out.sum[row + r] = 0.0f;
      }
      continue;
    }
    score_tile(w, row, rows, begin / 16, (stop + 15) / 16);
    const int64_t wide = kKeyStep > 16 ? kKeyStep : 16;
    for (int r = 0; r < rows; ++r) {
      softmax_row(w, w.scores + r * kScoreStride, w.weights + r * kWeightStride,
                  begin / wide * wide, round_up(stop, wide), first[r], last[r], out.max + row + r,
                  out.sum + row + r);
    }
    value_tile_product(w, rows, begin, stop, out.acc + row * w.columns);
  }
}

template <class C>
void pack(const Work& w, int64_t begin, int64_t end) {
  // Keys and values in turns: of a latent cache they are the same lines.
  for (int64_t i = begin / 32 * 32; i < end; i += 32) {
    pack_keys<C>(w, most(begin, i) / 16, (least(end, i + 32) + 15) / 16);
    pack_values<C>(w, kKeyStep == 32 ? i : most(begin, i),
                   kKeyStep == 32 ? i + 32 : least(end, i + 32));
  }
}

// Points at [begin, end) and packs it, with zeros around it up to whole groups.
template <class C>
void pack_range(const Work& w, int64_t start, int64_t begin, int64_t end,
                const AttentionNode* node) {
  const int64_t step = kKeyStep > 16 ? kKeyStep : 16;
  resolve_none(w, begin / step * step, begin);
  resolve(w, start, begin, end, node);
  resolve_none(w, end, round_up(end, step));
  pack<C>(w, begin, end);
}

template <class C>
void attend_leaf(Work& w, int64_t leaf, const Partial& out) {
  const AttentionJob& job = w.job;
  const int64_t group = w.a.group;
  const int64_t start = leaf * kLeafKeys;
  const bool in_prefix = start + kLeafKeys <= job.context;
  const int64_t num_shared = in_prefix ? job.num_nodes : job.num_chain;

  // One packing serves rows that see the same keys at the same positions: all rows of a leaf inside
  // the prefix, chains elsewhere. `begin` also covers the prefix part for the nodes that are not
  // chains.
  int64_t begin = kLeafKeys, end = in_prefix ? kLeafKeys : clip(job.context, start);
  bool uniform = true;
  for (int64_t n = 0; n < job.num_nodes; ++n) begin = least(begin, clip(job.nodes[n].first, start));
  for (int64_t n = 0; n < num_shared; ++n) end = most(end, clip(job.nodes[n].last + 1, start));
  for (int64_t n = 0; n < job.num_nodes; ++n) {
    uniform = uniform && clip(job.nodes[n].first, start) == begin;
    if (n < num_shared) uniform = uniform && clip(job.nodes[n].last + 1, start) == end;
  }
  if (begin < end) {
    pack_range<C>(w, start, begin, end, nullptr);
    // A weight of zero does not silence a NaN or an infinity. Where rows see different parts of a
    // leaf that holds one, each node gets a packing of its own, in which what it does not see is
    // zero.
    if (!uniform && !values_finite<C>(w, begin, end)) {
      for (int64_t n = 0; n < job.num_nodes; ++n) {
        const int64_t first = clip(job.nodes[n].first, start),
                      last = clip(job.nodes[n].last + 1, start);
        if (first < last) pack_range<C>(w, start, first, last, job.nodes + n);
        attend_rows(w, start, n * group, (n + 1) * group, out);
      }
      return;
    }
  }
  attend_rows(w, start, 0, num_shared * group, out);
  const int64_t own_begin = most(clip(job.context, start), begin);
  for (int64_t n = num_shared; n < job.num_nodes; ++n) {
    const AttentionNode& node = job.nodes[n];
    const int64_t last = clip(node.last + 1, start);
    const int64_t first = most(own_begin, clip(node.first, start));
    if (first < last) {
      // The groups at the seam hold prefix keys too, whose pointers still stand; tree keys there
      // are another's.
      const int64_t step = kKeyStep > 16 ? kKeyStep : 16;
      resolve_none(w, begin < end ? most(first / step * step, own_begin) : first / step * step,
                   first);
      resolve(w, start, first, last, &node);
      resolve_none(w, last, round_up(last, step));
      pack<C>(w, first, last);
    }
    attend_rows(w, start, n * group, (n + 1) * group, out);
  }
}

// ---- merge

// a = a (+) b, b standing to the right of a. An empty side is the exact identity.
SK_INLINE void merge_rows(int64_t num_rows, int64_t columns, const Partial& a, const Partial& b) {
  for (int64_t r = 0; r < num_rows; ++r) {
    if (b.max[r] == -kInf) continue;
    float* left = a.acc + r * columns;
    const float* right = b.acc + r * columns;
    if (a.max[r] == -kInf) {
      std::memcpy(left, right, static_cast<size_t>(columns) * sizeof(float));
      a.max[r] = b.max[r];
      a.sum[r] = b.sum[r];
      continue;
    }
    const float top = a.max[r] > b.max[r] ? a.max[r] : b.max[r];
    F32x16 gap = {};
    gap[0] = a.max[r] - top;
    gap[1] = b.max[r] - top;
    const F32x16 factor = exp_weight(gap);
    const F32x16 x = splat(factor[0]), y = splat(factor[1]);
    for (int64_t c = 0; c < columns; c += 16)
      store(left + c, fma(load(right + c), y, load(left + c) * x));
    a.max[r] = top;
    a.sum[r] = fma(splat(b.sum[r]), y, splat(a.sum[r]) * x)[0];
  }
}

// Adds the sinks, divides by the sums and writes out and lse.
template <class Q>
void finish(const TreeAttentionArgs& a, const AttentionJob& job, const Partial& p) {
  const int64_t columns = packed_columns(a);
  const float value_scale = head_scale(a.v_scale, a.v_scale_stride, job.kv_head);
  for (int64_t r = 0; r < job.num_nodes * a.group; ++r) {
    const int64_t row = job.nodes[r / a.group].row;
    const int64_t head = job.kv_head * a.group + r % a.group;
    Q* out = static_cast<Q*>(a.out) + job.request * a.out_stride[0] + row * a.out_stride[1] +
             head * a.out_stride[2];
    float* lse =
        a.lse + job.request * a.lse_stride[0] + row * a.lse_stride[1] + head * a.lse_stride[2];
    const float* acc = p.acc + r * columns;
    const bool empty = p.max[r] == -kInf;
    float top = p.max[r], sum = empty ? 0.0f : p.sum[r], weight = 1.0f;
    if (a.sinks) {
      const float sink = a.sinks[head * a.sink_stride];
      if (sink != -kInf) {
        top = top != top || top > sink ? top : sink;  // NaN stays
        weight = exp_one(p.max[r] - top);
        sum = sum * weight + exp_one(sink - top);
      }
    }
    *lse = top == -kInf ? -kInf : top + __builtin_logf(sum);
    // Where no key has weight the values add up to zero, or to NaN.
    const F32x16 scale = splat(sum == 0.0f ? 1.0f : value_scale * weight / sum);
    for (int64_t c = 0; c < a.v_dim; c += 32) {
      F32x16 x[2] = {{}, {}};
      if (!empty) {
        x[0] = load(acc + c);
        x[1] = load(acc + c + 16);
#if SK_MATH != SK_MATH_FMA
        const __m512i even =
            _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i odd =
            _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const F32x16 low = (F32x16)_mm512_permutex2var_ps((__m512)x[0], even, (__m512)x[1]);
        x[1] = (F32x16)_mm512_permutex2var_ps((__m512)x[0], odd, (__m512)x[1]);
        x[0] = low;
#endif
      }
      for (int half = 0; half < 2; ++half) {
        const int64_t at = c + 16 * half;
        if (at >= a.v_dim) break;
        const F32x16 z = x[half] * scale;
        // What is added is zero, or NaN for an infinity. Zero makes a negative zero positive: a
        // hidden key may or may not have added one before.
        const F32x16 y = z + (z - z);
        if (a.v_dim - at >= 16) {
          store(out + at, y);
        } else {
          store_partial(out + at, y, a.v_dim - at);
        }
      }
    }
  }
}

template <class Q, class C>
void run_as(const TreeAttentionArgs& args, const AttentionJob& job, float* scratch,
            float* partial) {
  Work w(args, job, scratch);
  pack_query<Q>(w);
  int64_t depth = 0;
  for (int64_t i = 0; i < job.num_leaves; ++i) {
    const int64_t leaf = job.first_leaf + i;
    attend_leaf<C>(w, leaf, w.level(depth++));
    for (int64_t bit = leaf; bit & 1; bit >>= 1) {
      if (depth < 2) break;
      --depth;
      merge_rows(w.num_rows, w.columns, w.level(depth - 1), w.level(depth));
    }
  }
  for (; depth > 1; --depth)
    merge_rows(w.num_rows, w.columns, w.level(depth - 2), w.level(depth - 1));
#if SK_MATH == SK_MATH_AMX
  _tile_release();
#endif
  if (partial) {
    std::memcpy(partial, w.levels,
                static_cast<size_t>(partial_floats(args, w.num_rows)) * sizeof(float));
  } else {
    finish<Q>(args, job, w.level(0));
  }
}

template <class Q>
void run(const TreeAttentionArgs& args, const AttentionJob& job, float* scratch, float* partial) {
  if (args.cache_dtype == Float::kF8) return run_as<Q, fp8>(args, job, scratch, partial);
  run_as<Q, Q>(args, job, scratch, partial);
}

// Folds runs as `run` folds leaves, by absolute number: a window may let the first one be a
// right-hand sibling.
template <class Q>
void merge(const TreeAttentionArgs& args, const AttentionJob& first_job, float* partials,
           int64_t num_partials) {
  const int64_t num_rows = first_job.num_nodes * args.group;
  const int64_t size = partial_floats(args, num_rows);
  // Run 0 of this group; every run but the last is as long as the first.
  const int64_t first_run = first_job.first_leaf / first_job.num_leaves;
  int64_t stack[64];
  int64_t depth = 0;
  const auto merge_top = [&] {
    --depth;
    merge_rows(num_rows, packed_columns(args),
               Partial(args, num_rows, partials + stack[depth - 1] * size),
               Partial(args, num_rows, partials + stack[depth] * size));
  };
  for (int64_t i = 0; i < num_partials; ++i) {
    stack[depth++] = i;
    for (int64_t bit = first_run + i; (bit & 1) && depth > 1; bit >>= 1) merge_top();
  }
  while (depth > 1) merge_top();
  finish<Q>(args, first_job, Partial(args, num_rows, partials));
}

}  // namespace
