// What the ranks of a CUDA group share: the layout of a rank's slab, the record through which it
// tells the host of a failure, and what attaches both. Plain C++: no CUDA, no torch.
//
// A slab is one allocation of the rank's own (cudaMalloc or cuMemAlloc; a framework's allocator may
// hand out memory that cannot be exported), a multiple of kSlabAlignment, with every byte set to
// 0xFF before the first peer may write. That one value starts everything: it is the sentinel in
// each slot, and -1 in the control words (no call finished, no block arrived, nobody aborted).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace spec_kernels {
namespace slab {

constexpr int32_t kVersion = 1;
constexpr int kMaxRanks = 8;
constexpr int kMaxBlocks = 64;
constexpr int kMaxEntries = 32;
constexpr uint64_t kSlabAlignment = 256;

// The unit on the wire, and the packets that a block's threads hold at a time, one each.
constexpr int kPacketBytes = 16;
constexpr int kTilePackets = 128;
constexpr uint64_t kTileBytes = uint64_t{kPacketBytes} * kTilePackets;

// Consecutive elements of a row that share a scale where elements travel as one byte.
constexpr int64_t kScaleGroup = 128;

// A word that has not arrived; a payload word of the same bits travels as another NaN.
constexpr uint32_t kSentinel = 0xFFFFFFFFu;
constexpr uint32_t kSentinelPayload = 0x7FFF7FFFu;

constexpr uint32_t kNobody = 0xFFFFFFFFu;

enum Algorithm : int32_t {  // spec_kernels/ops/pcie_allreduce/algorithms.py
  kAuto,
  kOneShot,
  kTwoShot,
  kHierarchical,
  kHierarchicalPull,
  kHierarchicalBf16,
  kTwoShotFp8,
  kTwoShotInt8,
};

// Epochs run from 0 to here and start anew. It is odd, for halves to alternate, and no word at rest
// looks like an epoch or the one after it.
constexpr uint32_t kLastEpoch = 0xFFFFFFFDu;
SK_HOST_DEVICE constexpr uint32_t next_epoch(uint32_t epoch) {
  return epoch < kLastEpoch ? epoch + 1 : 0;
}

// Words of the control page. `finished`, `arrived` and `claim` are touched by the own device alone;
// peers store to `abort` and `flags`.
struct Control {
  alignas(128) uint32_t finished;  // epoch of the last call that ended
  alignas(128) uint32_t arrived;   // blocks of this call that are done, less one
  alignas(128) uint32_t claim;     // kNobody until a thread writes the status record
  alignas(128) uint32_t abort;     // kNobody, or the rank that gave up first
  // Epoch up to which block b of rank r has published: in flags[b][r].
  alignas(128) uint32_t flags[kMaxBlocks][kMaxRanks];
};

// Partial sums of squares of a fused call: {epoch, bits of a float} for each (row, segment).
constexpr uint64_t kNormEntries = 4096;

// A tile of `packets` is shared among `num` owners: owner o has those from share_begin(o) up to
// share_begin(o + 1), at most share(num) of them.
SK_HOST_DEVICE constexpr uint64_t share(int num) {
  return static_cast<uint64_t>((kTilePackets + num - 1) / num);
}
SK_HOST_DEVICE constexpr int share_begin(int owner, int packets, int num) {
  return owner * packets / num;
}
SK_HOST_DEVICE constexpr int owner_of(int packet, int packets, int num) {
  return ((packet + 1) * num - 1) / packets;
}

// Where packet i of tile k from source r stands, in the half of parity e & 1:
// begin + (e & 1) * half + r * source + k * tile + i * kPacketBytes. No stride depends on a
// message.
struct Region {
  uint64_t begin, half, source, tile;

