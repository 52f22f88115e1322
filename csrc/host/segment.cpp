#include "host/segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <system_error>

namespace spec_kernels {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::system_error(error, std::system_category(), "spec_kernels segment: " + what);
}

std::string mib(uint64_t bytes) {
  std::ostringstream out;
  out.precision(1);
  out << std::fixed << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return out.str();
}

// Bytes that can be had now: allocating beyond them would not fail but wake the out-of-memory
// killer.
uint64_t available_bytes() {
  uint64_t available = std::numeric_limits<uint64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    uint64_t kib = 0;
    if (key == "MemAvailable:" && meminfo >> kib) available = kib * 1024;
    std::getline(meminfo, unit);
  }
  uint64_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

}  // namespace

LifeHolder::LifeHolder(std::atomic<uint32_t>* word) {
  // Signals of the process belong to its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, word] { hold(word); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return held_; });
  if (error_) {
    lock.unlock();
    thread_.join();
    fail("this kernel has no robust futexes, which tell a dead rank", error_);
  }
}

LifeHolder::~LifeHolder() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leave_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void LifeHolder::hold(std::atomic<uint32_t>* word) {
  // The thread's own list replaces the C library's: this thread locks no robust mutex but this
  // word.
  robust_list_head list{};
  robust_list node{&list.list};
  list.list.next = &node;
  list.futex_offset = reinterpret_cast<char*>(word) - reinterpret_cast<char*>(&node);
  const bool ok = syscall(SYS_set_robust_list, &list, sizeof(list)) == 0;
  if (ok) word->store(static_cast<uint32_t>(syscall(SYS_gettid)));
  std::unique_lock<std::mutex> lock(mutex_);
  error_ = ok ? 0 : errno;
  held_ = true;
  changed_.notify_all();
  if (!ok) return;
  changed_.wait(lock, [this] { return leave_; });
  list.list.next = &list.list;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  word->store(group::kLeft);
}

Segment::Segment(int fd, uint64_t size) : fd_(fd), size_(size) {
  data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data_ == MAP_FAILED) {
    const int error = errno;
    close(fd);
    fail("cannot map " + mib(size), error);
  }
}

Segment::~Segment() {
  leave();
  munmap(data_, size_);
  close(fd_);
}

std::unique_ptr<Segment> Segment::create(uint32_t world_size, uint64_t capacity,
                                         const group::Policy& policy) {
  if (world_size < 1 || world_size > group::kMaxRanks) {
    throw std::invalid_argument("spec_kernels segment: world_size: expected 1 to 8 ranks, got " +
                                std::to_string(world_size));
  }
  if (capacity < group::kSlotAlignment || capacity % group::kSlotAlignment ||
      capacity > (1ull << 40)) {
    throw std::invalid_argument(
        "spec_kernels segment: capacity: expected a multiple of 4096 bytes, got " +
        std::to_string(capacity));
  }
  const uint64_t size = group::segment_bytes(world_size, capacity);
  if (size > available_bytes()) fail("cannot allocate " + mib(size) + " of shared memory", ENOMEM);
  const int fd = memfd_create("spec-kernels", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create", errno);
  // Allocated now: a lack of memory is an error here, not a bus error in the middle of a
  // collective. The seals keep it so.
  int error = posix_fallocate(fd, 0, static_cast<off_t>(size));
  if (!error && fcntl(fd, F_ADD_SEALS, kSeals)) error = errno;
  if (error) {
    close(fd);
    fail("cannot allocate " + mib(size) + " of shared memory", error);
  }
  std::unique_ptr<Segment> segment(new Segment(fd, size));
  // A fresh memfd is all zeros, which is the initial state of every counter.
  group::Header& h = segment->header();
  h.version = group::kVersion;
  h.world_size = world_size;
  h.capacity = capacity;
  h.total_bytes = size;
  h.policy = policy;
  if (getrandom(h.id, sizeof(h.id), 0) != static_cast<ssize_t>(sizeof(h.id)))
    fail("getrandom", errno);
  h.magic = group::kMagic;
  h.digest = group::header_digest(h);
  return segment;
}

std::unique_ptr<Segment> Segment::attach(int64_t pid, int64_t fd, const std::string& id) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (own < 0) fail("cannot open " + path, errno);
  struct stat status;
  const int seals = fcntl(own, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals && fstat(own, &status) == 0;
  if (!sealed || static_cast<uint64_t>(status.st_size) < sizeof(group::Header)) {
    close(own);
    throw std::runtime_error("spec_kernels segment: " + path + " is not a segment");
  }
  std::unique_ptr<Segment> segment(new Segment(own, static_cast<uint64_t>(status.st_size)));
  const group::Header& h = segment->header();
  if (h.magic != group::kMagic || h.version != group::kVersion ||
      h.digest != group::header_digest(h) || id.size() != sizeof(h.id) ||
      std::memcmp(h.id, id.data(), sizeof(h.id)) != 0) {
    throw std::runtime_error("spec_kernels segment: " + path +
                             " is not the segment that was announced");
  }
  return segment;
}

void Segment::bind(int64_t rank) {
  if (rank < 0 || rank >= header().world_size) {
    throw std::invalid_argument("spec_kernels segment: rank: expected 0 <= rank < " +
                                std::to_string(header().world_size) + ", got " +
                                std::to_string(rank));
  }
  if (holder_ && owner_pid_ == getpid()) {
    throw std::invalid_argument("spec_kernels segment: this process is rank " +
                                std::to_string(rank_) + " already");
  }
  group::RankLine& line = header().ranks[rank];
  uint64_t nobody = 0;
  if (!line.base.compare_exchange_strong(nobody, reinterpret_cast<uint64_t>(data_))) {
    throw std::invalid_argument("spec_kernels segment: rank " + std::to_string(rank) + " is taken");
  }
  // A holder inherited through fork has no thread here; it is forgotten, not joined.
  holder_ = new LifeHolder(&line.alive);
  owner_pid_ = getpid();
  rank_ = rank;
}

void Segment::leave() {
  if (!holder_ || owner_pid_ != getpid()) return;
  delete holder_;
  holder_ = nullptr;
}

void Segment::abort(int64_t rank, const std::string& reason) {
  group::record_failure(
      header(), group::Failure::kAborted, static_cast<uint32_t>(rank),
      [&](group::FailureRecord& f) { std::strncpy(f.text, reason.c_str(), sizeof(f.text) - 1); });
}

}  // namespace spec_kernels
