#include "simt.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#define SIMT_USE_UCONTEXT 1
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simt {
namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kMaxSharedBytes = 101376;  // sm_120
constexpr size_t kMaxPlainSharedBytes = 49152;
constexpr uint64_t kMaxSteps = uint64_t{1} << 27;

// Contexts. `swap(save, load)` goes on in `load` and returns when somebody swaps back to `save`.

#if defined(SIMT_USE_UCONTEXT)
using Context = ucontext_t;
void swap(Context& save, Context& load) { swapcontext(&save, &load); }
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#else
using Context = void*;  // stack pointer; the callee-saved registers stand on the stack
extern "C" void simt_swap(void** save, void* load);
asm(R"(
.pushsection .text
.type simt_swap, @function
simt_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size simt_swap, .-simt_swap
.popsection
)");
void swap(Context& save, Context& load) { simt_swap(&save, load); }
void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  top[-1] = nullptr;  // the caller of `entry`
  top[-2] = reinterpret_cast<void*>(entry);
  std::fill(top - 8, top - 2, nullptr);
  context = top - 8;
}
#endif

struct Rng {  // splitmix64
  uint64_t state = 0;
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t n) { return next() % n; }
};

struct Fiber {
  Context context{};
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
};

enum class State : uint8_t { kReady, kWarp, kBlock, kExited };

struct Block;

struct Thread {
  Block* block = nullptr;
  Fiber* fiber = nullptr;
  uint3 index{};
  int linear = 0;
  State state = State::kReady;
  Kind kind{};
  uint32_t mask = 0;
  uint64_t value = 0;  // what it brings to a collective, then what it gets
  uint32_t spins = 0;  // looks at memory in a row
  int lane = 0, width = 0;
  Site site{};
};

// A launch of a graph, which every replay enqueues anew.
struct Recorded {
  Stream* stream;
  dim3 grid, block;
  size_t shared_bytes;
  std::function<void()> body;
};

struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  std::function<void()> body;
  uint64_t num_blocks = 0, num_started = 0, num_finished = 0;
  uint64_t first = 0, step = 1;  // block k to be admitted is (first + k * step) % num_blocks
  uint64_t resident = 1;
};

// An allocation of exactly so many bytes, so that a byte beyond is seen.
struct Shared {
  const void* key;
  void* data;
};

struct Block {
  Stream* stream = nullptr;
  Launch* launch = nullptr;
  uint3 index{};
  uint64_t salt = 0;
  std::vector<Thread> threads;
  std::vector<Shared> shared;
  size_t shared_bytes = 0;
  int num_exited = 0, num_at_barrier = 0;
  ~Block() {
    for (const Shared& s : shared) ::operator delete(s.data, std::align_val_t{128});
  }
};

}  // namespace

struct Stream {
  int device = 0;
  std::deque<std::unique_ptr<Launch>> launches;
  std::vector<std::unique_ptr<Block>> live;
};

namespace {

class Machine {
 public:
  std::recursive_mutex mutex;
  cudaError_t last_error = cudaSuccess;
  int device = 0;
  std::map<const void*, int> dynamic_limits;

  void configure(uint64_t seed, int resident, uint64_t max_steps) {
    seed_ = seed;
    resident_ = resident;
    max_steps_ = max_steps ? max_steps : kMaxSteps;
    rng_.state = seed;
  }
  void slow(int device, int factor) { slowness_[device] = factor; }
  // Counts accesses to [begin, begin + num_bytes) from now on, as range `range`.
  void watch(int range, const char* begin, uint64_t num_bytes) {
    watched_[range] = {begin, begin + num_bytes};
  }
  void watch_nothing() {
    watched_.clear();
    accesses_.clear();
  }
  void count_access(const char* p, size_t num_bytes, bool is_store) {
    for (const auto& [range, ends] : watched_) {
      if (p >= ends.first && p < ends.second)
        accesses_[{current_->block->stream->device, range, is_store}] += num_bytes;
    }
  }
  uint64_t accesses(int device, int range, bool is_store) const {
    const auto found = accesses_.find({device, range, is_store});
    return found == accesses_.end() ? 0 : found->second;
  }
  uint64_t steps() const { return steps_; }
  uint64_t num_launches() const { return num_launches_; }
  void set_clock(uint64_t nanoseconds_per_step) { nanoseconds_per_step_ = nanoseconds_per_step; }
  uint64_t nanoseconds() const {
    if (nanoseconds_per_step_) return steps_ * nanoseconds_per_step_;
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
  }