  SK_HOST_DEVICE constexpr uint64_t offset(uint32_t epoch, int r, int k, int i) const {
    return begin + (epoch & 1u) * half + static_cast<uint64_t>(r) * source +
           static_cast<uint64_t>(k) * tile + static_cast<uint64_t>(i) * kPacketBytes;
  }
};

struct Layout {
  int32_t one_shot_tiles, two_shot_tiles;  // capacity of a launch
  uint64_t norm_table;                     // [kNormEntries], 8 bytes each
  Region one_shot;                         // from each rank: its packets
  Region scatter;                          // from each rank: this owner's share
  Region gather;                           // from the owners: sums
  Region island_scatter;                   // from each member of the island: this owner's share
  Region across;                           // from each island: partial sums, two packets a packet
  Region island_gather;                    // from the owners of the island: sums
  uint64_t slots_end;                      // all from one_shot to here rests at the sentinel
  Region staging;                          // own partial sums, which peers read
  Region exchange;                         // from each rank: bytes of a gather or a broadcast
  uint64_t total;
};

SK_HOST_DEVICE constexpr bool has_islands(int world_size, int island_size) {
  return (island_size == 2 || island_size == 4) && island_size < world_size &&
         world_size % island_size == 0;
}

// Reserves [2][num_sources][num_tiles][tile_packets] packets from `end` on.
SK_HOST_DEVICE constexpr Region reserve(uint64_t& end, int num_sources, int32_t num_tiles,
                                        uint64_t tile_packets) {
  Region r{};
  r.begin = end;
  r.tile = tile_packets * kPacketBytes;
  r.source = static_cast<uint64_t>(num_tiles) * r.tile;
  r.half = static_cast<uint64_t>(num_sources) * r.source;
  end = (end + 2 * r.half + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
  return r;
}

// The islands that hierarchical_bf16 is defined for: the same on every backend.
SK_HOST_DEVICE constexpr int bf16_island_size(int world_size) { return world_size == 8 ? 4 : 2; }

// `island_size` 0: no islands.
SK_HOST_DEVICE constexpr Layout layout(int world_size, uint64_t one_shot_bytes,
                                       uint64_t two_shot_bytes, int island_size) {
  Layout l{};
  const bool islands = has_islands(world_size, island_size);
  l.one_shot_tiles = static_cast<int32_t>((one_shot_bytes + kTileBytes - 1) / kTileBytes);
  l.two_shot_tiles = static_cast<int32_t>((two_shot_bytes + kTileBytes - 1) / kTileBytes);
  const int32_t island_tiles = islands ? l.two_shot_tiles : 0;
  const int num_islands = islands ? world_size / island_size : 0;
  const uint64_t island_share = islands ? share(island_size) : 0;
  uint64_t end = (sizeof(Control) + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
  l.norm_table = end;
  end += kNormEntries * 8;
  l.one_shot = reserve(end, world_size, l.one_shot_tiles, kTilePackets);
  l.scatter = reserve(end, world_size, l.two_shot_tiles, share(world_size));
  l.gather = reserve(end, 1, l.two_shot_tiles, kTilePackets);
  l.island_scatter = reserve(end, island_size, island_tiles, island_share);
  l.across = reserve(end, num_islands, island_tiles, 2 * island_share);
  l.island_gather = reserve(end, 1, island_tiles, kTilePackets);
  l.slots_end = end;
  l.staging = reserve(end, 1, island_tiles, 2 * island_share);
  l.exchange = reserve(end, world_size, l.one_shot_tiles, kTilePackets);
  l.total = end;
  return l;
}

// What a rank waits for, in the order in which one wait depends on another.
enum class Phase : uint32_t {
  kNone,       // no wait of this rank's own: a peer gave up
  kPush,       // one-shot: the peer's own data
  kScatter,    // the peer's share of mine
  kFlag,       // a flag: all-gather, broadcast, barrier, pull
  kAcross,     // another island's partial sums
  kGather,     // the owner's sums
  kNormalise,  // another block of this device, fused form
};

enum class Failure : uint32_t {
  kNone = 0xFFFFFFFFu,  // the host sets all of the record to 0xFF
  kTimeout = 1,
  kAborted,  // a peer gave up: `peer` says which
};

// Host memory that the device can write; the first thread that gives up fills it. A word has
// arrived when it is no longer 0xFFFFFFFF: no fence is needed here either.
struct Status {
  Failure kind;
  uint32_t rank, peer, epoch;
  Phase phase;
  uint32_t algorithm;  // of the call; kAuto for gather, broadcast and barrier
  uint32_t block, tile, waited_ms;
};

// Which algorithm takes messages of up to `max_bytes`, with how many blocks; ascending.
struct Entry {
  uint64_t max_bytes;
  int32_t algorithm;
  int32_t num_blocks;
};

// Mirrored by spec_kernels/comm/device_group.py.
struct Attach {
  int32_t version, rank, world_size, island_size;
  uint64_t one_shot_bytes, two_shot_bytes;  // capacity of a launch, rounded up to whole tiles
  void* slabs[kMaxRanks];                   // as mapped in this process; slabs[rank] is the own
  Status* status_host;                      // the record as the host reads it
  Status* status_device;                    // and as the device writes it
  int32_t num_entries;                      // at least one
  Entry table[kMaxEntries];
};

}  // namespace slab
}  // namespace spec_kernels

// Each returns null, or what is wrong (valid until the thread's next call).
extern "C" {
uint64_t spec_kernels_pcie_slab_bytes(int32_t world_size, uint64_t one_shot_bytes,
                                      uint64_t two_shot_bytes, int32_t island_size);
// Between calls every byte of a slab from the first offset up to the second is 0xFF.
void spec_kernels_pcie_slab_slots(int32_t world_size, uint64_t one_shot_bytes,
                                  uint64_t two_shot_bytes, int32_t island_size, uint64_t* begin,
                                  uint64_t* end);
const char* spec_kernels_pcie_attach(const spec_kernels::slab::Attach* attach);
const char* spec_kernels_pcie_detach(const void* slab);
// How the group failed, in the words of the rank whose slab it is; null: it did not. Reads host
// memory alone and waits for nothing.
const char* spec_kernels_pcie_check(const void* slab, const char* op);
// Binds the group to another stream than that of its first eager call.
const char* spec_kernels_pcie_use_stream(const void* slab, void* stream);
}
