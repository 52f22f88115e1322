// How the blocks of one rank and those of its peers pass packets through each other's slabs.
//
// Pushed data is its own flag: a slot rests at the sentinel, a reader polls its own memory until
// every 4-byte word of a packet differs from it, and puts the sentinel back as it takes the packet.
// A packet may arrive torn or out of order; no word does. So nothing here needs a fence, except
// where bytes may hold any value or are read from a peer: there a flag with the epoch follows.
//
// Why two halves suffice. A rank writes for call e into half e & 1 of a peer's region only after
// its own call e - 1 has ended. That call needed, directly or through an owner, data that the peer
// sends in its call e - 1, which begins after the peer's call e - 2 has ended, and with it the last
// use of that half. It takes one stream, no launch that begins before the one before it has ended,
// and that every call makes each rank depend on every other; a call without elements launches
// nothing. The epoch lives in device memory, read by each block as it starts and advanced by the
// last to finish, so that a replayed graph counts on.
//
// Block b waits only for block b of the peers (grids are alike on all ranks), and for blocks of its
// own grid where rows are normalised: all of a grid must be resident, which at most kMaxBlocks
// blocks of 128 threads are.
#pragma once

#include "common/packet.cuh"
#include "pcie_allreduce/slab.h"

namespace spec_kernels {
namespace pcie {

using slab::Control;
using slab::Failure;
using slab::kMaxRanks;
using slab::kNobody;
using slab::kPacketBytes;
using slab::kSentinel;
using slab::kTilePackets;
using slab::Phase;
using slab::Region;

constexpr int kThreads = kTilePackets;
// A thread looks at the clock and at the abort word once in so many polls.
constexpr uint32_t kPollsPerLook = 256;

struct Params {
  slab::Layout layout;
  char* slabs[kMaxRanks];
  slab::Status* status;
  const void* input;
  void* out;
  int64_t row_elements;  // of a row that is cut into tiles
  int32_t row_tiles, num_tiles;
  int32_t rank, world_size, island_size;
  int32_t algorithm;
  uint64_t timeout_ns;
  // Of bytes that are passed on: whose (-1: everybody's), and the bytes from one rank's part of
  // `out` to the next.
  int32_t source;
  int64_t part_bytes;
  bool input_aligned, out_aligned;  // every packet of a full tile stands at a multiple of 16
#if defined(SK_MUTANTS)
  uint32_t host_epoch;
#endif
};

// Memory that peers write or read meanwhile

__device__ inline Packet load_packet(const char* p) {
  Packet v;
#if defined(SK_CUDA_ON_HOST)
  simt::count_access(p, kPacketBytes, false);
  simt::schedule_point(false);
  const volatile uint32_t* words = reinterpret_cast<const uint32_t*>(p);
  for (int i = 0; i < 4; ++i) v.words[i] = words[i];
#else
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(p)
               : "memory");
#endif
  return v;
}

__device__ inline void store_packet(char* p, const Packet& v) {
#if defined(SK_CUDA_ON_HOST)
  simt::count_access(p, kPacketBytes, true);
  // Torn where the schedule and the address say so: words are whole, packets are not.
  const uintptr_t torn = reinterpret_cast<uintptr_t>(p) / kPacketBytes % 4;
  volatile uint32_t* words = reinterpret_cast<uint32_t*>(p);
  for (uintptr_t i = 0; i < 4; ++i) {
    if (i == torn) simt::schedule_point(false);
    words[(i + torn) % 4] = v.words[(i + torn) % 4];
  }
#else
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.words[0]),
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
               : "memory");
#endif
}

__device__ inline uint32_t load_acquire_system(const uint32_t* p) {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(false);
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
#else
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#endif
}

// A word pair that another block of the own device writes meanwhile: read or written whole.
__device__ inline uint64_t load_device(const uint64_t* p) {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(false);
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#else
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
#endif
}

__device__ inline void store_device(uint64_t* p, uint64_t v) {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(false);
  __atomic_store_n(p, v, __ATOMIC_RELAXED);
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}

__device__ inline uint64_t device_nanoseconds() {
#if defined(SK_CUDA_ON_HOST)
  return simt::nanoseconds();
#else
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
#endif
}

// Others go on while this thread has nothing to do.
__device__ inline void idle() {
#if defined(SK_CUDA_ON_HOST)
  simt::schedule_point(true);
#endif
}

// What travels must differ from the sentinel. Ranks that read a packet without its travelling do
// the same, so that all sum the same NaN.
__device__ inline Packet escape(Packet packet) {
  if (mutant("allreduce_sentinel_payload")) return packet;
#pragma unroll
  for (uint32_t& word : packet.words) word = word == kSentinel ? slab::kSentinelPayload : word;
  return packet;
}

