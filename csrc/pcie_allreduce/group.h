// The shared segment of one group of ranks: layout, waits, and how failure spreads. Plain C++ with
// no torch in it, used by the op (csrc/pcie_allreduce) and by the module that makes segments
// (csrc/host).
//
// A collective is a row of steps. Every rank arrives at every step exactly once, and a step is over
// for a rank when all have arrived (and, if one rank works for the others, when its work is
// published). Hence the invariant on which all reuse of memory rests: while any rank is in step s,
// no rank is past s + 1, and none is before s - 1. So what a step writes for others to read lives
// in one of two halves, chosen by the parity of s.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

#include "pcie_allreduce/slab.h"

namespace spec_kernels {
namespace group {

constexpr int kMaxRanks = slab::kMaxRanks;
constexpr uint64_t kMagic = 0x315055524f524753;  // "SGRORUP1"
constexpr uint32_t kVersion = 2;
constexpr int kLine = 128;  // two cache lines: the adjacent-line prefetcher would make one shared
constexpr uint64_t kSlotAlignment = 4096;
constexpr int kTextBytes = 256;
constexpr int64_t kSliceNanoseconds =
    20'000'000;  // the longest that a death or an abort stays unnoticed

enum class Op : uint8_t { kAllReduce, kAllReduceNorm, kAllGather, kBroadcast, kBarrier };

inline const char* op_name(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "pcie_allreduce";
    case Op::kAllReduceNorm:
      return "pcie_allreduce_norm";
    case Op::kAllGather:
      return "pcie_all_gather";
    case Op::kBroadcast:
      return "pcie_broadcast";
    default:
      return "pcie_barrier";
  }
}

// What a rank asks for. Ranks whose calls differ must not touch each other's data.
struct CallInfo {
  uint64_t numel;
  uint32_t item_bytes;
  uint8_t op;
  int8_t dtype;
  int16_t src;
  uint32_t algorithm;  // spec_kernels/ops/pcie_allreduce/algorithms.py
  uint32_t row;        // elements of a row where rows matter, else 0