  Stream* default_stream() { return &default_; }
  Stream* create(int device) {
    streams_.push_back(std::make_unique<Stream>());
    streams_.back()->device = device;
    return streams_.back().get();
  }
  std::vector<std::vector<Recorded>> graphs;

  void destroy(Stream* stream) {
    run(stream);
    streams_.erase(std::find_if(streams_.begin(), streams_.end(),
                                [&](const auto& s) { return s.get() == stream; }));
  }
  template <class F>
  void each_stream(F&& f) {
    f(&default_);
    for (const auto& s : streams_) f(s.get());
  }

  void enqueue(Stream* stream, dim3 grid, dim3 block, size_t shared_bytes,
               std::function<void()> body) {
    ++num_launches_;
    auto launch = std::make_unique<Launch>();
    launch->grid = grid;
    launch->block = block;
    launch->shared_bytes = shared_bytes;
    launch->body = std::move(body);
    launch->num_blocks = uint64_t{grid.x} * grid.y * grid.z;
    launch->resident = resident_ > 0 ? static_cast<uint64_t>(resident_)
                       : seed_ == 0  ? 1
                                     : 1 + rng_.below(4);
    if (seed_ == 1) launch->first = launch->step = launch->num_blocks - 1;
    if (launch->step == 0) launch->step = 1;
    if (seed_ > 1) {
      launch->first = rng_.below(launch->num_blocks);
      do launch->step = 1 + rng_.below(launch->num_blocks);
      while (gcd(launch->step, launch->num_blocks) != 1);
    }
    stream->launches.push_back(std::move(launch));
  }

  // Runs every stream, interleaved, until `stream` is empty (all of them: null).
  void run(Stream* stream) {
    if (running_) fail("a kernel calls the host side");
    const uint64_t limit = steps_ + max_steps_;
    const auto done = [&] {
      bool empty = true;
      if (stream) return stream->launches.empty();
      each_stream([&](Stream* s) { empty = empty && s->launches.empty(); });
      return empty;
    };
    while (!done()) {
      admit();
      if (ready_.empty() && waiting_.empty()) stop("deadlock: no thread can go on");
      if (steps_ > limit) stop("no end: threads wait for memory that does not change");
      resume(pick());
      if (!failure_.empty()) stop("");
    }
  }

  // On a fiber

  Thread& current() { return *current_; }
  bool running() const { return running_; }

  void yield() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&current_->fiber->fake_stack, host_stack_, host_stack_bytes_);
#endif
    Fiber* const self = current_->fiber;
    swap(self->context, host_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(self->fake_stack, &host_stack_, &host_stack_bytes_);
#endif
  }

  void fail(const std::string& what) {
    failure_ = what + "; at " + where(*current_);
    yield();
    std::abort();  // never resumed
  }

  void schedule_point(bool always) {
    current_->spins = always ? current_->spins + 1 : 0;
    if (always && nanoseconds_per_step_ == 0 && steps_ % 64 == 0) sched_yield();
    if (always || (seed_ > 1 && rng_.below(4) == 0)) {
      push(current_);
      // Last first, a thread that waits would be asked again and again.
      if (seed_ == 1) std::rotate(ready_.begin(), ready_.end() - 1, ready_.end());
      yield();
    }
  }

