// A CUDA driver for machines without one, as far as spec_kernels/comm/cuda_driver.py needs it:
// device memory is shared memory that other processes open through /proc, so ranks in processes of
// their own can run the emulated kernels on each other's slabs.
//
// It keeps the rules that a real driver keeps and a test could break unseen: no use after a fork
// from an initialised process, no call without a context, no opening of one's own handle, no
// freeing of memory that others have open (counted). What goes wrong on real machines is switched
// on by fake_fail and fake_link; each process has its own switches, those set before a fork are
// inherited.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kMaxDevices = 16;
constexpr size_t kPage = 4096;

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kMapFailed = 205,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kPeerAccessAlreadyEnabled = 704,
};

struct Named {
  int status;
  const char *name, *text;
};
constexpr Named kNames[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kMapFailed, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
};

enum Link : int {
  kWorks,
  kRefused,   // and the driver says so
  kDrops,     // said to work; stores go nowhere
  kPartial,   // said to work; stores to every other page go nowhere
  kLate,      // said to work; stores arrive after kLateness
  kSaysNone,  // works, but the driver says that it does not
};
constexpr std::chrono::milliseconds kLateness{1500};

// The last page of every allocation's file, seen by all who have it open.
struct Shared {
  std::atomic<int> importers;
};

struct Allocation {
  int device, fd;
  size_t bytes;  // rounded up to pages, without the last one
};
struct Import {
  int num_opens;
  size_t bytes;
  Shared* shared;
  bool late;  // a thread goes on using it
  char key[64];
};
struct Handle {
  uint64_t magic;
  int pid, fd, device;
  uint64_t bytes, serial;
};
static_assert(sizeof(Handle) <= 64);
constexpr uint64_t kMagic = 0x66616b652d637564u;

struct Failure {
  int status, after;
};

struct State {
  std::mutex mutex;
  int num_devices = 8, rotate = 0, initialized_by = 0, num_violations = 0, num_streams = 0;
  uint64_t serial = 0;
  int contexts[kMaxDevices] = {};
  Link links[kMaxDevices][kMaxDevices] = {};
  bool enabled[kMaxDevices][kMaxDevices] = {};
  std::map<std::string, Failure> failures;
  std::map<uint64_t, Allocation> allocations;
  std::map<uint64_t, Import> imports;
  std::map<void*, size_t> host;
};
State& state() {
  static State* const s = new State;
  return *s;
}

thread_local std::vector<int> current;  // devices of the pushed contexts

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// What `ordinal` of this process is called by its serial number in the machine.
int physical(int ordinal) { return (ordinal + state().rotate) % state().num_devices; }

// The injected status of `call`, else whether the driver can be used at all.
int usable(const char* call, bool needs_context = true) {
  State& s = state();
  const auto failure = s.failures.find(call);
  if (failure != s.failures.end() && failure->second.after-- == 0) return failure->second.status;
  if (s.initialized_by != getpid()) return kNotInitialized;
  if (!needs_context) return kSuccess;
  if (current.empty() || s.contexts[current.back()] == 0) return kInvalidContext;
  return kSuccess;
}

int device_or_error(const char* call, int device) {
  const int status = usable(call, false);
  if (status != kSuccess) return status;
  return device >= 0 && device < state().num_devices ? kSuccess : kInvalidDevice;
}

bool inside(uint64_t address, size_t bytes) {
  State& s = state();
  const auto in = [&](const auto& map) {
    auto it = map.upper_bound(address);
    if (it == map.begin()) return false;
    --it;
    return address + bytes <= it->first + it->second.bytes;
  };
  return in(s.allocations) || in(s.imports);
}

void* map_file(int fd, size_t bytes, int flags) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  return p == MAP_FAILED ? nullptr : p;
}

