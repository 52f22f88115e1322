#include <chrono>
#include <mutex>
#include <sstream>
#include <thread>
#include <unordered_map>

#include "common/check.h"
#include "common/device.cuh"
#include "pcie_allreduce/group_cuda.h"

namespace spec_kernels {
namespace slab {
namespace {

std::mutex mutex;
// Nodes of the map stay where they are while other groups come and go.
std::unordered_map<const void*, Group>& groups() {
  static auto* const all = new std::unordered_map<const void*, Group>;
  return *all;
}

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kPush:
      return "push";
    case Phase::kScatter:
      return "scatter";
    case Phase::kAcross:
      return "across";
    case Phase::kGather:
      return "gather";
    case Phase::kFlag:
      return "flag";
    case Phase::kNormalise:
      return "normalise";
    default:
      return "none";
  }
}

const char* algorithm_name(uint32_t algorithm) {
  constexpr const char* kNames[] = {"auto",         "one_shot",          "two_shot",
                                    "hierarchical", "hierarchical_pull", "hierarchical_bf16",
                                    "two_shot_fp8", "two_shot_int8"};
  return algorithm < 8 ? kNames[algorithm] : "unknown";
}

// The record's words come one by one; 100 ms is for ever.
Status read_status(const Attach& a) {
  static_assert(sizeof(Status) % 4 == 0);
  constexpr int kWords = sizeof(Status) / 4;
  uint32_t words[kWords];
  for (int tries = 0; tries < 100; ++tries) {
    const volatile uint32_t* from = reinterpret_cast<const uint32_t*>(a.status_host);
    bool whole = true;
    for (int i = 0; i < kWords; ++i) {
      words[i] = from[i];
      whole = whole && words[i] != kNobody;
    }
    if (whole || words[0] == static_cast<uint32_t>(Failure::kNone)) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Status s;
  std::memcpy(&s, words, sizeof(s));
  return s;
}

std::string failure_of(const Group& group, const char* op) {
  const Status s = read_status(group.attach);
  if (s.kind == Failure::kNone) return "";
  std::ostringstream m;
  m << op << ": rank " << group.attach.rank << " of " << group.attach.world_size << ": ";
  if (s.kind == Failure::kAborted) {
    m << "aborted, because rank " << s.peer << " gave up (epoch " << s.epoch << "); its own message"
      << " says on whom";
    return m.str();
  }
  m << (s.phase == Phase::kNormalise ? "another block of this rank" : "rank ");
  if (s.phase != Phase::kNormalise) m << s.peer;
  m << " did not arrive (epoch " << s.epoch << ", phase " << phase_name(s.phase) << ", algorithm "
    << algorithm_name(s.algorithm) << ", block " << s.block << ", tile " << s.tile << ", waited "
    << s.waited_ms << " ms)";
  return m.str();
}

// Texts are kept for each thread, so that they can be returned by address.
const char* kept(std::string text) {
  thread_local std::string last;
  last = std::move(text);
  return last.empty() ? nullptr : last.c_str();
}

std::string complaint(const char* arg, const std::string& expected, const std::string& got) {
  return std::string("spec_kernels::pcie_attach: ") + arg + ": expected " + expected + ", got " +
         got;
}

std::string problem(const Attach& a) {
  const auto number = [](auto n) { return std::to_string(n); };
  if (a.version != kVersion) return complaint("version", number(kVersion), number(a.version));
  if (a.world_size < 2 || a.world_size > kMaxRanks)
    return complaint("world_size", "2 to 8 ranks", number(a.world_size));
  if (a.rank < 0 || a.rank >= a.world_size)
    return complaint("rank", "0 <= rank < " + number(a.world_size), number(a.rank));
  if (a.island_size != 0 && !has_islands(a.world_size, a.island_size))
    return complaint("island_size", "0, or 2 or 4 that part the ranks evenly",
                     number(a.island_size));
  constexpr uint64_t kMost = uint64_t{1} << 30;
  if (a.one_shot_bytes < 1 || a.one_shot_bytes > kMost)
    return complaint("one_shot_bytes", "1 byte to 1 GiB", number(a.one_shot_bytes));
  if (a.two_shot_bytes < 1 || a.two_shot_bytes > kMost)
    return complaint("two_shot_bytes", "1 byte to 1 GiB", number(a.two_shot_bytes));
  for (int r = 0; r < a.world_size; ++r) {
    const std::string name = "slabs[" + number(r) + "]";
    if (!a.slabs[r]) return complaint(name.c_str(), "an address", "null");
    if (reinterpret_cast<uintptr_t>(a.slabs[r]) % kSlabAlignment != 0)
      return complaint(name.c_str(), "a multiple of " + number(kSlabAlignment), "another address");
    for (int s = 0; s < r; ++s) {
      if (a.slabs[r] == a.slabs[s])
        return complaint(name.c_str(), "a slab of its own", "that of rank " + number(s));
    }
  }
  if (!a.status_host || !a.status_device)
    return complaint("status", "a record that host and device can write", "null");
  if (a.num_entries < 1 || a.num_entries > kMaxEntries)
    return complaint("num_entries", "1 to 32", number(a.num_entries));
  for (int i = 0; i < a.num_entries; ++i) {
    const Entry& e = a.table[i];
    const std::string name = "table[" + number(i) + "]";
    if (e.algorithm < kOneShot || e.algorithm > kHierarchicalPull)
      return complaint((name + ".algorithm").c_str(), "1 to 4", number(e.algorithm));
    if (e.algorithm >= kHierarchical && a.island_size == 0)
      return complaint((name + ".algorithm").c_str(), "1 or 2 without islands",
                       number(e.algorithm));
    if (e.num_blocks < 1 || e.num_blocks > kMaxBlocks)
      return complaint((name + ".num_blocks").c_str(), "1 to 64", number(e.num_blocks));
    if (i > 0 && e.max_bytes <= a.table[i - 1].max_bytes)
      return complaint((name + ".max_bytes").c_str(), "more than the entry before",
                       number(e.max_bytes));
  }
  return "";
}

std::string unknown(const char* what) {
  return std::string("spec_kernels::") + what +
         ": slab: expected one that is attached, got another";
}

}  // namespace

const Entry& Group::entry(uint64_t bytes) const {
  int i = 0;
  while (i + 1 < attach.num_entries && bytes > attach.table[i].max_bytes) ++i;
  return attach.table[i];
}

Group& group_of(const char* op, const void* slab, int64_t rank, int64_t world_size) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups().find(slab);
  SK_CHECK(found != groups().end(), op, "workspace", "a slab that is attached", "other memory");
  Group& group = found->second;
  SK_CHECK(group.attach.rank == rank, op, "rank", group.attach.rank, rank);
  SK_CHECK(group.attach.world_size == world_size, op, "world_size", group.attach.world_size,
           world_size);
  const std::string failure = failure_of(group, op);
  if (!failure.empty()) throw std::runtime_error(failure);
  return group;
}