  uint64_t collective(Kind kind, uint32_t mask, uint64_t value, int lane, int width, Site site) {
    Thread& t = *current_;
    if (!(mask >> (t.linear % kWarp) & 1u)) fail("a warp collective whose mask lacks the caller");
    t.kind = kind;
    t.mask = mask;
    t.value = value;
    t.lane = lane;
    t.width = width;
    t.site = site;
    t.state = State::kWarp;
    const int first = t.linear / kWarp * kWarp;
    const int num_threads = static_cast<int>(t.block->threads.size());
    Thread* lanes[kWarp] = {};
    for (int i = 0; i < kWarp; ++i) {
      if (!(mask >> i & 1u)) continue;
      if (first + i >= num_threads) fail("a warp collective names lanes that the block lacks");
      Thread& other = t.block->threads[static_cast<size_t>(first + i)];
      if (other.state == State::kExited) fail("a warp collective names a lane that has exited");
      const bool same = other.state == State::kWarp && other.kind == kind && other.mask == mask &&
                        same_site(other.site, site);
      if (!same) {  // it may still come; if it never does, the machine comes to a stop
        yield();
        return t.value;
      }
      lanes[i] = &other;
    }
    complete(kind, mask, lanes);
    for (int i = 0; i < kWarp; ++i) {
      if (!lanes[i]) continue;
      lanes[i]->state = State::kReady;
      if (lanes[i] != &t) push(lanes[i]);
    }
    schedule_point(false);
    return t.value;
  }

  int barrier(Kind kind, int predicate, Site site) {
    Thread& t = *current_;
    Block& block = *t.block;
    if (block.num_exited) fail("a block barrier after some threads of the block have exited");
    t.kind = kind;
    t.value = predicate != 0;
    t.site = site;
    t.state = State::kBlock;
    if (static_cast<size_t>(++block.num_at_barrier) < block.threads.size()) {
      yield();
      return static_cast<int>(t.value);
    }
    uint64_t num_true = 0;
    for (const Thread& other : block.threads) {
      if (other.kind != kind || !same_site(other.site, site))
        fail("divergent block barrier: another thread is at " + where(other));
      num_true += other.value;
    }
    const uint64_t result = kind == Kind::kBarrierOr    ? num_true != 0
                            : kind == Kind::kBarrierAnd ? num_true == block.threads.size()
                                                        : num_true;
    block.num_at_barrier = 0;
    for (Thread& other : block.threads) {
      other.value = result;
      other.state = State::kReady;
      if (&other != &t) push(&other);
    }
    schedule_point(false);
    return static_cast<int>(result);
  }

  void* shared_variable(const void* key, size_t bytes) {
    std::vector<Shared>& shared = current_->block->shared;
    for (const Shared& s : shared) {
      if (s.key == key) return s.data;
    }
    if ((current_->block->shared_bytes += bytes) > kMaxSharedBytes)
      fail("more shared memory than a block has");
    void* data = ::operator new(bytes, std::align_val_t{128});
    // NaN as floats and -1 as integers, or large numbers in either.
    std::memset(data, current_->block->salt & 1u ? 0xff : 0xcd, bytes);
    shared.push_back({key, data});
    return data;
  }

  void* dynamic_shared() { return shared_variable(nullptr, current_->block->launch->shared_bytes); }