// Keeps a private copy and brings what was stored in it to the real memory, later.
void bring_late(char* mine, int fd, size_t bytes) {
  char* real = static_cast<char*>(map_file(fd, bytes, MAP_SHARED));
  std::thread([mine, real, bytes] {
    std::vector<char> last(mine, mine + bytes);
    for (;;) {
      std::vector<char> seen(mine, mine + bytes);
      std::this_thread::sleep_for(kLateness);
      for (size_t i = 0; i < bytes; ++i) {
        if (seen[i] != last[i]) real[i] = seen[i];
      }
      last = seen;
    }
  }).detach();
}

}  // namespace

#define LOCK const std::lock_guard<std::mutex> lock(state().mutex)
#define REQUIRE(...)                         \
  do {                                       \
    const int status_ = __VA_ARGS__;         \
    if (status_ != kSuccess) return status_; \
  } while (0)

// Switches for tests.

// Visible devices of this process: ordinal i is device (i + rotate) of the machine.
EXPORT void fake_devices(int num, int rotate) {
  state().num_devices = num;
  state().rotate = rotate;
}
// Call `after` more of `call` succeed, the next one gives `status`.
EXPORT void fake_fail(const char* call, int status, int after) {
  state().failures[call] = {status, after};
}
EXPORT void fake_link(int from, int to, int link) {
  state().links[from][to] = static_cast<Link>(link);
}
// Allocations, open handles, host memory, streams and contexts that this process holds.
EXPORT int fake_held() {
  LOCK;
  const State& s = state();
  int held = static_cast<int>(s.allocations.size() + s.imports.size() + s.host.size());
  held += s.num_streams;
  for (const int references : s.contexts) held += references;
  return held;
}
// Times that memory was freed under a process that had it open.
EXPORT int fake_violations() { return state().num_violations; }

EXPORT int cuInit(unsigned) {
  LOCK;
  State& s = state();
  const auto failure = s.failures.find("cuInit");
  if (failure != s.failures.end() && failure->second.after-- == 0) return failure->second.status;
  if (s.initialized_by != 0 && s.initialized_by != getpid()) return kNotInitialized;
  if (s.num_devices == 0) return kNoDevice;
  s.initialized_by = getpid();
  return kSuccess;
}
EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
EXPORT int cuGetErrorName(int status, const char** text) {
  for (const Named& n : kNames) {
    if (n.status == status) return *text = n.name, kSuccess;
  }
  return *text = nullptr, kInvalidValue;
}
EXPORT int cuGetErrorString(int status, const char** text) {
  for (const Named& n : kNames) {
    if (n.status == status) return *text = n.text, kSuccess;
  }
  return *text = nullptr, kInvalidValue;
}
EXPORT int cuDeviceGetCount(int* count) {
  LOCK;
  REQUIRE(usable("cuDeviceGetCount", false));
  *count = state().num_devices;
  return kSuccess;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceGet", ordinal));
  *device = ordinal;
  return kSuccess;
}
EXPORT int cuDeviceGetName(char* name, int len, int device) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceGetName", device));
  std::snprintf(name, static_cast<size_t>(len), "Emulated GPU");
  return kSuccess;
}
EXPORT int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceGetUuid_v2", device));
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(0x10 * physical(device) + i);
  return kSuccess;
}
EXPORT int cuDeviceGetPCIBusId(char* id, int len, int device) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceGetPCIBusId", device));
  std::snprintf(id, static_cast<size_t>(len), "0000:%02X:00.0", 0xC1 + physical(device));
  return kSuccess;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceGetAttribute", device));
  *value = attribute == 75 ? 12 : 0;  // compute capability 12.0
  return kSuccess;
}
EXPORT int cuDeviceCanAccessPeer(int* can, int device, int peer) {
  LOCK;
  REQUIRE(device_or_error("cuDeviceCanAccessPeer", device));
  REQUIRE(device_or_error("", peer));
  const Link link = state().links[physical(device)][physical(peer)];
  *can = device != peer && link != kRefused && link != kSaysNone;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  LOCK;
  REQUIRE(device_or_error("cuDevicePrimaryCtxRetain", device));
  ++state().contexts[device];
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(device + 1));
  return kSuccess;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  LOCK;
  REQUIRE(device_or_error("cuDevicePrimaryCtxRelease_v2", device));
  if (state().contexts[device] == 0) return kInvalidContext;
  --state().contexts[device];
  return kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  LOCK;
  REQUIRE(usable("cuCtxPushCurrent_v2", false));
  const int device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  if (device < 0 || device >= state().num_devices) return kInvalidContext;
  current.push_back(device);
  return kSuccess;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  LOCK;
  REQUIRE(usable("cuCtxPopCurrent_v2", false));
  if (current.empty()) return kInvalidContext;
  *context = reinterpret_cast<void*>(static_cast<uintptr_t>(current.back() + 1));
  current.pop_back();
  return kSuccess;
}
EXPORT int cuCtxEnablePeerAccess(void* context, unsigned) {
  LOCK;
  REQUIRE(usable("cuCtxEnablePeerAccess"));
  const int peer = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  if (peer == current.back()) return kInvalidContext;
  if (state().links[physical(current.back())][physical(peer)] == kRefused)
    return kPeerAccessUnsupported;
  bool& enabled = state().enabled[current.back()][peer];
  if (enabled) return kPeerAccessAlreadyEnabled;
  enabled = true;
  return kSuccess;
}
EXPORT int cuCtxSynchronize() {
  LOCK;
  return usable("cuCtxSynchronize");
}

