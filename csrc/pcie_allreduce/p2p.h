// What comm/p2p.py calls to try the links between devices, and what it is told. Plain C++.
//
// `device` is an ordinal of the CUDA runtime, `stream` one of spec_kernels_p2p_open's on it. Each
// call returns null or what is wrong, and does not wait, except where it says so. Records are
// host memory that devices can write: p2p_cuda.cu fills one for each of kNumBlocks blocks, or one.
#pragma once

#include <cstdint>

namespace spec_kernels {
namespace p2p {

constexpr int kNumBlocks = 32;
constexpr int kPacketBytes = 16;

// Words that were right, those of the pattern before, and others.
struct Findings {
  uint64_t right, stale, wrong, unused;
};

// Of the device's own clock; `amount` is what was done in between, in the unit of the call.
struct Timing {
  uint64_t begin_ns, end_ns, amount, value;
};

}  // namespace p2p
}  // namespace spec_kernels

#define SK_EXPORT __attribute__((visibility("default")))

extern "C" {
SK_EXPORT const char* spec_kernels_p2p_open(int32_t device, void** stream);
SK_EXPORT const char* spec_kernels_p2p_close(int32_t device, void* stream);
// Waits for all that was started on `stream`.
SK_EXPORT const char* spec_kernels_p2p_wait(int32_t device, void* stream);
// Stores the pattern of `seed`.
SK_EXPORT const char* spec_kernels_p2p_fill(int32_t device, void* stream, void* to,
                                            uint64_t num_packets, uint32_t seed);
// Polls for that pattern where `before`'s may stand; findings[kNumBlocks].
SK_EXPORT const char* spec_kernels_p2p_expect(int32_t device, void* stream, const void* from,
                                              uint64_t num_packets, uint32_t seed, uint32_t before,
                                              uint64_t timeout_ns,
                                              spec_kernels::p2p::Findings* findings);
// One side of a flag's round trips; both words are 0 before. amount: trips, 0 if one did not come.
SK_EXPORT const char* spec_kernels_p2p_ping(int32_t device, void* stream, void* own, void* peers,
                                            bool first, uint32_t num_trips, uint64_t timeout_ns,
                                            spec_kernels::p2p::Timing* timing);
// Dependent loads of 128 bytes. amount: loads.
SK_EXPORT const char* spec_kernels_p2p_chase(int32_t device, void* stream, const void* from,
                                             uint64_t num_lines, uint32_t num_loads,
                                             spec_kernels::p2p::Timing* timing);
// Stores or loads in a stream from when *gate is not 0; amount: bytes; timing[kNumBlocks].
SK_EXPORT const char* spec_kernels_p2p_stream(int32_t device, void* stream, void* remote,
                                              uint64_t packets_per_block, bool write,
                                              const uint32_t* gate, uint64_t duration_ns,
                                              uint64_t timeout_ns,
                                              spec_kernels::p2p::Timing* timing);
}