__device__ inline bool arrived(const Packet& packet) {
  return packet.words[0] != kSentinel && packet.words[1] != kSentinel &&
         packet.words[2] != kSentinel && packet.words[3] != kSentinel;
}

// ((v0+v1)+(v2+v3))+((v4+v5)+(v6+v7)), operands from `num` on skipped.
template <class T, int kMax>
__device__ inline float ordered_sum(float (&v)[kMax], int num) {
#pragma unroll
  for (int step = 1; step < kMax; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kMax; i += 2 * step) {
      if (i + step < num) v[i] = __fadd_rn(v[i], v[i + step]);
      if (mutant("allreduce_bf16_sum")) v[i] = to_f32<T>(to_bits<T>(v[i]));
    }
  }
  return v[0];
}

// A thread in a call: the epoch, and whether there is still something to wait for.
class Call {
 public:
  __device__ explicit Call(const Params& p)
      : p_(p), control_(*reinterpret_cast<Control*>(p.slabs[p.rank])) {
    epoch_ = slab::next_epoch(load_relaxed_system(&control_.finished));
#if defined(SK_MUTANTS)
    if (mutant("allreduce_block_epoch")) epoch_ = control_.flags[blockIdx.x][p.rank] + 1;
    if (mutant("allreduce_host_epoch")) epoch_ = p.host_epoch;
#endif
    half_ = mutant("allreduce_one_slot") ? 0 : epoch_;
    // Of a group in which somebody gave up nothing more is sent or believed.
    over_ = seen_abort();
  }

