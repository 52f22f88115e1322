// What test_simt.py asks of the emulated machine itself. Each check returns "" or what went wrong.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/device.cuh"

extern "C" void simt_begin_record();
extern "C" int simt_end_record();
extern "C" const char* simt_breach();

namespace spec_kernels {
namespace {

constexpr unsigned kAll = 0xffffffffu;

template <class... Params, class... Args>
void run(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, const Args&... args) {
  launch_kernel("selftest", kernel, grid, block, shared, nullptr, args...);
}

__global__ void count_threads(unsigned* count, dim3 grid, dim3 block) {
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const bool same = gridDim.x == grid.x && gridDim.y == grid.y && gridDim.z == grid.z &&
                    blockDim.x == block.x && blockDim.y == block.y && blockDim.z == block.z;
  if (same) atomicAdd(count + b * (block.x * block.y * block.z) + t, 1u);
}

std::string indices() {
  const dim3 grid(3, 2, 2), block(5, 4, 3);
  std::vector<unsigned> count(12 * 60);
  run(count_threads, grid, block, 0, count.data(), grid, block);
  for (unsigned c : count) {
    if (c != 1) return "a thread ran " + std::to_string(c) + " times";
  }
  return "";
}

__global__ void collectives(int* wrong) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned v = static_cast<unsigned>(lane * lane + 7);
  const auto expect = [&](bool ok, int what) {
    if (!ok) atomicMax(wrong, what);
  };
  const auto of = [](int i) { return static_cast<unsigned>(i * i + 7); };
  expect(__shfl_sync(kAll, v, 5) == of(5), 1);
  expect(__shfl_sync(kAll, v, lane + 3, 8) == of(lane / 8 * 8 + (lane + 3) % 8), 2);
  for (int m = 16; m > 0; m /= 2) expect(__shfl_xor_sync(kAll, v, m) == of(lane ^ m), 3);
  expect(__shfl_up_sync(kAll, v, 4) == of(lane < 4 ? lane : lane - 4), 4);
  expect(__shfl_down_sync(kAll, v, 4, 16) == of(lane % 16 + 4 < 16 ? lane + 4 : lane), 5);
  expect(__ballot_sync(kAll, lane % 3 == 0) == 0x49249249u, 6);
  expect(__any_sync(kAll, lane == 9) == 1 && __any_sync(kAll, 0) == 0, 7);
  expect(__all_sync(kAll, 1) == 1 && __all_sync(kAll, lane != 9) == 0, 8);
  expect(__reduce_add_sync(kAll, 1u) == 32 && __reduce_add_sync(kAll, -lane) == -496, 9);
  expect(__reduce_min_sync(kAll, v) == 7 && __reduce_max_sync(kAll, v) == of(31), 10);
  expect(__reduce_min_sync(kAll, 5 - lane) == -26 && __reduce_max_sync(kAll, -lane) == 0, 11);
  expect(__reduce_and_sync(kAll, v | 64u) >= 64 && __reduce_or_sync(kAll, 1u << lane) == kAll, 12);
  expect(__reduce_xor_sync(kAll, 1u << lane) == kAll, 13);
  expect(__match_any_sync(kAll, lane % 2) == (lane % 2 ? 0xaaaaaaaau : 0x55555555u), 14);
  const double wide = __shfl_xor_sync(kAll, lane + 0.5, 1);
  expect(wide == (lane ^ 1) + 0.5, 15);
  if (lane < 8) {
    expect(__reduce_add_sync(0xffu, static_cast<unsigned>(lane)) == 28, 16);
    expect(__shfl_xor_sync(0xffu, v, 4) == of(lane ^ 4), 17);
  } else {
    expect(__ballot_sync(0xffffff00u, 1) == 0xffffff00u, 18);
  }
  __syncwarp();
}

std::string warp_collectives() {
  int wrong = 0;
  run(collectives, dim3(3), dim3(96), 0, &wrong);
  return wrong ? "check " + std::to_string(wrong) : "";
}

__global__ void barriers(int* wrong) {
  const int t = static_cast<int>(threadIdx.x);
  if (__syncthreads_or(t == 50) != 1) atomicMax(wrong, 1);
  if (__syncthreads_or(0) != 0) atomicMax(wrong, 2);
  if (__syncthreads_and(t != 50) != 0) atomicMax(wrong, 3);
  if (__syncthreads_and(1) != 1) atomicMax(wrong, 4);
  if (__syncthreads_count(t % 2) != static_cast<int>(blockDim.x) / 2) atomicMax(wrong, 5);
}

std::string block_barriers() {
  int wrong = 0;
  run(barriers, dim3(4), dim3(100), 0, &wrong);
  return wrong ? "check " + std::to_string(wrong) : "";
}

template <int kRounds>
__device__ int rotate(int value) {
  SK_SHARED(int, box, [128]);
  for (int i = 0; i < kRounds; ++i) {
    box[threadIdx.x] = value;
    __syncthreads();
    value = box[(threadIdx.x + 1) % blockDim.x];
    __syncthreads();
  }
  return value;
}

__global__ void shared_memory(int* wrong) {
  SK_DYNAMIC_SHARED(int, dynamic);
  SK_SHARED(int, once);
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  const int b = static_cast<int>(blockIdx.x);
  if (dynamic[t] == 0 || (t == 0 && once == 0)) atomicMax(wrong, 1);  // not poisoned
  __syncthreads();
  dynamic[t] = b * 1000 + t;
  if (t == 0) once = b;
  if (rotate<3>(b * 1000 + t) != b * 1000 + (t + 3) % n) atomicMax(wrong, 2);
  if (rotate<5>(t) != (t + 5) % n) atomicMax(wrong, 3);
  if (dynamic[(t + 9) % n] != b * 1000 + (t + 9) % n || once != b) atomicMax(wrong, 4);
}

std::string shared() {
  int wrong = 0;
  run(shared_memory, dim3(7), dim3(64), 64 * sizeof(int), &wrong);
  return wrong ? "check " + std::to_string(wrong) : "";
}

__global__ void beyond_shared(int* out) {
  SK_DYNAMIC_SHARED(int, box);
  box[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) *out = box[blockDim.x];
}

std::string shared_overflow() {
  int out = 0;
  run(beyond_shared, dim3(1), dim3(32), 32 * sizeof(int), &out);
  return "";
}

// Every thread takes its neighbour's value; without the barrier it may be the old one.
__global__ void exchange(int* out, bool with_barrier) {
  SK_SHARED(int, box, [64]);
  box[threadIdx.x] = -5;
  __syncthreads();
  box[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = box[(threadIdx.x + 1) % 64];
}

std::string exchanged(bool with_barrier) {
  int out[64];
  run(exchange, dim3(1), dim3(64), 0, static_cast<int*>(out), with_barrier);
  for (int t = 0; t < 64; ++t) {
    if (out[t] != (t + 1) % 64) return "stale";
  }
  return "";
}

__global__ void atomics(int* sum, unsigned* bits, int* largest, float* total) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(sum, i);
  atomicOr(bits, 1u << i % 32);
  atomicMax(largest, i);
  atomicAdd(total, 1.0f);
  int seen = *sum;
  while (true) {  // one more each, by compare and swap
    const int was = atomicCAS(sum, seen, seen + 1);
    if (was == seen) break;
    seen = was;
  }
}

std::string atomic_sums() {
  int sum = 0, largest = 0;
  unsigned bits = 0;
  float total = 0;
  run(atomics, dim3(4), dim3(64), 0, &sum, &bits, &largest, &total);
  const bool right = sum == 255 * 128 + 256 && bits == kAll && largest == 255 && total == 256.0f;
  return right ? "" : "sum " + std::to_string(sum);
}

__global__ void divergent() {
  if (threadIdx.x % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void barrier_after_exit() {
  if (threadIdx.x == 7) return;
  __syncthreads();
}

__global__ void missing_lane() {
  if (threadIdx.x != 7) __syncwarp();
  __syncthreads();
}

__global__ void mask_lacks_caller() { __syncwarp(0xfffffffeu); }

__global__ void lane_outside_mask(int* out) {
  if (threadIdx.x < 8) *out = __shfl_sync(0xffu, 1, 9);
}

__global__ void exited_lane() {
  if (threadIdx.x == 7) return;
  __nanosleep(1);
  __syncwarp();
}

__global__ void waits_for_ever(const uint32_t* flag) {
  while (load_relaxed_system(flag) == 0) __nanosleep(20);
}

__global__ void traps() {
  if (threadIdx.x == 3) __trap();
}

std::string launch_errors() {
  const auto refused = [](dim3 grid, dim3 block, size_t shared) {
    simt::launch(nullptr, grid, block, shared, nullptr, [] {});
    return cudaGetLastError() != cudaSuccess;
  };
  if (!refused(dim3(0), dim3(32), 0)) return "no blocks";
  if (!refused(dim3(1), dim3(1025), 0)) return "1025 threads";
  if (!refused(dim3(1, 65536), dim3(32), 0)) return "gridDim.y";
  if (!refused(dim3(1), dim3(32), 49153)) return "dynamic shared memory without asking";
  if (refused(dim3(1), dim3(32), 49152)) return "48 KiB";
  int wrong = 0;
  run(shared_memory, dim3(1), dim3(64), 100 << 10 >> 1, &wrong);
  run(shared_memory, dim3(1), dim3(64), 97 << 10, &wrong);
  if (wrong) return "wrong " + std::to_string(wrong);
  for (const size_t bytes : {99 << 10, 100 << 10}) {  // the static arrays come on top
    try {
      run(shared_memory, dim3(1), dim3(64), bytes, &wrong);
      return std::to_string(bytes) + " bytes";
    } catch (const std::runtime_error&) {
    }
  }
  return "";
}

// One of two devices: call e writes word e of the peer's slot and waits for its own. Two slots, so
// that a device may be a whole call ahead.
__global__ void pass_on(uint32_t* mine, uint32_t* peers, uint32_t* sum, uint32_t epoch) {
  const uint32_t at = epoch % 2 * blockDim.x + threadIdx.x;
  store_relaxed_system(peers + at, epoch * 100 + threadIdx.x + 1);
  uint32_t got;
  do got = load_relaxed_system(mine + at);
  while (got != epoch * 100 + threadIdx.x + 1);
  sum[threadIdx.x] += got;
}

// A call that a device may refuse breaks the capture it stands in, and no other.
std::string broken_captures() {
  const auto breach = [](const std::function<void()>& call) {
    simt_begin_record();
    call();
    return std::string(simt_end_record() < 0 ? simt_breach() : "");
  };
  uint32_t cells[2] = {1, 2};
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  void* p = nullptr;
  if (breach([&] { cudaFree(nullptr); }) != "cudaFree") return "free";
  if (breach([&] { cudaMalloc(&p, 4); }) != "cudaMalloc" || p) return "allocate";
  if (breach([&] { cudaStreamSynchronize(stream); }) != "cudaStreamSynchronize") return "wait";
  if (breach([&] { cudaDeviceSynchronize(); }) != "cudaDeviceSynchronize") return "wait for all";
  const auto copy = [&] {
    cudaMemcpyAsync(&cells[0], &cells[1], 4, cudaMemcpyDeviceToHost, stream);
  };
  if (breach(copy) != "cudaMemcpyAsync") return "copy";
  const auto launch = [&] { launch_kernel("selftest", divergent, dim3(1), dim3(64), 0, stream); };
  const std::string wrong = breach(launch);
  cudaStreamDestroy(stream);
  return wrong;
}

// Launches of both devices are queued back to back and joined only at the end.
std::string two_devices() {
  constexpr uint32_t kThreads = 40, kCalls = 30;
  std::vector<uint32_t> slots[2], sums[2];
  cudaStream_t streams[2];
  for (int d = 0; d < 2; ++d) {
    slots[d].assign(2 * kThreads, 0);
    sums[d].assign(kThreads, 0);
    cudaSetDevice(d);
    cudaStreamCreate(&streams[d]);
  }
  simt::slow_device(1, 16);
  for (int d = 0; d < 2; ++d) {
    for (uint32_t e = 1; e <= kCalls; ++e) {
      launch_kernel("selftest", pass_on, dim3(1), dim3(kThreads), 0, streams[d], slots[d].data(),
                    slots[1 - d].data(), sums[d].data(), e);
    }
  }
  cudaStreamSynchronize(streams[0]);
  cudaStreamSynchronize(streams[1]);
  simt::slow_device(1, 1);
  std::string wrong;
  for (int d = 0; d < 2; ++d) {
    for (uint32_t t = 0; t < kThreads; ++t) {
      if (sums[d][t] != 100 * kCalls * (kCalls + 1) / 2 + kCalls * (t + 1)) wrong = "wrong sum";
    }
    cudaStreamDestroy(streams[d]);
  }
  cudaSetDevice(0);
  return wrong;
}

template <class... Params, class... Args>
std::function<std::string()> raises(void (*kernel)(Params...), int num_threads, Args... args) {
  return [=] {
    run(kernel, dim3(2), dim3(static_cast<unsigned>(num_threads)), 0, args...);
    return std::string("nothing was raised");
  };
}

const std::map<std::string, std::function<std::string()>>& checks() {
  static uint32_t zero = 0;
  static int out = 0;
  static const std::map<std::string, std::function<std::string()>> all = {
      {"indices", indices},
      {"warp_collectives", warp_collectives},
      {"block_barriers", block_barriers},
      {"shared", shared},
      {"shared_overflow", shared_overflow},
      {"exchange", [] { return exchanged(true); }},
      {"exchange_without_barrier", [] { return exchanged(false); }},
      {"atomic_sums", atomic_sums},
      {"launch_errors", launch_errors},
      {"two_devices", two_devices},
      {"broken_captures", broken_captures},
      {"divergent", raises(divergent, 64)},
      {"barrier_after_exit", raises(barrier_after_exit, 64)},
      {"missing_lane", raises(missing_lane, 64)},
      {"mask_lacks_caller", raises(mask_lacks_caller, 32)},
      {"lane_outside_mask", raises(lane_outside_mask, 32, &out)},
      {"exited_lane", raises(exited_lane, 32)},
      {"waits_for_ever", raises(waits_for_ever, 32, &zero)},
      {"traps", raises(traps, 32)},
  };
  return all;
}

}  // namespace
}  // namespace spec_kernels

extern "C" __attribute__((visibility("default"))) const char* selftest(const char* name) {
  static std::string result;
  try {
    result = spec_kernels::checks().at(name)();
  } catch (const std::exception& error) {
    result = error.what();
  }
  return result.c_str();
}

extern "C" __attribute__((visibility("default"))) void convert(const float* in, uint16_t* bf16,
                                                               uint16_t* half, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const __nv_bfloat16 b = __float2bfloat16_rn(in[i]);
    const __half h = __float2half_rn(in[i]);
    std::memcpy(bf16 + i, &b, sizeof(b));
    std::memcpy(half + i, &h, sizeof(h));
  }
}

extern "C" __attribute__((visibility("default"))) void widen(const uint16_t* in, float* bf16,
                                                             float* half, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    __nv_bfloat16 b;
    __half h;
    std::memcpy(&b, in + i, sizeof(b));
    std::memcpy(&h, in + i, sizeof(h));
    bf16[i] = __bfloat162float(b);
    half[i] = __half2float(h);
  }
}
