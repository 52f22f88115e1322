// The algorithms: how the packets of a sum travel. Each ends with `epilogue.tile(call, k, packet,
// sound)` for every tile of the block, all threads at once: the thread's packet of the sum, rounded
// once, or no sound one. A block does one phase for all of its tiles before the next, so that
// transfers overlap.
#pragma once

#include "pcie_allreduce/protocol.cuh"

namespace spec_kernels {
namespace pcie {

constexpr int kMaxIslands = kMaxRanks / 2;
constexpr int kMaxMembers = 4;

template <class F>
__device__ inline void for_tiles(const Params& p, F&& f) {
#pragma unroll 1
  for (int k = static_cast<int>(blockIdx.x); k < p.num_tiles; k += static_cast<int>(gridDim.x))
    f(k);
}

// f(r) for all others of [begin, begin + num) x step, from the one after `self` on, so that ranks
// do not all push to the same one first.
template <class F>
__device__ inline void for_others(int self, int num, F&& f) {
#pragma unroll 1
  for (int i = 1; i < num; ++i) f(self + i < num ? self + i : self + i - num);
}

__device__ inline uint32_t first_bits(int num) { return (1u << num) - 1u; }

// parts[index] = packet, without an index into registers.
template <int kParts>
__device__ inline void place(Packet (&parts)[kParts], int index, const Packet& packet) {
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
#pragma unroll
    for (int w = 0; w < 4; ++w)
      parts[r].words[w] = r == index ? packet.words[w] : parts[r].words[w];
  }
}

// Of parts in rank order, the sum rounded once.
template <class T, int kParts>
__device__ inline Packet reduce(const Packet (&parts)[kParts], int num, int rotation) {
  float sums[kPerPacket<T>];
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i) {
    float v[kParts];
#pragma unroll
    for (int r = 0; r < kParts; ++r) v[r] = to_f32<T>(element<T>(parts[r], i));
#if defined(SK_MUTANTS)
    if (mutant("allreduce_rank_rotated")) {
      for (int r = 0; r < num; ++r) v[r] = to_f32<T>(element<T>(parts[(r + rotation) % num], i));
    }
#endif
    sums[i] = ordered_sum<T>(v, num);
  }
  return pack<T>(sums);
}

template <class T, class Epilogue>
__device__ void one_shot(const Params& p, Call& call, Epilogue& epilogue) {
  const Region& region = p.layout.one_shot;
  const int t = static_cast<int>(threadIdx.x);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    if (tile.num == 0 || call.over()) return;
    const Packet own = escape(tile.load(p, p.input, p.input_aligned));
    for_others(p.rank, p.world_size,
               [&](int r) { store_packet(call.slot(region, r, p.rank, k, t), own); });
  });
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    Packet sum = filled(kSentinel);
    bool sound = false;
    if (tile.num > 0) {
      Packet parts[kMaxRanks];
      const Packet own = escape(tile.load(p, p.input, p.input_aligned));
      const uint32_t others = first_bits(p.world_size) & ~(1u << p.rank);
      sound = call.template receive<1>(region, k, t, others, parts, Phase::kPush, 0, 1);
      if (sound) {
        place(parts, p.rank, own);
        sum = reduce<T>(parts, p.world_size, p.rank);
      }
    }
    epilogue.tile(call, k, tile, sum, sound);
  });
}

// What the owners of a tile's packets send to `num` ranks from `base` on, self included.
template <class T, class Epilogue>
__device__ void take_gathered(const Params& p, Call& call, const Region& region, int base, int num,
                              Epilogue& epilogue) {
  const int t = static_cast<int>(threadIdx.x);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    Packet sum[1] = {filled(kSentinel)};
    bool sound = false;
    if (tile.num > 0) {
      const int owner = base + slab::owner_of(t, tile.packets, num);
      sound = call.template receive<1>(region, k, t, 1u, sum, Phase::kGather, owner, 0);
    }
    epilogue.tile(call, k, tile, sum[0], sound);
  });
}