  bool operator==(const CallInfo& o) const {
    return numel == o.numel && item_bytes == o.item_bytes && op == o.op && dtype == o.dtype &&
           src == o.src && algorithm == o.algorithm && row == o.row;
  }
};

// How ranks wait and share work; chosen once for the group (spec_kernels/comm/policy.py).
struct Policy {
  uint32_t spin_iterations;  // polls with a pause in between, before the first sleep
  uint32_t num_spare;        // polls only while no more ranks than this are missing
  uint32_t num_workers;      // ranks that share a large sum
  uint64_t block_bytes;      // what one of them takes at a time
};

// Life of a rank, one word. While it lives, the word holds the id of a thread that does nothing but
// hold it; the kernel sets kOwnerDied when that thread ends in any way (a robust futex). No process
// id is ever trusted. 0: nobody is bound yet.
constexpr uint32_t kOwnerDied = FUTEX_OWNER_DIED;
constexpr uint32_t kLeft = 0xffffffffu;

struct alignas(kLine) RankLine {
  std::atomic<uint32_t> alive;
  std::atomic<uint32_t> busy;     // a call is running in this rank
  std::atomic<uint32_t> arrived;  // steps arrived at
  std::atomic<uint32_t> working;  // step + 1 while it reduces for others
  std::atomic<uint64_t>
      base;        // where this rank mapped the segment: a copy of the bytes is not the segment
  uint32_t step;   // steps finished
  uint32_t calls;  // calls finished: the epoch in messages
  uint32_t spins;  // polls that this rank grants its next wait
  uint32_t missed_spins;  // waits that outlasted them
  CallInfo info[2];
};

enum class Failure : uint32_t { kTimeout, kDied, kLeft, kMismatch, kAborted };

struct alignas(kLine) FailureRecord {
  std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 to be read
  uint32_t kind, reporter, ranks, epoch, step, chunk, num_chunks, op;
  uint32_t waited_ms;
  char phase[16];
  uint32_t other;  // kMismatch: whose call is shown beside the reporter's
  CallInfo mine, theirs;
  char text[kTextBytes];
};

struct alignas(kLine) Word {
  std::atomic<uint32_t> value;
};

struct Header {
  uint64_t magic;
  uint32_t version;
  uint32_t world_size;
  uint64_t capacity;  // bytes of one slot
  uint64_t total_bytes;
  uint64_t digest;  // of the fields above and the policy: a torn or foreign header shows
  uint8_t id[16];   // random: tells this segment from any other
  Policy policy;
  Word arrivals;  // all ranks, all steps
  Word progress;  // 2 * step + 1: work of the step is open; 2 * step + 2: its result is published
  Word sleepers;
  Word next_block, finished_blocks;
  FailureRecord failure;
  RankLine ranks[kMaxRanks];
};

inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

inline uint64_t data_offset() { return round_up(sizeof(Header), kSlotAlignment); }

// Slots [2][world_size][capacity], then one result of `capacity` bytes.
inline uint64_t segment_bytes(uint32_t world_size, uint64_t capacity) {
  return data_offset() + (2 * static_cast<uint64_t>(world_size) + 1) * capacity;
}

inline uint64_t header_digest(const Header& h) {
  uint64_t d = 0x9e3779b97f4a7c15ull;
  const auto mix = [&d](uint64_t x) {
    d = (d ^ x) * 0xff51afd7ed558ccdull;
    d ^= d >> 32;
  };
  for (uint64_t x :
       {h.magic, uint64_t{h.version}, uint64_t{h.world_size}, h.capacity, h.total_bytes,
        uint64_t{h.policy.spin_iterations}, uint64_t{h.policy.num_spare},
        uint64_t{h.policy.num_workers}, h.policy.block_bytes, uint64_t{sizeof(Header)},
        uint64_t{offsetof(Header, failure)}}) {
    mix(x);
  }
  for (uint8_t b : h.id) mix(b);
  return d;
}

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t nanoseconds) {
  timespec t{static_cast<time_t>(nanoseconds / 1'000'000'000),
             static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &t, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word, int num) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, num, nullptr, nullptr, 0);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Steps wrap at 2^32; distances between ranks never exceed one step.
inline bool reached(uint32_t value, uint32_t target) {
  return static_cast<int32_t>(value - target) >= 0;
}

inline void wake_everybody(Header& h) {
  futex_wake(h.arrivals.value, INT_MAX);
  futex_wake(h.progress.value, INT_MAX);
}

// The first failure is the group's failure: whoever claims the record writes it, all others read
// it.
template <class Fill>
inline void record_failure(Header& h, Failure kind, uint32_t reporter, Fill fill) {
  uint32_t none = 0;
  if (!h.failure.state.compare_exchange_strong(none, 1)) return;
  h.failure.kind = static_cast<uint32_t>(kind);
  h.failure.reporter = reporter;
  fill(h.failure);
  h.failure.state.store(2);
  wake_everybody(h);
}

inline std::string rank_list(uint32_t mask) {
  std::ostringstream out;
  int num = 0;
  for (int r = 0; r < kMaxRanks; ++r) {
    if (mask >> r & 1) out << (num++ ? ", " : "") << r;
  }
  return (num > 1 ? "ranks " : "rank ") + out.str();
}

inline const char* dtype_name(int8_t scalar_type) {
  // c10::ScalarType's numbers, which checkpoints and ABIs have frozen.
  switch (scalar_type) {
    case 5:
      return "float16";
    case 6:
      return "float32";
    case 15:
      return "bfloat16";
    default:
      return nullptr;
  }
}

inline std::string describe(const CallInfo& c) {
  std::ostringstream out;
  const Op op = static_cast<Op>(c.op);
  out << op_name(op);
  if (op == Op::kBarrier) return out.str();
  const char* dtype = dtype_name(c.dtype);
  out << " of " << c.numel << " ";
  if (dtype) {
    out << dtype;
  } else {
    out << "elements of dtype " << int{c.dtype} << " (" << c.item_bytes << " bytes)";
  }
  if (c.row) out << " in rows of " << c.row;
  if (op == Op::kBroadcast) out << " from rank " << c.src;
  if (c.algorithm) out << " by algorithm " << c.algorithm;
  return out.str();
}

// Throws what the record says, in the words of `rank`. Call only when state != 0.
[[noreturn]] inline void throw_failure(Header& h, uint32_t rank, const char* op) {
  FailureRecord& f = h.failure;
  // Its writer may have died half way; the record is a few stores long, so 100 ms is for ever.
  for (int i = 0; i < 1000 && f.state.load() != 2; ++i) {
    timespec t{0, 100'000};
    nanosleep(&t, nullptr);
  }
  const std::string phase(f.phase, strnlen(f.phase, sizeof(f.phase)));
  std::ostringstream m;
  m << op << ": rank " << rank << " of " << h.world_size << ": ";
  if (f.state.load() != 2) {
    m << "the group failed, and the rank that saw why died before saying so";
    throw std::runtime_error(m.str());
  }
  switch (static_cast<Failure>(f.kind)) {
    case Failure::kTimeout:
      m << rank_list(f.ranks) << (phase == "reduce" ? " did not finish" : " did not arrive");
      break;
    case Failure::kDied:
      m << rank_list(f.ranks) << " died";
      break;
    case Failure::kLeft:
      m << rank_list(f.ranks) << " left the group (closed its communicator)";
      break;
    case Failure::kMismatch:
      m << "ranks disagree: rank " << f.reporter << " calls " << describe(f.mine) << ", rank "
        << f.other << " calls " << describe(f.theirs);
      break;
    default:
      m << "aborted by rank " << f.reporter << ": "
        << std::string(f.text, strnlen(f.text, kTextBytes));
      throw std::runtime_error(m.str());
  }
  m << " (epoch " << f.epoch << ", phase " << phase << ", chunk " << f.chunk + 1 << " of "
    << f.num_chunks;
  if (static_cast<Failure>(f.kind) != Failure::kMismatch) m << ", waited " << f.waited_ms << " ms";
  if (std::strcmp(op, op_name(static_cast<Op>(f.op))) != 0)
    m << ", in " << op_name(static_cast<Op>(f.op));
  if (f.reporter != rank) m << ", reported by rank " << f.reporter;
  m << ")";
  throw std::runtime_error(m.str());
}

}  // namespace group
}  // namespace spec_kernels