cudaStream_t checked_stream(const char* op, Group& group, int32_t device) {
  const cudaStream_t stream = current_stream(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), op);
  if (status != cudaStreamCaptureStatusNone) return stream;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!group.bound) {
    group.bound = true;
    group.stream = stream;
  }
  const auto name = [](cudaStream_t s) {
    std::ostringstream out;
    out << "stream " << static_cast<const void*>(s);
    return out.str();
  };
  SK_CHECK(group.stream == stream, op, "workspace",
           "calls on " + name(group.stream) + ", where this group's first was", name(stream));
  return stream;
}

}  // namespace slab
}  // namespace spec_kernels

#define SK_EXPORT __attribute__((visibility("default")))

using spec_kernels::slab::Attach;
using spec_kernels::slab::Group;

extern "C" {

SK_EXPORT uint64_t spec_kernels_pcie_slab_bytes(int32_t world_size, uint64_t one_shot_bytes,
                                                uint64_t two_shot_bytes, int32_t island_size) {
  return spec_kernels::slab::layout(world_size, one_shot_bytes, two_shot_bytes, island_size).total;
}

SK_EXPORT void spec_kernels_pcie_slab_slots(int32_t world_size, uint64_t one_shot_bytes,
                                            uint64_t two_shot_bytes, int32_t island_size,
                                            uint64_t* begin, uint64_t* end) {
  const auto l =
      spec_kernels::slab::layout(world_size, one_shot_bytes, two_shot_bytes, island_size);
  *begin = l.one_shot.begin;
  *end = l.slots_end;
}

SK_EXPORT const char* spec_kernels_pcie_attach(const Attach* attach) {
  using namespace spec_kernels::slab;
  const std::string wrong = problem(*attach);
  if (!wrong.empty()) return kept(wrong);
  const std::lock_guard<std::mutex> lock(mutex);
  Group group{};
  group.attach = *attach;
  group.layout = layout(attach->world_size, attach->one_shot_bytes, attach->two_shot_bytes,
                        attach->island_size);
  if (!groups().emplace(attach->slabs[attach->rank], group).second)
    return kept(complaint("slabs", "a slab that is not attached yet", "one that is"));
  return nullptr;
}

SK_EXPORT const char* spec_kernels_pcie_detach(const void* slab) {
  using namespace spec_kernels::slab;
  const std::lock_guard<std::mutex> lock(mutex);
  return groups().erase(slab) ? nullptr : kept(unknown("pcie_detach"));
}

SK_EXPORT const char* spec_kernels_pcie_check(const void* slab, const char* op) {
  using namespace spec_kernels::slab;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups().find(slab);
  return kept(found == groups().end() ? unknown("pcie_check") : failure_of(found->second, op));
}

SK_EXPORT const char* spec_kernels_pcie_use_stream(const void* slab, void* stream) {
  using namespace spec_kernels::slab;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = groups().find(slab);
  if (found == groups().end()) return kept(unknown("pcie_use_stream"));
  found->second.bound = true;
  found->second.stream = static_cast<cudaStream_t>(stream);
  return nullptr;
}

}  // extern "C"