// Of `num` ranks from `base` on, this one is `self`: sends each packet to its owner among them.
template <class T>
__device__ void scatter(const Params& p, Call& call, const Region& region, int base, int num,
                        int self) {
  const int t = static_cast<int>(threadIdx.x);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    if (tile.num == 0 || call.over()) return;
    const int owner = slab::owner_of(t, tile.packets, num);
    if (owner == self) return;
    const int i = t - slab::share_begin(owner, tile.packets, num);
    store_packet(call.slot(region, base + owner, self, k, i),
                 escape(tile.load(p, p.input, p.input_aligned)));
  });
}

// The packets of which this rank is the owner, from all `num`: parts in order. False: not an owner
// here, or the call is over. `i`: the packet's place in the share.
template <class T, int kParts>
__device__ bool collect(const Params& p, Call& call, const Region& region, int base, int num,
                        int self, int k, const Tile<T>& tile, Packet (&parts)[kParts], int& i) {
  const int t = static_cast<int>(threadIdx.x);
  if (tile.num == 0 || slab::owner_of(t, tile.packets, num) != self) return false;
  i = t - slab::share_begin(self, tile.packets, num);
  const Packet own = escape(tile.load(p, p.input, p.input_aligned));
  const uint32_t others = first_bits(num) & ~(1u << self);
  if (!call.template receive<1>(region, k, i, others, parts, Phase::kScatter, base, 1))
    return false;
  place(parts, self, own);
  return true;
}

template <class T, class Epilogue>
__device__ void two_shot(const Params& p, Call& call, Epilogue& epilogue) {
  const int world = p.world_size, t = static_cast<int>(threadIdx.x);
  scatter<T>(p, call, p.layout.scatter, 0, world, p.rank);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    Packet parts[kMaxRanks];
    int i = 0;
    if (!collect<T>(p, call, p.layout.scatter, 0, world, p.rank, k, tile, parts, i)) return;
    const Packet sum = escape(reduce<T>(parts, world, p.rank));
    store_packet(call.slot(p.layout.gather, p.rank, 0, k, t), sum);
    for_others(p.rank, world,
               [&](int r) { store_packet(call.slot(p.layout.gather, r, 0, k, t), sum); });
  });
  take_gathered<T>(p, call, p.layout.gather, 0, world, epilogue);
}

// How the partial sums of a packet get to other islands: fp32, pushed or read; bf16, pushed.
enum class Across { kPush, kPull, kPushBf16 };

// The packets of one packet's partial sums.
template <class T, Across kAcross>
constexpr int kPartialPackets = kAcross == Across::kPushBf16 ? 1 : kPerPacket<T> / 4;

template <class T, Across kAcross>
__device__ inline float partial_of(const Packet* packets, int i) {
  if constexpr (kAcross == Across::kPushBf16) {
    return to_f32<__nv_bfloat16>(element<__nv_bfloat16>(packets[0], i));
  } else {
    return __uint_as_float(packets[i / 4].words[i % 4]);
  }
}

