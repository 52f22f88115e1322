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

// Packets of a tile that one of `num` owners has at most.
SK_HOST_DEVICE constexpr uint64_t share(int num) {
  return static_cast<uint64_t>((kTilePackets + num - 1) / num);
}

SK_HOST_DEVICE constexpr uint64_t num_tiles(uint64_t bytes) {
  return (bytes + kTileBytes - 1) / kTileBytes;
}

// Offsets of the regions, in bytes. Every region has two halves, chosen by an epoch's parity, and
// strides that do not depend on a message.
struct Layout {
  uint64_t one_shot_tiles, two_shot_tiles;  // capacity of a launch
  uint64_t norm_table;                      // [kNormEntries], 8 bytes each
  uint64_t one_shot;                        // [2][rank][tile][128 packets]
  uint64_t scatter;                         // [2][rank][tile][share(world) packets]
  uint64_t gather;                          // [2][tile][128 packets]
  uint64_t island_scatter;                  // [2][member][tile][share(island) packets]
  uint64_t across;                          // [2][island][tile][share(island)][2 packets]
  uint64_t island_gather;                   // [2][tile][128 packets]
  uint64_t slots_end;                       // all from one_shot to here rests at the sentinel
  uint64_t staging;                         // [2][tile][share(island)][2 packets], read by peers
  uint64_t exchange;                        // [2][rank][tile][128 packets], all-gather, broadcast
  uint64_t total;
};

SK_HOST_DEVICE constexpr bool has_islands(int world_size, int island_size) {
  return (island_size == 2 || island_size == 4) && island_size < world_size &&
         world_size % island_size == 0;
}

// `island_size` 0: no islands.
SK_HOST_DEVICE constexpr Layout layout(int world_size, uint64_t one_shot_bytes,
                                       uint64_t two_shot_bytes, int island_size) {
  Layout l{};
  const uint64_t world = static_cast<uint64_t>(world_size);
  const bool islands = has_islands(world_size, island_size);
  const uint64_t island = islands ? static_cast<uint64_t>(island_size) : 0;
  const uint64_t num_islands = islands ? world / island : 0;
  const uint64_t island_share = islands ? share(island_size) * kPacketBytes : 0;
  l.one_shot_tiles = num_tiles(one_shot_bytes);
  l.two_shot_tiles = num_tiles(two_shot_bytes);
  uint64_t at = sizeof(Control);
  const auto take = [&at](uint64_t bytes) {
    const uint64_t begin = at;
    at = (at + bytes + kSlabAlignment - 1) / kSlabAlignment * kSlabAlignment;
    return begin;
  };
  take(0);
  l.norm_table = take(kNormEntries * 8);
  l.one_shot = take(2 * world * l.one_shot_tiles * kTileBytes);
  l.scatter = take(2 * world * l.two_shot_tiles * share(world_size) * kPacketBytes);
  l.gather = take(2 * l.two_shot_tiles * kTileBytes);
  l.island_scatter = take(2 * island * l.two_shot_tiles * island_share);
  l.across = take(2 * num_islands * l.two_shot_tiles * island_share * 2);
  l.island_gather = take(islands ? 2 * l.two_shot_tiles * kTileBytes : 0);
  l.slots_end = at;
  l.staging = take(2 * l.two_shot_tiles * island_share * 2);
  l.exchange = take(2 * world * l.one_shot_tiles * kTileBytes);
  l.total = at;
  return l;
}

enum class Phase : uint32_t {
  kPush = 1,   // one-shot: the peer's own data
  kScatter,    // the peer's share of mine
  kAcross,     // another island's partial sums
  kGather,     // the owner's sums
  kFlag,       // a flag: all-gather, broadcast, barrier, pull
  kNormalise,  // another block of this device, fused form
};

enum class Failure : uint32_t {
  kNone = 0xFFFFFFFFu,  // the host sets the record to 0xFF as well
  kTimeout = 1,
  kAborted,  // a peer gave up: `peer` says which
};

// Host memory that the device can write. The first thread that gives up fills it, `kind` last.
struct Status {
  Failure kind;
  uint32_t rank, peer, epoch;
  Phase phase;
  uint32_t algorithm;  // of the call; kAuto for gather, broadcast and barrier
  uint32_t block, tile;
  uint64_t waited_ns;
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
const char* spec_kernels_pcie_attach(const spec_kernels::slab::Attach* attach);
const char* spec_kernels_pcie_detach(const void* slab);
// How the group failed, in the words of the rank whose slab it is; null: it did not. Reads host
// memory alone and waits for nothing.
const char* spec_kernels_pcie_check(const void* slab, const char* op);
// Binds the group to another stream than that of its first eager call.
const char* spec_kernels_pcie_use_stream(const void* slab, void* stream);
}
