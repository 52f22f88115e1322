#include "common/rms_norm.h"
#include "common/simd.h"
#include "rope_append/rope_append.h"

namespace spec_kernels {
namespace SK_ISA {
namespace {

typedef uint64_t U64x8 __attribute__((vector_size(64)));

// Lanes 2i and 2i + 1 change places.
SK_INLINE F32x16 swap_pairs(F32x16 v) {
  const U64x8 pairs = (U64x8)v;
  return (F32x16)((pairs << 32) | (pairs >> 32));
}

template <class T>
SK_INLINE void put(T* out, F32x16 v, int64_t n, float) {
  store_up_to(out, v, n);
}

SK_INLINE void put(fp8* out, F32x16 v, int64_t n, float scale) {
  store_up_to(out, v / splat(scale), n);
}

template <class In, class Out>
void copy(const In* in, Out* out, int64_t num, float scale) {
  if constexpr (sizeof(In) == sizeof(Out)) {
    if (in == reinterpret_cast<const In*>(out)) return;  // rotated in place
  }
  for (int64_t i = 0; i < num; i += kLanes)
    put(out + i, load_up_to(in + i, num - i), num - i, scale);
}

// cos and sin stand as the layout wants them: `half` of each, or, for interleaved pairs, two of
// each with the sign of the first sine turned.
template <class In, class Out>
void rotate(const In* in, Out* out, int64_t half, bool interleaved, const float* cos,
            const float* sin, float scale) {
  if (interleaved) {
    for (int64_t i = 0; i < 2 * half; i += kLanes) {
      const F32x16 x = load_up_to(in + i, 2 * half - i);
      put(out + i, x * load(cos + i) + swap_pairs(x) * load(sin + i), 2 * half - i, scale);
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    const F32x16 x = load_up_to(in + i, n), y = load_up_to(in + half + i, n);
    const F32x16 c = load_up_to(cos + i, n), s = load_up_to(sin + i, n);
    put(out + i, x * c - y * s, n, scale);
    put(out + half + i, y * c + x * s, n, scale);
  }
}

template <class In, class Out>
void norm(const In* in, Out* out, int64_t num, const In* weight, float eps, float scale) {
  MeanSquare squares;
  for (int64_t i = 0; i < num; i += kLanes) squares.add(load_up_to(in + i, num - i));
  const F32x16 factor = splat(squares.inverse_root(num, eps));
  for (int64_t i = 0; i < num; i += kLanes) {
    const int64_t n = num - i;
    put(out + i, load_up_to(in + i, n) * factor * load_up_to(weight + i, n), n, scale);
  }
}

template <class In, class Out>
void part(const RopeAppendArgs& a, const RopePart& p, const RopeRow& r, const float* cos,
          const float* sin) {
  const In* in = static_cast<const In*>(p.in) + r.request * p.in_stride[0] + r.row * p.in_stride[1];
  Out* out = static_cast<Out*>(p.out) + (p.to_cache ? r.page : r.request) * p.out_stride[0] +
             (p.to_cache ? r.slot : r.row) * p.out_stride[1];
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const In* x = in + h * p.in_stride[2];
    Out* y = out + h * p.out_stride[2];
    const float scale = p.scale ? p.scale[h * p.scale_stride] : 1.0f;
    switch (p.rule) {
      case RopeRule::kRotate:
        rotate(x, y, a.half, a.interleaved, cos, sin, scale);
        copy(x + 2 * a.half, y + 2 * a.half, p.dim - 2 * a.half, scale);
        break;
      case RopeRule::kCopy:
        copy(x, y, p.dim, scale);
        break;
      case RopeRule::kNorm:
        norm(x, y, p.dim, static_cast<const In*>(a.norm_weight), a.eps, scale);
        break;
    }
  }
}

template <class T>
void rows(const RopeAppendArgs& a, const RopeRow* rows, int64_t num_rows, float* scratch) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* cos = a.cos_sin + rows[i].position * a.cos_sin_stride;
    const float* sin = cos + a.half;
    if (a.interleaved) {
      float* twice_cos = scratch;
      float* signed_sin = scratch + 2 * a.half + kLanes;
      for (int64_t j = 0; j < a.half; ++j) {
        twice_cos[2 * j] = twice_cos[2 * j + 1] = cos[j];
        signed_sin[2 * j] = -sin[j];
        signed_sin[2 * j + 1] = sin[j];
      }
      cos = twice_cos;
      sin = signed_sin;
    }
    for (const RopePart& p : a.parts) {
      if (p.num_heads == 0 || p.dim == 0) continue;  // it may have no address
      if (p.to_cache && a.cache_dtype == Float::kF8) {
        part<T, fp8>(a, p, rows[i], cos, sin);
      } else {
        part<T, T>(a, p, rows[i], cos, sin);
      }
    }
  }
}

}  // namespace

void rope_append_rows(const RopeAppendArgs& args, const RopeRow* present, int64_t num_rows,
                      float* scratch) {
  if (args.dtype == Float::kF32) return rows<float>(args, present, num_rows, scratch);
  if (args.dtype == Float::kBf16) return rows<bf16>(args, present, num_rows, scratch);
  rows<fp16>(args, present, num_rows, scratch);
}

}  // namespace SK_ISA
}  // namespace spec_kernels