EXPORT int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  LOCK;
  REQUIRE(usable("cuMemAlloc_v2"));
  if (bytes == 0) return kInvalidValue;
  const size_t size = pages(bytes);
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0) return kOutOfMemory;
  void* p = ftruncate(fd, static_cast<off_t>(size + kPage)) == 0
                ? map_file(fd, size + kPage, MAP_SHARED)
                : nullptr;
  if (!p) return close(fd), kOutOfMemory;
  std::memset(p, 0xcd, size);
  *address = reinterpret_cast<uint64_t>(p);
  state().allocations[*address] = {current.back(), fd, size};
  return kSuccess;
}
EXPORT int cuMemFree_v2(uint64_t address) {
  LOCK;
  REQUIRE(usable("cuMemFree_v2"));
  const auto it = state().allocations.find(address);
  if (it == state().allocations.end()) return kInvalidValue;
  char* p = reinterpret_cast<char*>(address);
  const size_t size = it->second.bytes;
  if (reinterpret_cast<Shared*>(p + size)->importers != 0) {
    ++state().num_violations;
    std::memset(p, 0xee, size);
  }
  munmap(p, size + kPage);
  close(it->second.fd);
  state().allocations.erase(it);
  return kSuccess;
}
EXPORT int cuMemsetD8_v2(uint64_t address, unsigned char byte, size_t bytes) {
  LOCK;
  REQUIRE(usable("cuMemsetD8_v2"));
  if (!inside(address, bytes)) return kInvalidValue;
  std::memset(reinterpret_cast<void*>(address), byte, bytes);
  return kSuccess;
}
// Streams of the driver's: what is asked for is done at once.
EXPORT int cuStreamCreate(void** stream, unsigned) {
  LOCK;
  REQUIRE(usable("cuStreamCreate"));
  ++state().num_streams;
  *stream = &state().num_streams;
  return kSuccess;
}
EXPORT int cuStreamSynchronize(void*) {
  LOCK;
  return usable("cuStreamSynchronize");
}
EXPORT int cuStreamDestroy_v2(void*) {
  LOCK;
  REQUIRE(usable("cuStreamDestroy_v2"));
  --state().num_streams;
  return kSuccess;
}
EXPORT int cuMemsetD32Async(uint64_t address, unsigned word, size_t count, void*) {
  LOCK;
  REQUIRE(usable("cuMemsetD32Async"));
  if (address % 4 != 0 || !inside(address, 4 * count)) return kInvalidValue;
  for (size_t i = 0; i < count; ++i)
    __atomic_store_n(reinterpret_cast<unsigned*>(address) + i, word, __ATOMIC_RELAXED);
  return kSuccess;
}
EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
  LOCK;
  REQUIRE(usable("cuMemcpyHtoD_v2"));
  if (!inside(to, bytes)) return kInvalidValue;
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return kSuccess;
}
EXPORT int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  LOCK;
  REQUIRE(usable("cuMemcpyDtoH_v2"));
  if (!inside(from, bytes)) return kInvalidValue;
  std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}