 private:
  static uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }
  static bool same_site(const Site& a, const Site& b) {
    return a.line == b.line && std::strcmp(a.file, b.file) == 0;
  }

  static std::string name(const Block& b) {
    std::ostringstream out;
    out << "device " << b.stream->device << ", block (" << b.index.x << ", " << b.index.y << ", "
        << b.index.z << ")";
    return out.str();
  }

  static std::string where(const Thread& t) {
    std::ostringstream out;
    out << name(*t.block) << ", thread " << t.linear;
    if (t.site.file) out << ", last seen at " << t.site.file << ":" << t.site.line;
    return out.str();
  }

  // Threads of `b` that wait alike, as ranges.
  static void describe(const Block& b, std::ostringstream& out) {
    size_t i = 0;
    while (i < b.threads.size()) {
      const Thread& t = b.threads[i];
      size_t end = i + 1;
      while (end < b.threads.size() && b.threads[end].state == t.state &&
             b.threads[end].mask == t.mask && b.threads[end].site.line == t.site.line)
        ++end;
      out << "\n  " << name(b) << ", threads " << i << "-" << end - 1 << ": ";
      if (t.state == State::kExited) {
        out << "exited";
      } else if (t.state == State::kReady) {
        out << "can go on";
      } else {
        out << (t.state == State::kBlock ? "wait at the block barrier of "
                                         : "wait at the warp collective of ")
            << t.site.file << ":" << t.site.line;
        if (t.state == State::kWarp) out << ", mask 0x" << std::hex << t.mask << std::dec;
      }
      i = end;
    }
  }

  // Ends all that runs or waits to run: what these kernels wrote is in no defined state.
  [[noreturn]] void stop(const char* what) {
    std::ostringstream out;
    out << "cuda_on_host: " << what << failure_;
    int shown = 0;
    each_stream([&](Stream* s) {
      for (const auto& b : s->live) {
        if (shown++ < 8) describe(*b, out);
      }
    });
    failure_.clear();
    ready_.clear();
    waiting_.clear();
    each_stream([&](Stream* s) {
      for (const auto& b : s->live) {
        for (const Thread& t : b->threads) {
          if (t.state != State::kExited) reset(t.fiber);
        }
      }
      s->live.clear();
      s->launches.clear();
    });
    throw std::runtime_error(out.str());
  }

  void push(Thread* t) {
    t->state = State::kReady;
    (seed_ > 1 && t->spins > 1 ? waiting_ : ready_).push_back(t);
  }

  void admit() {
    each_stream([&](Stream* s) {
      if (s->launches.empty()) return;
      Launch& launch = *s->launches.front();
      while (launch.num_started < launch.num_blocks && s->live.size() < launch.resident)
        start(s, launch);
    });
  }

  void start(Stream* s, Launch& launch) {
    const uint64_t k = launch.num_started++;
    const uint64_t at = static_cast<uint64_t>(
        (launch.first + static_cast<unsigned __int128>(k) * launch.step) % launch.num_blocks);
    s->live.push_back(std::make_unique<Block>());
    Block& block = *s->live.back();
    block.stream = s;
    block.launch = &launch;
    block.index = {static_cast<unsigned>(at % launch.grid.x),
                   static_cast<unsigned>(at / launch.grid.x % launch.grid.y),
                   static_cast<unsigned>(at / launch.grid.x / launch.grid.y)};
    block.salt = rng_.next();
    const dim3 size = launch.block;
    block.threads.resize(size_t{size.x} * size.y * size.z);
    for (size_t i = 0; i < block.threads.size(); ++i) {
      Thread& t = block.threads[i];
      const unsigned n = static_cast<unsigned>(i);
      t.block = &block;
      t.linear = static_cast<int>(i);
      t.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
      t.fiber = take_fiber();
      push(&t);
    }
  }

  Thread* pick() {
    if (seed_ == 1) {
      Thread* t = ready_.back();
      ready_.pop_back();
      return t;
    }
    // Who only waits for memory is asked less often than who can work.
    std::deque<Thread*>& from =
        ready_.empty() || (!waiting_.empty() && rng_.below(8) == 0) ? waiting_ : ready_;
    if (seed_ > 1) {
      size_t best = rng_.below(from.size());
      // Odd seeds favour some warps for a while, so that they run far ahead of others.
      for (int i = 0; (seed_ & 1u) && i < 2; ++i) {
        const size_t other = rng_.below(from.size());
        if (favour(*from[other]) > favour(*from[best])) best = other;
      }
      for (int i = 0; i < 8; ++i) {
        const auto slow = slowness_.find(from[best]->block->stream->device);
        if (slow == slowness_.end() || rng_.below(static_cast<uint64_t>(slow->second)) == 0) break;
        best = rng_.below(from.size());
      }
      std::swap(from[best], from.front());
    }
    Thread* t = from.front();
    from.pop_front();
    return t;
  }

  uint64_t favour(const Thread& t) const {
    Rng hash{t.block->salt + static_cast<uint64_t>(t.linear / kWarp) + (steps_ >> 12)};
    return hash.next();
  }

  void resume(Thread* t) {
    ++steps_;
    current_ = t;
    threadIdx = t->index;
    blockIdx = t->block->index;
    blockDim = t->block->launch->block;
    gridDim = t->block->launch->grid;
    running_ = true;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&host_fake_stack_, t->fiber->stack, kStackBytes);
