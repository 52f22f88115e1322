// Tries the links between devices: patterns that show what arrives, and how fast it does
// (spec_kernels/comm/p2p.py). Every kernel ends by its own clock, whatever a link does.
//
// No ops: what is called from Python stands at the end, takes addresses that the driver gave, and
// returns null or what is wrong (valid until the thread's next call).
#include "common/device.cuh"
#include "pcie_allreduce/p2p.h"
#include "pcie_allreduce/protocol.cuh"

namespace spec_kernels {
namespace p2p {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr uint32_t kPollsPerLook = 64;

__device__ inline uint64_t first_packet() { return uint64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ inline uint64_t packet_stride() { return uint64_t{gridDim.x} * kThreads; }

// Differs from word to word, and at every word from seed to seed.
__device__ inline Packet pattern(uint32_t seed, uint64_t packet) {
  Packet p;
#pragma unroll
  for (uint32_t w = 0; w < 4; ++w)
    p.words[w] = (static_cast<uint32_t>(packet) * 4 + w) * 0x9e3779b1u ^ seed;
  return p;
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(char* to, uint64_t num_packets, uint32_t seed) {
  for (uint64_t i = first_packet(); i < num_packets; i += packet_stride())
    pcie::store_packet(to + i * sizeof(Packet), pattern(seed, i));
}

// Waits for the pattern of `seed`, until `timeout_ns` after its start, and counts what stands
// there.
__global__ void __launch_bounds__(kThreads)
    expect_kernel(const char* from, uint64_t num_packets, uint32_t seed, uint32_t before,
                  uint64_t timeout_ns, Findings* findings) {
  SK_SHARED(uint32_t, counts, [3]);
  if (threadIdx.x < 3) counts[threadIdx.x] = 0;
  __syncthreads();
  const uint64_t start = pcie::device_nanoseconds();
  bool late = false;
  for (uint64_t i = first_packet(); i < num_packets; i += packet_stride()) {
    const Packet want = pattern(seed, i), old = pattern(before, i);
    Packet got;
    for (uint32_t polls = 1;; ++polls) {
      got = pcie::load_packet(from + i * sizeof(Packet));
      const bool there = got.words[0] == want.words[0] && got.words[1] == want.words[1] &&
                         got.words[2] == want.words[2] && got.words[3] == want.words[3];
      if (there || late) break;
      if (polls % kPollsPerLook == 0) late = pcie::device_nanoseconds() - start > timeout_ns;
      pcie::idle();
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int what = got.words[w] == want.words[w] ? 0 : got.words[w] == old.words[w] ? 1 : 2;
      atomicAdd(&counts[what], 1u);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  findings[blockIdx.x] = {counts[0], counts[1], counts[2], 0};
}

// Flags to and fro, one thread a side: the first of the two times `num_trips` round trips.
__global__ void ping_kernel(uint32_t* own, uint32_t* peers, bool first, uint32_t num_trips,
                            uint64_t timeout_ns, Timing* timing) {
  const uint64_t start = pcie::device_nanoseconds();
  uint64_t begin = start;
  uint32_t done = 0;
  for (uint32_t trip = 1; trip <= num_trips; ++trip) {
    // The first trip starts the clock: by then both kernels run.
    if (trip == 2) begin = pcie::device_nanoseconds();
    if (first) store_relaxed_system(peers, trip);
    uint32_t polls = 0;
    bool here = true;
    while (load_relaxed_system(own) != trip) {
      pcie::idle();
      if (++polls % kPollsPerLook != 0) continue;
      here = pcie::device_nanoseconds() - start <= timeout_ns;
      if (!here) break;
    }
    if (!here) break;
    if (!first) store_relaxed_system(peers, trip);
    done = trip;
  }
  *timing = {begin, pcie::device_nanoseconds(), done == num_trips ? done - 1u : 0u, 0};
}

// A warp loads 128 bytes, and the next only when it has them: their address depends on them.
__global__ void __launch_bounds__(kLanes)
    chase_kernel(const char* from, uint64_t num_lines, uint32_t num_loads, uint32_t zero,
                 Timing* timing) {
  constexpr uint64_t kLine = 128;
  uint64_t line = 0;
  uint32_t sum = load_relaxed_system(reinterpret_cast<const uint32_t*>(from) + threadIdx.x);
  const uint64_t begin = pcie::device_nanoseconds();
  for (uint32_t n = 0; n < num_loads; ++n) {
    line = (line + 1 + (sum & zero)) % num_lines;
    sum +=
        load_relaxed_system(reinterpret_cast<const uint32_t*>(from + line * kLine) + threadIdx.x);
    sum = __shfl_xor_sync(0xffffffffu, sum, 1);
  }
  if (threadIdx.x == 0) *timing = {begin, pcie::device_nanoseconds(), num_loads, sum};
}

// Once the gate is open, stores to (or loads from) `remote` for `duration_ns`, each block in its
// own part. What was stored has arrived when the clock is stopped.
__global__ void __launch_bounds__(kThreads)
    stream_kernel(char* remote, uint64_t packets_per_block, bool write, const uint32_t* gate,
                  uint64_t duration_ns, uint64_t timeout_ns, Timing* timing) {
  SK_SHARED(uint32_t, go_on);
  if (threadIdx.x == 0) {
    const uint64_t start = pcie::device_nanoseconds();
    do {
      pcie::idle();
      go_on = load_relaxed_system(gate);
    } while (!go_on && pcie::device_nanoseconds() - start <= timeout_ns);
  }
  __syncthreads();
  char* const mine = remote + blockIdx.x * packets_per_block * sizeof(Packet);
  const uint64_t begin = pcie::device_nanoseconds();
  uint64_t num_passes = 0;
  uint32_t sum = 0;
  while (go_on) {
#pragma unroll 4
    for (uint64_t i = threadIdx.x; i < packets_per_block; i += kThreads) {
      char* const p = mine + i * sizeof(Packet);
      if (write) {
        pcie::store_packet(p, filled(0));
      } else {
        sum ^= pcie::load_packet(p).words[0];
      }
    }
    ++num_passes;
    __syncthreads();
    if (threadIdx.x == 0) go_on = pcie::device_nanoseconds() - begin < duration_ns;
    __syncthreads();
  }
  if (write) __threadfence_system();
  const int loaded = __syncthreads_or(sum == 1u);  // every thread has what it asked for
  if (threadIdx.x != 0) return;
  const uint64_t bytes = num_passes * packets_per_block * sizeof(Packet);
  timing[blockIdx.x] = {begin, pcie::device_nanoseconds(), bytes, static_cast<uint64_t>(loaded)};
}

template <class F>
const char* guarded(int32_t device, F&& function) {
  thread_local std::string problem;
  try {
    const DeviceGuard guard(device);
    function();
    return nullptr;
  } catch (const std::exception& error) {
    problem = error.what();
    return problem.c_str();
  }
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace
}  // namespace p2p
}  // namespace spec_kernels

using namespace spec_kernels;  // NOLINT: definitions of what p2p.h declares

const char* spec_kernels_p2p_open(int32_t device, void** stream) {
  return p2p::guarded(device, [&] {
    cudaStream_t made = nullptr;
    check_cuda(cudaStreamCreate(&made), "cudaStreamCreate");
    *stream = made;
  });
}

const char* spec_kernels_p2p_close(int32_t device, void* stream) {
  return p2p::guarded(
      device, [&] { check_cuda(cudaStreamDestroy(p2p::stream_of(stream)), "cudaStreamDestroy"); });
}

const char* spec_kernels_p2p_wait(int32_t device, void* stream) {
  return p2p::guarded(device, [&] {
    check_cuda(cudaStreamSynchronize(p2p::stream_of(stream)), "cudaStreamSynchronize");
  });
}

const char* spec_kernels_p2p_fill(int32_t device, void* stream, void* to, uint64_t num_packets,
                                  uint32_t seed) {
  return p2p::guarded(device, [&] {
    launch_kernel("p2p fill", &p2p::fill_kernel, p2p::kNumBlocks, p2p::kThreads, 0,
                  p2p::stream_of(stream), static_cast<char*>(to), num_packets, seed);
  });
}

const char* spec_kernels_p2p_expect(int32_t device, void* stream, const void* from,
                                    uint64_t num_packets, uint32_t seed, uint32_t before,
                                    uint64_t timeout_ns, p2p::Findings* findings) {
  return p2p::guarded(device, [&] {
    launch_kernel("p2p expect", &p2p::expect_kernel, p2p::kNumBlocks, p2p::kThreads, 0,
                  p2p::stream_of(stream), static_cast<const char*>(from), num_packets, seed, before,
                  timeout_ns, findings);
  });
}

const char* spec_kernels_p2p_ping(int32_t device, void* stream, void* own, void* peers, bool first,
                                  uint32_t num_trips, uint64_t timeout_ns, p2p::Timing* timing) {
  return p2p::guarded(device, [&] {
    launch_kernel("p2p ping", &p2p::ping_kernel, 1, 1, 0, p2p::stream_of(stream),
                  static_cast<uint32_t*>(own), static_cast<uint32_t*>(peers), first, num_trips,
                  timeout_ns, timing);
  });
}

const char* spec_kernels_p2p_chase(int32_t device, void* stream, const void* from,
                                   uint64_t num_lines, uint32_t num_loads, p2p::Timing* timing) {
  return p2p::guarded(device, [&] {
    launch_kernel("p2p chase", &p2p::chase_kernel, 1, p2p::kLanes, 0, p2p::stream_of(stream),
                  static_cast<const char*>(from), num_lines, num_loads, 0u, timing);
  });
}

const char* spec_kernels_p2p_stream(int32_t device, void* stream, void* remote,
                                    uint64_t packets_per_block, bool write, const uint32_t* gate,
                                    uint64_t duration_ns, uint64_t timeout_ns,
                                    p2p::Timing* timing) {
  return p2p::guarded(device, [&] {
    launch_kernel("p2p stream", &p2p::stream_kernel, p2p::kNumBlocks, p2p::kThreads, 0,
                  p2p::stream_of(stream), static_cast<char*>(remote), packets_per_block, write,
                  gate, duration_ns, timeout_ns, timing);
  });
}
