// Elements that travel as one byte: 128 consecutive ones share a scale, as `coded` of reference.py
// defines it. A group is eight packets of codes and one with the scale.
//
// No code packet can hold the sentinel: an fp8 code is finite and not 0xFF, an int8 code q is
// sent as q ^ 0x7F, which is 0xFF only for -128, and q is never that. A group with a NaN or an
// infinity has a NaN for its scale, and codes of nothing.
#pragma once

#include "pcie_allreduce/exchange.cuh"

namespace spec_kernels {
namespace pcie {

constexpr int kGroupPackets = slab::kScaleGroup / kPacketBytes + 1;
constexpr int kScalePacket = kGroupPackets - 1;

// |v| <= 448, rounded to nearest even.
__device__ inline uint32_t to_e4m3(float v) {
  const uint32_t bits = __float_as_uint(v), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  // Below 2^-6 the unit is 2^-9.
  if (magnitude < 0x3c800000u)
    return sign | static_cast<uint32_t>(rintf(__uint_as_float(magnitude) * 512.0f));
  return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

__device__ inline float from_e4m3(uint32_t code) {
  const uint32_t exponent = code >> 3 & 15u, fraction = code & 7u;
  const float magnitude = exponent == 0 ? static_cast<float>(fraction) * 0.001953125f  // 2^-9
                                        : __uint_as_float((exponent + 120u) << 23 | fraction << 20);
  return code & 0x80u ? -magnitude : magnitude;
}

// The greatest code. Which of the two codes it is costs a branch where it is asked, and spares a
// kernel for each.
__device__ inline float most_of(bool int8) { return int8 ? 127.0f : 448.0f; }

// `scaled` within [-most, most].
__device__ inline uint32_t to_code(bool int8, float scaled) {
  if (!int8) return to_e4m3(scaled);
  return (static_cast<uint32_t>(static_cast<int>(rintf(scaled))) & 0xffu) ^ 0x7fu;
}

__device__ inline float from_code(bool int8, uint32_t code) {
  if (!int8) return from_e4m3(code);
  const int q = static_cast<int>(code ^ 0x7fu);
  return static_cast<float>(q < 128 ? q : q - 256);
}

// What a thread has of its group: the codes of its packet of T, and the scale.
template <class T>
struct Codes {
  static constexpr int kWords = kPerPacket<T> / 4;
  static constexpr int kLanes = slab::kScaleGroup / kPerPacket<T>;  // of a group
  static constexpr int kSharers = 4 / kWords;                       // lanes of a packet of codes
  uint32_t words[kWords];
  float scale;

  // The packet of the group that this lane sends and takes: one of codes, the scale's, or none.
  __device__ static int packet() {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    return lane % kSharers == 0 ? lane / kSharers : lane == 1 ? kScalePacket : -1;
  }

  // All lanes of the warp.
  __device__ static Codes of(bool int8, const float (&values)[kPerPacket<T>]) {
    uint32_t most = 0;  // as integers magnitudes are in order, NaN above all
#pragma unroll
    for (int i = 0; i < kPerPacket<T>; ++i)
      most = max(most, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2)
      most = max(most, __shfl_xor_sync(0xffffffffu, most, mask));
    const bool finite = most < 0x7f800000u;
    Codes c;
    c.scale =
        finite ? __fdiv_rn(__uint_as_float(most), most_of(int8)) : __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      c.words[w] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float v = values[4 * w + i];
        const float scaled = c.scale == 0.0f ? v : __fdiv_rn(v, c.scale);
        const float bound = most_of(int8);
        const uint32_t code = to_code(int8, finite ? fminf(fmaxf(scaled, -bound), bound) : 0.0f);
        c.words[w] |= code << 8 * i;
      }
    }
    return c;
  }

  // What `packet()` says to send. All lanes.
  __device__ Packet pack() const {
    Packet p = filled(0);
#pragma unroll
    for (int w = 0; w < 4; ++w)
      p.words[w] = __shfl_down_sync(0xffffffffu, words[w % kWords], w / kWords);
    return packet() == kScalePacket ? filled(__float_as_uint(scale)) : p;
  }

  // From what each lane took. All lanes.
  __device__ static Codes unpack(const Packet& mine) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first = lane / kLanes * kLanes;
    const int sharer = lane % kSharers;
    Codes c;
    c.scale = __uint_as_float(__shfl_sync(0xffffffffu, mine.words[0], first + 1));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t word = __shfl_sync(0xffffffffu, mine.words[w], lane - sharer);
      if (w / kWords == sharer) c.words[w % kWords] = word;
    }
    return c;
  }

  __device__ float value(bool int8, int i) const {
    return from_code(int8, words[i / 4] >> i % 4 * 8 & 0xffu) * scale;
  }
};