#endif
    swap(host_, t->fiber->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(host_fake_stack_, nullptr, nullptr);
#endif
    running_ = false;
    if (t->state == State::kExited) exited(*t);
  }

  void exited(Thread& t) {
    fibers_.push_back(t.fiber);
    Block& block = *t.block;
    if (block.num_at_barrier) {
      failure_ = "a thread exits while others of its block wait at a barrier; it is " + where(t);
      return;
    }
    if (static_cast<size_t>(++block.num_exited) < block.threads.size()) return;
    Stream& s = *block.stream;
    Launch& launch = *block.launch;
    s.live.erase(std::find_if(s.live.begin(), s.live.end(),
                              [&](const auto& b) { return b.get() == &block; }));
    if (++launch.num_finished == launch.num_blocks) s.launches.pop_front();
  }

  // Fibers serve one thread after another and never end.
  static void fiber_main();

  Fiber* take_fiber() {
    if (fibers_.empty()) {
      auto* fiber = new Fiber;
      void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0)
        throw std::runtime_error("cuda_on_host: no memory for the stack of a thread");
      fiber->stack = static_cast<char*>(memory) + kGuardBytes;
      prepare(fiber->context, fiber->stack, kStackBytes, &Machine::fiber_main);
      return fiber;
    }
    Fiber* fiber = fibers_.back();
    fibers_.pop_back();
    return fiber;
  }

  // Abandons what stands on the fiber's stack.
  void reset(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->stack, kStackBytes);
    fiber->fake_stack = nullptr;