// Within the island, across islands, within the island. The partial sums of an island are pushed to
// the owners of the same packets elsewhere, or read by them.
template <class T, Across kAcross, class Epilogue>
__device__ void hierarchical(const Params& p, Call& call, Epilogue& epilogue) {
  constexpr bool kPull = kAcross == Across::kPull;
  constexpr int kWidth = kPartialPackets<T, kAcross>;
  const slab::Layout& l = p.layout;
  const int num = p.island_size, t = static_cast<int>(threadIdx.x);
  const int num_islands = p.world_size / num;
  const int island = p.rank / num, self = p.rank % num, base = island * num;
  scatter<T>(p, call, l.island_scatter, base, num, self);
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    Packet parts[kMaxMembers];
    int i = 0;
    if (!collect<T>(p, call, l.island_scatter, base, num, self, k, tile, parts, i)) return;
    Packet partial[kWidth];
#pragma unroll
    for (int j = 0; j < kPerPacket<T>; ++j) {
      float v[kMaxMembers];
#pragma unroll
      for (int r = 0; r < kMaxMembers; ++r) v[r] = to_f32<T>(element<T>(parts[r], j));
      const float sum = ordered_sum<T>(v, num);
      if constexpr (kAcross == Across::kPushBf16) {
        const uint32_t bits = to_bits<__nv_bfloat16>(sum);
        if (j % 2 == 0) partial[0].words[j / 2] = bits;
        if (j % 2 == 1) partial[0].words[j / 2] |= bits << 16;
      } else {
        partial[j / 4].words[j % 4] = __float_as_uint(sum);
      }
    }
    if constexpr (kAcross == Across::kPushBf16 && kPerPacket<T> == 4)
      partial[0].words[2] = partial[0].words[3] = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (kPull) {
        store_packet(call.slot(l.staging, p.rank, 0, k, i * kWidth + j), partial[j]);
      } else {
        partial[j] = escape(partial[j]);
        store_packet(call.slot(l.across, p.rank, island, k, i * kWidth + j), partial[j]);
        for_others(island, num_islands, [&](int g) {
          store_packet(call.slot(l.across, g * num + self, island, k, i * kWidth + j), partial[j]);
        });
      }
    }
  });
  if (kPull) {
    uint32_t ranks = 0;
    for (int g = 0; g < num_islands; ++g) ranks |= g == island ? 0u : 1u << (g * num + self);
    call.publish(ranks);
    call.await(ranks);
  }
  for_tiles(p, [&](int k) {
    const Tile<T> tile(p, k);
    if (tile.num == 0 || slab::owner_of(t, tile.packets, num) != self || call.over()) return;
    const int i = t - slab::share_begin(self, tile.packets, num);
    Packet parts[kMaxIslands * kWidth];
    if (kPull) {
#pragma unroll
      for (int n = 0; n < kMaxIslands * kWidth; ++n) {
        const int g = n / kWidth;
        if (g < num_islands) {
          parts[n] =
              load_packet(call.slot(l.staging, g * num + self, 0, k, i * kWidth + n % kWidth));
        }
      }
    } else if (!call.template receive<kWidth>(l.across, k, i * kWidth,
                                              first_bits(num_islands * kWidth), parts,
                                              Phase::kAcross, self, num)) {
      return;
    }
    float sums[kPerPacket<T>];
#pragma unroll
    for (int j = 0; j < kPerPacket<T>; ++j) {
      float v[kMaxIslands];
#pragma unroll
      for (int g = 0; g < kMaxIslands; ++g) v[g] = partial_of<T, kAcross>(parts + g * kWidth, j);
      sums[j] = ordered_sum<T>(v, num_islands);
    }
    const Packet sum = escape(pack<T>(sums));
    store_packet(call.slot(l.island_gather, p.rank, 0, k, t), sum);
    for_others(self, num,
               [&](int m) { store_packet(call.slot(l.island_gather, base + m, 0, k, t), sum); });
  });
  take_gathered<T>(p, call, l.island_gather, base, num, epilogue);
}

// Bytes of one rank or of all, unchanged; without any, a barrier. They may hold every value, so a
// flag says that they are there. Every rank waits for all others, whether or not they send.
__device__ inline void pass_on(const Params& p, Call& call) {
  const Region& region = p.layout.exchange;
  const int t = static_cast<int>(threadIdx.x);
  const uint32_t others = first_bits(p.world_size) & ~(1u << p.rank);
  if (p.source < 0 || p.source == p.rank) {
    for_tiles(p, [&](int k) {
      const Tile<uint8_t> tile(p, k);
      if (tile.num == 0 || call.over()) return;
      const Packet own = tile.load(p, p.input, p.input_aligned);
      for_others(p.rank, p.world_size,
                 [&](int r) { store_packet(call.slot(region, r, p.rank, k, t), own); });
    });
  }
  call.publish(others);
  call.await(others);
  for_tiles(p, [&](int k) {
    const Tile<uint8_t> tile(p, k);
    if (tile.num == 0) return;
#pragma unroll 1
    for (int r = 0; r < p.world_size; ++r) {
      if (p.source >= 0 && (r != p.source || r == p.rank)) continue;
      const Packet packet = call.over()   ? filled(kSentinel)
                            : r == p.rank ? tile.load(p, p.input, p.input_aligned)
                                          : load_packet(call.slot(region, p.rank, r, k, t));
      tile.store(p, static_cast<char*>(p.out) + r * p.part_bytes, p.out_aligned, packet);
    }
  });
}

}  // namespace pcie
}  // namespace spec_kernels