EXPORT int cuIpcGetMemHandle(char* handle, uint64_t address) {
  LOCK;
  REQUIRE(usable("cuIpcGetMemHandle"));
  const auto it = state().allocations.find(address);
  if (it == state().allocations.end()) return kInvalidValue;
  const Allocation& a = it->second;
  const Handle h{kMagic, getpid(), a.fd, physical(a.device), a.bytes, ++state().serial};
  std::memset(handle, 0, 64);
  std::memcpy(handle, &h, sizeof(h));
  return kSuccess;
}
struct CallersHandle {
  char bytes[64];
};
EXPORT int cuIpcOpenMemHandle_v2(uint64_t* address, CallersHandle handle, unsigned flags) {
  LOCK;
  REQUIRE(usable("cuIpcOpenMemHandle_v2"));
  Handle h;
  std::memcpy(&h, handle.bytes, sizeof(h));
  if (h.magic != kMagic) return kInvalidHandle;
  if (flags != 1) return kInvalidValue;
  if (h.pid == getpid()) return kInvalidContext;
  for (auto& [at, import] : state().imports) {
    if (std::memcmp(import.key, handle.bytes, 64) == 0) {
      ++import.num_opens;
      *address = at;
      return kSuccess;
    }
  }
  const int from = physical(current.back());
  const Link link = from == h.device ? kWorks : state().links[from][h.device];
  if (link == kRefused) return kPeerAccessUnsupported;
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kMapFailed;
  const bool whole = link == kWorks || link == kPartial || link == kSaysNone;
  char* p = static_cast<char*>(map_file(fd, h.bytes + kPage, whole ? MAP_SHARED : MAP_PRIVATE));
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(h.bytes)));
  if (!p || shared == MAP_FAILED) return close(fd), kMapFailed;
  if (link == kPartial) {
    for (size_t at = 0; at < h.bytes; at += 2 * kPage) {
      mmap(p + at, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd,
           static_cast<off_t>(at));
    }
  }
  if (link == kLate) bring_late(p, fd, h.bytes);
  close(fd);
  ++shared->importers;
  Import import{1, h.bytes, shared, link == kLate, {}};
  std::memcpy(import.key, handle.bytes, 64);
  *address = reinterpret_cast<uint64_t>(p);
  state().imports[*address] = import;
  return kSuccess;
}
EXPORT int cuIpcCloseMemHandle(uint64_t address) {
  LOCK;
  REQUIRE(usable("cuIpcCloseMemHandle"));
  const auto it = state().imports.find(address);
  if (it == state().imports.end()) return kInvalidValue;
  if (--it->second.num_opens > 0) return kSuccess;
  --it->second.shared->importers;
  munmap(it->second.shared, kPage);
  if (!it->second.late) munmap(reinterpret_cast<void*>(address), it->second.bytes + kPage);
  state().imports.erase(it);
  return kSuccess;
}

EXPORT int cuMemHostAlloc(void** p, size_t bytes, unsigned) {
  LOCK;
  REQUIRE(usable("cuMemHostAlloc"));
  void* made =
      mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return kOutOfMemory;
  std::memset(made, 0xcd, bytes);
  state().host[made] = bytes;
  *p = made;
  return kSuccess;
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* address, void* p, unsigned) {
  LOCK;
  REQUIRE(usable("cuMemHostGetDevicePointer_v2"));
  if (!state().host.count(p)) return kInvalidValue;
  *address = reinterpret_cast<uint64_t>(p);
  return kSuccess;
}
EXPORT int cuMemFreeHost(void* p) {
  LOCK;
  REQUIRE(usable("cuMemFreeHost"));
  const auto it = state().host.find(p);
  if (it == state().host.end()) return kInvalidValue;
  munmap(p, pages(it->second));
  state().host.erase(it);
  return kSuccess;
}