#endif
    prepare(fiber->context, fiber->stack, kStackBytes, &Machine::fiber_main);
    fibers_.push_back(fiber);
  }

  void complete(Kind kind, uint32_t mask, Thread* const* lanes) {
    uint64_t in[kWarp] = {};
    uint64_t all = ~uint64_t{0}, any = 0, ballot = 0;
    uint32_t sum = 0, low = ~0u, high = 0, bits_and = ~0u, bits_or = 0, bits_xor = 0;
    int32_t low_signed = INT32_MAX, high_signed = INT32_MIN;
    for (int i = 0; i < kWarp; ++i) {
      if (!lanes[i]) continue;
      in[i] = lanes[i]->value;
      const uint32_t v = static_cast<uint32_t>(in[i]);
      all &= in[i];
      any |= in[i];
      ballot |= (in[i] & 1u) << i;
      sum += v;
      low = std::min(low, v);
      high = std::max(high, v);
      low_signed = std::min(low_signed, static_cast<int32_t>(v));
      high_signed = std::max(high_signed, static_cast<int32_t>(v));
      bits_and &= v;
      bits_or |= v;
      bits_xor ^= v;
    }
    for (int i = 0; i < kWarp; ++i) {
      if (!lanes[i]) continue;
      Thread& t = *lanes[i];
      const int base = i / t.width * t.width;  // shuffles stay within segments of `width` lanes
      int from = i;
      switch (kind) {
        case Kind::kShfl:
          from = base + (t.lane & (t.width - 1));
          break;
        case Kind::kShflXor:
          from = i ^ t.lane;
          if (from >= base + t.width) from = i;
          break;
        case Kind::kShflUp:
          from = i - t.lane < base ? i : i - t.lane;
          break;
        case Kind::kShflDown:
          from = i + t.lane >= base + t.width ? i : i + t.lane;
          break;
        case Kind::kBallot:
          t.value = ballot;
          continue;
        case Kind::kAny:
          t.value = any & 1u;
          continue;
        case Kind::kAll:
          t.value = all & 1u;
          continue;
        case Kind::kReduceAdd:
          t.value = sum;
          continue;
        case Kind::kReduceMin:
          t.value = low;
          continue;
        case Kind::kReduceMax:
          t.value = high;
          continue;
        case Kind::kReduceMinSigned:
          t.value = static_cast<uint32_t>(low_signed);
          continue;
        case Kind::kReduceMaxSigned:
          t.value = static_cast<uint32_t>(high_signed);
          continue;
        case Kind::kReduceAnd:
          t.value = bits_and;
          continue;
        case Kind::kReduceOr:
          t.value = bits_or;
          continue;
        case Kind::kReduceXor:
          t.value = bits_xor;
          continue;
        case Kind::kMatchAny: {
          uint64_t equal = 0;
          for (int j = 0; j < kWarp; ++j) {
            if (lanes[j] && in[j] == in[i]) equal |= uint64_t{1} << j;
          }
          t.value = equal;
          continue;
        }
        default:
          continue;
      }
      if (from < 0 || from >= kWarp || !(mask >> from & 1u))
        fail("a shuffle reads a lane outside its mask");
      t.value = in[from];
    }
  }

  uint64_t seed_ = 0, steps_ = 0, max_steps_ = kMaxSteps, num_launches_ = 0;
  uint64_t nanoseconds_per_step_ = 1;
  int resident_ = 0;
  Rng rng_;
  std::map<int, int> slowness_;
  std::map<int, std::pair<const char*, const char*>> watched_;
  std::map<std::tuple<int, int, bool>, uint64_t> accesses_;  // bytes by device, range and direction
  Stream default_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::deque<Thread*> ready_;    // not `waiting_`, which has looked at memory twice in a row
  std::deque<Thread*> waiting_;  // under random schedules
  std::vector<Fiber*> fibers_;
  Thread* current_ = nullptr;
  bool running_ = false;
  std::string failure_;
  Context host_{};
  void* host_fake_stack_ = nullptr;
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
};

// Never destroyed: fibers and streams may outlive static destruction.
Machine& machine() {
  static Machine* const m = new Machine;
  return *m;
}

void Machine::fiber_main() {
  Machine& m = machine();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &m.host_stack_, &m.host_stack_bytes_);
#endif
  for (;;) {
    m.current_->block->launch->body();
    m.current_->state = State::kExited;
    m.yield();
  }
}

using Lock = std::lock_guard<std::recursive_mutex>;

// The stream that torch would name, and the graph that launches go into: of each host thread.
thread_local Stream* chosen_stream = nullptr;
thread_local std::vector<Recorded>* recorded = nullptr;
// The first call that a device refuses during a capture.
thread_local const char* breach = nullptr;

Stream* stream_or_default(Stream* stream) { return stream ? stream : machine().default_stream(); }

}  // namespace

uint64_t collective(Kind kind, uint32_t mask, uint64_t value, int lane, int width, Site site) {
  return machine().collective(kind, mask, value, lane, width, site);
}
int barrier(Kind kind, int predicate, Site site) {
  return machine().barrier(kind, predicate, site);
}
void schedule_point(bool always) { machine().schedule_point(always); }
void fail(const char* what) {
  machine().fail(what);
  std::abort();
}
uint64_t steps() { return machine().steps(); }
uint64_t nanoseconds() { return machine().nanoseconds(); }
void* shared_variable(const void* key, size_t bytes) {
  return machine().shared_variable(key, bytes);
}
void* dynamic_shared() { return machine().dynamic_shared(); }

