// The CPU collectives themselves (csrc/pcie_allreduce/pcie_allreduce_cpu.cpp and group.h) under
// ThreadSanitizer: ranks are threads that share one segment, which is how they see it too when they
// are processes.
//
//   twin_cpu WORLD_SIZE NUM_CALLS SEED SPIN_ITERATIONS NUM_WORKERS
//
// Words are integers below 2^20, so fp32 sums are exact. Exit status 0, or 3: a word is wrong, 4: a
// call failed (in a broken variant, by its timeout); the sanitizer has its own.
#include <torch/csrc/stable/library.h>

// Nothing is registered and no tensor is made: what torch would provide stays unresolved.
#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m) \
  [[maybe_unused]] static void not_registered(torch::stable::detail::StableLibrary& m)

#include TWIN_SOURCE

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

using namespace spec_kernels;

namespace {

constexpr int64_t kCapacity = 8192;
constexpr int64_t kItem = 4;

struct Collective {
  group::Op op;
  int64_t numel;
  int source, late_rank, late_for;
};

float payload(int r, int n, int64_t i) {
  return static_cast<float>(static_cast<uint32_t>((n * 8 + r) * 65536 + i) * 2654435761u >> 13);
}

[[noreturn]] void give_up(int status, const char* why) {
  std::fprintf(stderr, "twin_cpu: %s\n", why);
  std::fflush(stderr);
  _exit(status);
}

void check(float got, float expected) {
  if (got != expected) give_up(3, "a word is wrong");
}

void run(group::Header& h, int rank, int n, const Collective& c) {
  const int world = static_cast<int>(h.world_size);
  CallInfo info{};
  info.numel = static_cast<uint64_t>(c.numel);
  info.item_bytes = kItem;
  info.op = static_cast<uint8_t>(c.op);
  info.src = static_cast<int16_t>(c.source);
  const bool gathers = c.op == Op::kAllGather;
  std::vector<float> mine(c.numel), out(gathers ? c.numel * world : c.numel);
  for (int64_t i = 0; i < c.numel; ++i) mine[i] = payload(rank, n, i);
  const char* from = reinterpret_cast<const char*>(mine.data());
  char* to = reinterpret_cast<char*>(out.data());
  Call call(c.op, h, rank, 20'000, info);
  call.for_chunks(c.numel * kItem, kItem, [&](int64_t begin, int64_t num) {
    switch (c.op) {
      case Op::kAllReduce: {
        Sum sum{};
        sum.item_bytes = kItem;
        sum.type = Summand::kF32;
        sum.unit = 1;
        call.all_reduce(from + begin, to + begin, num / kItem, sum);
        break;
      }
      case Op::kAllGather:
      case Op::kBroadcast:
        if (gathers || rank == c.source) copy_bytes(call.slot(rank), from + begin, num);
        call.meet();
        for (int r = 0; r < world; ++r) {
          if (gathers) copy_bytes(to + r * c.numel * kItem + begin, call.slot(r), num);
          if (!gathers && r == c.source) copy_bytes(to + begin, call.slot(r), num);
        }
        break;
      default:
        call.meet();
    }
  });
  for (int64_t i = 0; i < c.numel; ++i) {
    float sum = 0;
    for (int r = 0; r < world; ++r) {
      const float x = payload(r, n, i);
      if (gathers) check(out[r * c.numel + i], x);
      sum += x;
    }
    if (c.op == Op::kAllReduce) check(out[i], sum);
    if (c.op == Op::kBroadcast) check(out[i], payload(c.source, n, i));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) return 2;
  const int world = std::atoi(argv[1]), num_calls = std::atoi(argv[2]);
  std::mt19937 random(static_cast<unsigned>(std::atoi(argv[3])));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr Op kOps[] = {Op::kAllReduce, Op::kAllReduce, Op::kAllGather, Op::kBroadcast,
                         Op::kBarrier};
  std::vector<Collective> calls;
  for (int n = 0; n < num_calls; ++n) {
    Collective c{};
    c.op = kOps[below(5)];
    c.numel = c.op == Op::kBarrier ? 0 : below(3) ? below(64) : below(3 * kCapacity / kItem);
    c.source = below(world);
    c.late_rank = below(world);
    c.late_for = below(4) ? below(4) : 64;
    calls.push_back(c);
  }
  // A fresh segment is all zeros.
  std::vector<char> memory(group::segment_bytes(world, kCapacity) + group::kSlotAlignment);
  char* base = memory.data();
  base += group::kSlotAlignment - reinterpret_cast<uintptr_t>(base) % group::kSlotAlignment;
  group::Header& h = *reinterpret_cast<group::Header*>(base);
  h.world_size = static_cast<uint32_t>(world);
  h.capacity = kCapacity;
  h.policy.spin_iterations = static_cast<uint32_t>(std::atoi(argv[4]));
  h.policy.num_spare = static_cast<uint32_t>(world);
  h.policy.num_workers = static_cast<uint32_t>(std::atoi(argv[5]));
  h.policy.block_bytes = 1024;
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        for (int n = 0; n < num_calls; ++n) {
          for (int i = 0; r == calls[n].late_rank && i < calls[n].late_for; ++i) sched_yield();
          run(h, r, n, calls[n]);
        }
      } catch (const std::exception& e) {
        give_up(4, e.what());
      }
    });
  }
  for (std::thread& t : threads) t.join();
  std::printf("%d calls of %d ranks\n", num_calls, world);
  return 0;
}
