// A small SIMT machine on one host thread: it runs the CUDA sources as they are, compiled by g++.
//
// Every CUDA thread is a fiber. Blocks of a launch are admitted in any order, a few at a time; at
// schedule points (barriers, warp collectives, atomics, relaxed loads and stores, fences,
// __nanosleep) another thread may go on, as a seeded schedule decides. Streams are queues: launches
// of one stream follow each other, streams run interleaved. The default stream is waited for by
// every launch; launches on a stream that was created return at once and run when something
// synchronises. While a graph is recorded, launches are kept in it instead, and run when it is
// replayed.
//
// Memory is sequentially consistent, so a missing fence is not seen. A missing barrier is seen as a
// wrong result under some seeds; a barrier or collective that not all of its threads reach, and a
// machine in which nothing moves, end the launch with a std::runtime_error that says who waits
// where. Each shared array is an allocation of its own, so AddressSanitizer watches its bounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Those of the thread that is running.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace simt {

struct Stream;  // null: the default stream

// Where in the sources a thread stands: the caller's line, through default arguments.
struct Site {
  const char* file;
  int line;
};
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_HERE \
  ::simt::Site { file, line }

enum class Kind : uint8_t {
  kShfl,
  kShflXor,
  kShflUp,
  kShflDown,
  kBallot,
  kAny,
  kAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinSigned,
  kReduceMaxSigned,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
  kMatchAny,
  kSyncWarp,
  kBarrier,
  kBarrierOr,
  kBarrierAnd,
  kBarrierCount,
};

// Waits for the lanes in `mask` to call the same collective at the same place.
uint64_t collective(Kind kind, uint32_t mask, uint64_t value, int lane, int width, Site site);
// Waits for every thread of the block, at the same place.
int barrier(Kind kind, int predicate, Site site);
// Others may go on here. `always`: they do, as where a thread waits for memory to change.
void schedule_point(bool always);
// The running thread stores to, or loads from, memory that peers share: counted if it is watched.
void count_access(const void* p, size_t num_bytes, bool is_store);
// Ends the launch: the message names the running thread.
[[noreturn]] void fail(const char* what);
// Threads resumed so far: a clock that advances for a thread that spins.
uint64_t steps();
// The device's clock: a settable number of nanoseconds a step, or the host's.
uint64_t nanoseconds();

// The running block's copy of a shared variable, poisoned when the block first asks for it.
void* shared_variable(const void* key, size_t bytes);
// The running block's dynamic shared memory.
void* dynamic_shared();

void enqueue(Stream* stream, dim3 grid, dim3 block, size_t shared_bytes,
             std::function<void()> body);
Stream* create_stream(int device);
void destroy_stream(Stream* stream);
void synchronize(Stream* stream);
void synchronize_device(int device);

// Seed 0: threads in order, each as far as it gets. 1: the same, last first. Others: random, half
// of them with some warps favoured. `resident_blocks` of a launch run at a time (0: 1 to 4, by the
// seed). After `max_steps` resumes (0: many) whoever waits waits for what does not come.
void configure(uint64_t seed, int resident_blocks, uint64_t max_steps);
// Threads of `device` are chosen `factor` times less often.
void slow_device(int device, int factor);
// 0: the host's clock, and whoever spins gives the processor to other processes now and then.
void set_clock(uint64_t nanoseconds_per_step);

// Launches of this host thread onto any stream go into a graph until `end_record`.
void begin_record();
// Its number. Graphs are kept for the life of the machine.
int end_record();
bool recording();
// Enqueues its launches, each onto the stream that it was recorded on, or all onto `stream`.
void replay(int graph, Stream* stream);

}  // namespace simt

// One static key for each declaration in each instantiation of its function.
#define SIMT_SHARED(type, name, ...)                            \
  typedef type name##_shared_type __VA_ARGS__;                  \
  static const char name##_shared_key = 0;                      \
  name##_shared_type& name = *static_cast<name##_shared_type*>( \
      ::simt::shared_variable(&name##_shared_key, sizeof(name##_shared_type)))