void enqueue(Stream* stream, dim3 grid, dim3 block, size_t shared_bytes,
             std::function<void()> body) {
  const Lock lock(machine().mutex);
  if (recorded) {
    recorded->push_back({stream, grid, block, shared_bytes, std::move(body)});
    return;
  }
  machine().enqueue(stream_or_default(stream), grid, block, shared_bytes, std::move(body));
  if (!stream) machine().run(machine().default_stream());
}

Stream* create_stream(int device) {
  const Lock lock(machine().mutex);
  return machine().create(device);
}
void destroy_stream(Stream* stream) {
  const Lock lock(machine().mutex);
  machine().destroy(stream);
}
void synchronize(Stream* stream) {
  const Lock lock(machine().mutex);
  machine().run(stream_or_default(stream));
}
void synchronize_device(int device) {
  const Lock lock(machine().mutex);
  std::vector<Stream*> streams;
  machine().each_stream([&](Stream* s) {
    if (s->device == device) streams.push_back(s);
  });
  for (Stream* s : streams) machine().run(s);
}

void configure(uint64_t seed, int resident_blocks, uint64_t max_steps) {
  const Lock lock(machine().mutex);
  machine().configure(seed, resident_blocks, max_steps);
}
void count_access(const void* p, size_t num_bytes, bool is_store) {
  machine().count_access(static_cast<const char*>(p), num_bytes, is_store);
}

void slow_device(int device, int factor) {
  const Lock lock(machine().mutex);
  machine().slow(device, factor);
}
void set_clock(uint64_t nanoseconds_per_step) {
  const Lock lock(machine().mutex);
  machine().set_clock(nanoseconds_per_step);
}

void begin_record() {
  recorded = new std::vector<Recorded>;
  breach = nullptr;
}
int end_record() {
  const Lock lock(machine().mutex);
  if (!breach) machine().graphs.push_back(std::move(*recorded));
  delete std::exchange(recorded, nullptr);
  return breach ? -1 : static_cast<int>(machine().graphs.size()) - 1;
}
bool breaks_capture(const char* call) {
  if (recorded && !breach) breach = call;
  return recorded != nullptr;
}
bool recording() { return recorded != nullptr; }
void replay(int graph, Stream* stream) {
  const Lock lock(machine().mutex);
  for (const Recorded& r : machine().graphs.at(static_cast<size_t>(graph)))
    enqueue(stream ? stream : r.stream, r.grid, r.block, r.shared_bytes, r.body);
}

cudaError_t allocate(void** p, size_t bytes) {
  if (breaks_capture("cudaMalloc")) return cudaErrorMemoryAllocation;
  *p = std::malloc(bytes);
  if (!*p) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xcd, bytes);
  return cudaSuccess;
}

cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > kMaxSharedBytes) return cudaErrorInvalidValue;
  const Lock lock(machine().mutex);
  machine().dynamic_limits[kernel] = bytes;
  return cudaSuccess;
}