  // Ends the call for this block. All threads.
  __device__ void finish() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    const uint32_t before = atomicAdd(&control_.arrived, 1u);
    const bool last = before + 2 == gridDim.x;
#if defined(SK_MUTANTS)
    if (mutant("allreduce_block_epoch")) control_.flags[blockIdx.x][p_.rank] = epoch_;
    if (mutant("allreduce_early_release") && before == kNobody) control_.finished = epoch_;
#endif
    if (!last) return;
    control_.arrived = kNobody;
    control_.finished = epoch_;
  }

  __device__ bool over() const { return over_; }
  __device__ uint32_t epoch() const { return epoch_; }

  // Slot of packet i of tile k from source `source`, in the slab of rank `rank`.
  __device__ char* slot(const Region& region, int rank, int source, int k, int i) const {
    return p_.slabs[rank] + region.offset(half_, source, k, i);
  }

  // Takes packets as they arrive in the own slab: part s * kWidth + j from the slot j packets after
  // source s's, for every part in `wanted`. Source s is rank `peer + s * step`. False: they did not
  // come, and the call is over.
  template <int kWidth, int kParts>
  __device__ bool receive(const Region& region, int k, int i, uint32_t wanted,
                          Packet (&parts)[kParts], Phase phase, int peer, int step) {
    char* const first = slot(region, p_.rank, 0, k, i);
    uint32_t missing = wanted;
    while (!over_) {
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        if (missing >> n & 1u) parts[n] = load_packet(first + part<kWidth>(region, n));
      }
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        if ((missing >> n & 1u) && arrived(parts[n])) missing &= ~(1u << n);
      }
      if (missing == 0) break;
      look(phase, peer + (__ffs(static_cast<int>(missing)) - 1) / kWidth * step, k);
    }
    if (over_) return false;
    if (mutant("allreduce_no_clear")) return true;
    const uint64_t other = half_ & 1u ? 0 - region.half : region.half;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      char* const from = first + (mutant("allreduce_wrong_clear") ? other : 0);
      if (wanted >> n & 1u) store_packet(from + part<kWidth>(region, n), filled(kSentinel));
    }
    return true;
  }

  // Tells `ranks` that all that this block has stored stands to be read. All threads; one fence. A
  // block of which a single thread gave up says nothing.
  __device__ void publish(uint32_t ranks) {
    const bool silent = __syncthreads_or(over_) && !mutant("allreduce_publish_anyway");
    if (silent || threadIdx.x != 0) return;
    __threadfence_system();
#pragma unroll 1
    for (int r = 0; r < p_.world_size; ++r) {
      if (ranks >> r & 1u) store_relaxed_system(&control(r).flags[blockIdx.x][p_.rank], epoch_);
    }
  }

  // Waits for the same of each of `ranks`. False: the call is over.
  __device__ bool await(uint32_t ranks) {
    if (mutant("allreduce_pull_no_flag")) return !over_;
#pragma unroll 1
    for (int r = 0; r < p_.world_size; ++r) {
      if (!(ranks >> r & 1u)) continue;
      while (!over_ && !raised(load_acquire_system(&control_.flags[blockIdx.x][r])))
        look(Phase::kFlag, r, 0);
    }
    return !over_;
  }

  // After a poll that found nothing: now and then, is it worth going on?
  __device__ void look(Phase phase, int peer, int k) {
    idle();
    if (mutant("allreduce_no_bound") || ++polls_ % kPollsPerLook != 0) return;
    const uint64_t now = device_nanoseconds();
    if (started_ == 0) started_ = now;
    over_ = seen_abort();
    if (over_ || now - started_ <= patience(phase)) return;
    over_ = true;
    record(Failure::kTimeout, phase, peer, k, now - started_);
    const uint32_t self = static_cast<uint32_t>(p_.rank);
#pragma unroll 1
    for (int r = 0; r < p_.world_size; ++r) store_relaxed_system(&control(r).abort, self);
  }

 private:
  // Whoever waits for somebody who waits himself gives up later, so that the first to give up names
  // the rank that is to blame. At most twice the timeout.
  __device__ uint64_t patience(Phase phase) const {
    const uint32_t later = max(static_cast<uint32_t>(phase), 2u) - 2u;
    static_assert(static_cast<uint32_t>(Phase::kScatter) == 2);
    return p_.timeout_ns + later * (p_.timeout_ns / 4);
  }

  // A peer is at most one call ahead. Any other flag is of a call before this one, and epochs wrap:
  // one that is not raised for days must not look like one to come.
  __device__ bool raised(uint32_t flag) const {
    if (mutant("allreduce_old_flag")) return static_cast<int32_t>(flag - epoch_) >= 0;
    return flag == epoch_ || flag == slab::next_epoch(epoch_);
  }

  __device__ Control& control(int rank) const {
    return *reinterpret_cast<Control*>(p_.slabs[rank]);
  }

  template <int kWidth>
  __device__ static uint64_t part(const Region& region, int n) {
    return static_cast<uint64_t>(n / kWidth) * region.source +
           static_cast<uint64_t>(n % kWidth) * kPacketBytes;
  }

  // The host of a rank that another one gave up on must learn of it as well.
  __device__ bool seen_abort() {
    const uint32_t by = load_relaxed_system(&control_.abort);
    if (by == kNobody) return false;
    record(Failure::kAborted, Phase::kNone, static_cast<int>(by), 0, 0);
    return true;
  }

  __device__ void record(Failure kind, Phase phase, int peer, int k, uint64_t waited_ns) {
    if (atomicCAS(&control_.claim, kNobody, 0u) != kNobody) return;
    slab::Status& s = *p_.status;
    const auto put = [](auto& field, uint32_t value) {
      store_relaxed_system(reinterpret_cast<uint32_t*>(&field), value);
    };
    put(s.rank, static_cast<uint32_t>(p_.rank));
    put(s.peer, static_cast<uint32_t>(peer));
    put(s.epoch, epoch_);
    put(s.phase, static_cast<uint32_t>(phase));
    put(s.algorithm, static_cast<uint32_t>(p_.algorithm));
    put(s.block, blockIdx.x);
    put(s.tile, static_cast<uint32_t>(k));
    put(s.waited_ms, static_cast<uint32_t>(waited_ns / 1000000));
    put(s.kind, static_cast<uint32_t>(kind));
  }

  const Params& p_;
  Control& control_;
  uint32_t epoch_, half_;
  bool over_;
  uint32_t polls_ = 0;
  uint64_t started_ = 0;
};

// Tensors of elements T, in tiles: packet `threadIdx.x` of a tile is this thread's from beginning
// to end, so that `out` may be `input`.
template <class T>
struct Tile {
  int row;
  int64_t column;  // of this thread's packet
  int num;         // elements in it; none: the row ends before
  int packets;     // of the tile

  __device__ Tile(const Params& p, int k) {
    constexpr int kElements = kTilePackets * kPerPacket<T>;
    row = k / p.row_tiles;
    const int64_t begin = static_cast<int64_t>(k % p.row_tiles) * kElements;
    const int64_t rest = p.row_elements - begin;
    const int in_tile = static_cast<int>(rest < kElements ? rest : kElements);
    const int at = static_cast<int>(threadIdx.x) * kPerPacket<T>;
    column = begin + at;
    num = max(0, min(in_tile - at, kPerPacket<T>));
    packets = (in_tile + kPerPacket<T> - 1) / kPerPacket<T>;
  }

  // Of a tensor whose rows follow each other.
  __device__ Packet load(const Params& p, const void* tensor, bool aligned) const {
    return load_elements(static_cast<const T*>(tensor) + row * p.row_elements + column, num,
                         aligned);
  }
  __device__ void store(const Params& p, void* tensor, bool aligned, const Packet& packet) const {
    store_elements(static_cast<T*>(tensor) + row * p.row_elements + column, num, aligned, packet);
  }
};

}  // namespace pcie
}  // namespace spec_kernels