// Whether it is so for every lane of this lane's group. All lanes.
template <class T>
__device__ inline bool all_of_group(bool so) {
  uint32_t not_so = so ? 0u : 1u;
#pragma unroll
  for (int mask = Codes<T>::kLanes / 2; mask > 0; mask /= 2)
    not_so |= __shfl_xor_sync(0xffffffffu, not_so, mask);
  return not_so == 0;
}

template <class T>
__device__ inline void unpack_values(const Packet& packet, float (&values)[kPerPacket<T>]) {
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i) values[i] = to_f32<T>(element<T>(packet, i));
}

// As two_shot, a group of elements in the place of a packet: owners have whole groups. Lanes stay
// together, whatever each of them waits for.
template <class T, class Epilogue>
__device__ void two_shot_coded(const Params& p, Call& call, Epilogue& epilogue) {
  using C = Codes<T>;
  constexpr int kGroups = kTilePackets / C::kLanes;
  const bool int8 = p.algorithm == slab::kTwoShotInt8;
  const int world = p.world_size;
  const int group = static_cast<int>(threadIdx.x) / C::kLanes;
  const int sent = C::packet();
  const Region &scattered = p.layout.scatter, &gathered = p.layout.gather;
  const auto own_codes = [&](const Tile<T>& tile) {
    float values[kPerPacket<T>];
    unpack_values<T>(tile.load(p, p.input, p.input_aligned), values);
    return C::of(int8, values);
  };
  const auto owner_in = [&](const Tile<T>& tile) {
    return tile.num == 0 ? -1 : slab::owner_of(group, tile.packets / C::kLanes, world);
  };
  const auto place_in = [&](const Tile<T>& tile, int owner) {
    const int first = slab::share_begin(owner, tile.packets / C::kLanes, world);
    return (group - first) * kGroupPackets + sent;
  };

  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    const Packet packet = own_codes(tile).pack();
    const int owner = owner_in(tile);
    if (owner < 0 || owner == p.rank || sent < 0 || call.over()) return;
    store_packet(call.slot(scattered, owner, p.rank, k, place_in(tile, owner)), packet);
  });
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    const bool owned = owner_in(tile) == p.rank;
    // A warp of which nobody owns anything has nothing to do.
    if (!__any_sync(0xffffffffu, owned)) return;
    Packet parts[kMaxRanks];
    bool sound = owned;
    if (owned && sent >= 0) {
      const uint32_t others = first_bits(world) & ~(1u << p.rank);
      sound = call.template receive<1>(scattered, k, place_in(tile, p.rank), others, parts,
                                       Phase::kScatter, 0, 1);
    }
    const C own = own_codes(tile);
    C codes[kMaxRanks];
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      const C theirs = C::unpack(parts[r]);
      codes[r].scale = r == p.rank ? own.scale : theirs.scale;
#pragma unroll
      for (int w = 0; w < C::kWords; ++w)
        codes[r].words[w] = r == p.rank ? own.words[w] : theirs.words[w];
    }
    float sums[kPerPacket<T>];
#pragma unroll
    for (int i = 0; i < kPerPacket<T>; ++i) {
      float v[kMaxRanks];
#pragma unroll
      for (int r = 0; r < kMaxRanks; ++r) v[r] = codes[r].value(int8, i);
      sums[i] = ordered_sum<T>(v, world);
    }
    const Packet packet = C::of(int8, sums).pack();
    // A group that is not whole would poison the rest of its sums with what was not received.
    sound = all_of_group<T>(sound);
    if (!sound || sent < 0) return;
    const int at = group * kGroupPackets + sent;
    store_packet(call.slot(gathered, p.rank, 0, k, at), packet);
    for_others(p.rank, world,
               [&](int r) { store_packet(call.slot(gathered, r, 0, k, at), packet); });
  });
  static_assert(kGroups * kGroupPackets <= kTilePackets);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    Packet mine[1] = {filled(0)};
    const int owner = owner_in(tile);
    bool sound = owner >= 0;
    if (sound && sent >= 0) {
      sound = call.template receive<1>(gathered, k, group * kGroupPackets + sent, 1u, mine,
                                       Phase::kGather, owner, 0);
    }
    const C codes = C::unpack(mine[0]);
    sound = all_of_group<T>(sound);
    float values[kPerPacket<T>];
#pragma unroll
    for (int i = 0; i < kPerPacket<T>; ++i) values[i] = codes.value(int8, i);
    epilogue.tile(call, k, tile, sound ? pack<T>(values) : filled(kSentinel), sound);
  });
}

}  // namespace pcie
}  // namespace spec_kernels