void launch(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, Stream* stream,
            std::function<void()> body) {
  const Lock lock(machine().mutex);
  const auto limit = machine().dynamic_limits.find(kernel);
  const size_t most = limit == machine().dynamic_limits.end() ? kMaxPlainSharedBytes
                                                              : static_cast<size_t>(limit->second);
  const uint64_t num_threads = uint64_t{block.x} * block.y * block.z;
  const bool possible = num_threads >= 1 && num_threads <= 1024 && block.z <= 64 && grid.x >= 1 &&
                        grid.x <= 0x7fffffffu && grid.y >= 1 && grid.y <= 65535u && grid.z >= 1 &&
                        grid.z <= 65535u;
  if (!possible || shared_bytes > std::max(most, kMaxPlainSharedBytes)) {
    machine().last_error = possible ? cudaErrorInvalidValue : cudaErrorInvalidConfiguration;
    return;
  }
  enqueue(stream, grid, block, shared_bytes, std::move(body));
}

}  // namespace simt

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    default:
      return "invalid argument";
  }
}
cudaError_t cudaGetLastError() { return std::exchange(simt::machine().last_error, cudaSuccess); }
cudaError_t cudaGetDevice(int* device) {
  *device = simt::machine().device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  simt::machine().device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value =
      attribute == cudaDevAttrMultiProcessorCount ? 4 : static_cast<int>(simt::kMaxSharedBytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (simt::breaks_capture("cudaDeviceSynchronize")) return cudaErrorInvalidValue;
  simt::synchronize_device(simt::machine().device);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = simt::create_stream(simt::machine().device);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  simt::destroy_stream(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (simt::breaks_capture("cudaStreamSynchronize")) return cudaErrorInvalidValue;
  simt::synchronize(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = simt::recording() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  simt::synchronize(stream);
  std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (simt::breaks_capture("cudaMemcpyAsync")) return cudaErrorInvalidValue;
  simt::synchronize(stream);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (simt::breaks_capture("cudaFree")) return cudaErrorInvalidValue;
  std::free(p);
  return cudaSuccess;
}

// Called from Python.
extern "C" __attribute__((visibility("default"))) void simt_configure(uint64_t seed, int resident,
                                                                      uint64_t max_steps) {
  simt::configure(seed, resident, max_steps);
}

extern "C" __attribute__((visibility("default"))) uint64_t simt_num_launches() {
  return simt::machine().num_launches();
}

#define SIMT_EXPORT extern "C" __attribute__((visibility("default")))
SIMT_EXPORT simt::Stream* simt_create_stream(int device) { return simt::create_stream(device); }
SIMT_EXPORT void simt_destroy_stream(simt::Stream* stream) { simt::destroy_stream(stream); }
SIMT_EXPORT simt::Stream* simt_choose_stream(simt::Stream* stream) {
  return std::exchange(simt::chosen_stream, stream);
}
SIMT_EXPORT void simt_watch(int range, const void* begin, uint64_t num_bytes) {
  simt::machine().watch(range, static_cast<const char*>(begin), num_bytes);
}
SIMT_EXPORT void simt_watch_nothing() { simt::machine().watch_nothing(); }
SIMT_EXPORT uint64_t simt_accesses(int device, int range, int is_store) {
  return simt::machine().accesses(device, range, is_store != 0);
}
SIMT_EXPORT void simt_slow_device(int device, int factor) { simt::slow_device(device, factor); }
SIMT_EXPORT void simt_set_clock(uint64_t nanoseconds_per_step) {
  simt::set_clock(nanoseconds_per_step);
}
SIMT_EXPORT uint64_t simt_steps() { return simt::steps(); }
SIMT_EXPORT void simt_begin_record() { simt::begin_record(); }
SIMT_EXPORT int simt_end_record() { return simt::end_record(); }
// Null, or what broke this thread's last capture.
SIMT_EXPORT const char* simt_breach() { return simt::breach; }
SIMT_EXPORT void simt_replay(int graph, simt::Stream* stream) { simt::replay(graph, stream); }
// Null, or why the machine stopped.
SIMT_EXPORT const char* simt_synchronize() {
  static std::string failure;
  try {
    const simt::Lock lock(simt::machine().mutex);
    simt::machine().run(nullptr);
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

#if defined(SK_MUTANTS)
namespace spec_kernels {
const char* chosen_mutant = nullptr;
bool is_chosen(const char* name) { return std::strcmp(chosen_mutant, name) == 0; }
}  // namespace spec_kernels
SIMT_EXPORT void choose_mutant(const char* name) {
  static std::string kept;
  kept = name;
  spec_kernels::chosen_mutant = kept.c_str();
}
#endif

// The stream of the tensors' device; torch's own is looked up by name, and this one is nearer.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = simt::chosen_stream;
  return 0;
}
