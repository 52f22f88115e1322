// The protocols of protocol.cuh and exchange.cuh in standard C++, for ThreadSanitizer: threads for
// a rank's blocks and a block's threads, the slab's own layout, and the memory orders on which the
// kernels rely, no stronger.
//
//   twin WORLD_SIZE ISLAND_SIZE NUM_CALLS SEED [BROKEN]
//
// Pushed packets are relaxed atomic words, in any order. What stands behind a flag (the exchange
// region, staged partial sums) is plain memory: a fence and a relaxed store of the flag are a
// release store here, since the sanitizer knows no fences. The end of a kernel is a barrier of the
// rank's threads, and orders what it did before all that the device sends afterwards: a release,
// which every rank acquires as it ends the next call, for which it needed what was sent (be it
// through an owner: what depends on a word is not sent before the word is read).
//
// Words are integers, so every result is known. Exit status 0, or 3: a word is wrong, 4: a wait did
// not end; the sanitizer has its own.
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pcie_allreduce/slab.h"

using namespace spec_kernels::slab;

namespace {

constexpr int kBlocks = 2;
constexpr int kThreads = 2;  // of a block; each has every second packet of a tile
constexpr int kTiles = 4;
constexpr int kWidth = 2;  // packets of a partial sum
constexpr int kWords = kPacketBytes / 4;
// Early enough that the epoch wraps.
constexpr uint32_t kFirstFinished = 0xFFFFFFFFu - 16;

enum class Broken {
  kNothing,
  kOneSlot,
  kNoClear,
  kWrongClear,
  kFirstBlockEnds,  // the epoch advances when the first block is done
  kRelaxedFlag,     // no fence before the flag
  kRelaxedAwait,    // no acquire after it
  kNoFlag,          // nobody waits for it
};
constexpr const char* kBrokenNames[] = {"nothing",       "one_slot",    "no_clear",
                                        "wrong_clear",   "first_block", "relaxed_flag",
                                        "relaxed_await", "no_flag"};

enum class Kind {
  kOneShot,
  kTwoShot,
  kHierarchical,
  kHierarchicalPull,
  kGather,
  kBroadcast,
  kBarrier
};

struct Collective {
  Kind kind;
  int packets;
  int grid;
  int source;     // of a broadcast
  int late_rank;  // begins after a while
  int late_for;   // in yields
};

struct Packet {
  uint32_t words[kWords];
};

struct Barrier {
  explicit Barrier(unsigned num) { pthread_barrier_init(&barrier, nullptr, num); }
  ~Barrier() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
  pthread_barrier_t barrier;
};

struct Rank {
  explicit Rank(uint64_t bytes)
      : slots(new std::atomic<uint32_t>[bytes / 4]),
        plain(bytes / 4, kSentinel),
        stream(kBlocks * kThreads) {
    for (uint64_t i = 0; i < bytes / 4; ++i) slots[i].store(kSentinel, std::memory_order_relaxed);
    for (auto& block : flags) {
      for (auto& flag : block) flag.store(kFirstFinished, std::memory_order_relaxed);
    }
    for (auto& end : ends) end.store(kFirstFinished, std::memory_order_relaxed);
    for (int b = 0; b < kBlocks; ++b) blocks.emplace_back(new Barrier(kThreads));
  }

  std::unique_ptr<std::atomic<uint32_t>[]> slots;
  std::vector<uint32_t> plain;
  std::atomic<uint32_t> finished{kFirstFinished};
  std::atomic<uint32_t> arrived{kNobody};
  std::atomic<uint32_t> flags[kBlocks][kMaxRanks];
  std::atomic<uint32_t> ends[4];  // by epoch: the kernel is over
  Barrier stream;
  std::vector<std::unique_ptr<Barrier>> blocks;
};

struct Machine {
  int world, island;
  Layout layout;
  Broken broken;
  std::vector<Collective> calls;
  std::vector<std::unique_ptr<Rank>> ranks;
  time_t deadline;
};

[[noreturn]] void give_up(int status, const char* why) {
  std::fprintf(stderr, "twin: %s\n", why);
  std::fflush(stderr);
  _exit(status);
}

time_t seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec;
}

// What rank r contributes to word w of packet i in call n; a sum of eight is below the sentinel.
uint32_t payload(int r, int n, int i, int w) {
  uint32_t x = static_cast<uint32_t>(((n * kMaxRanks + r) * 4096 + i) * kWords + w);
  x *= 2654435761u;
  return x >> 4;
}

// One thread of one block of one rank in one call.
class Thread {
 public:
  Thread(Machine& m, int rank, int block, int thread, int n)
      : m_(m),
        me_(*m.ranks[rank]),
        call_(m.calls[n]),
        rank_(rank),
        block_(block),
        thread_(thread),
        n_(n) {
    epoch_ = me_.finished.load(std::memory_order_relaxed) + 1;
    half_ = m.broken == Broken::kOneSlot ? 0 : epoch_;
  }

  void run() {
    switch (call_.kind) {
      case Kind::kOneShot:
        one_shot();
        break;
      case Kind::kTwoShot:
        scatter(m_.layout.scatter, 0, m_.world);
        collect(m_.layout.scatter, 0, m_.world, [&](int k, int t, int, const Packet& sum) {
          for (int r = 0; r < m_.world; ++r) push(m_.layout.gather, r, 0, k, t, sum);
        });
        take_gathered(m_.layout.gather);
        break;
      case Kind::kHierarchical:
      case Kind::kHierarchicalPull:
        hierarchical(call_.kind == Kind::kHierarchicalPull);
        break;
      default:
        pass_on();
    }
    finish();
  }

 private:
  template <class F>
  void for_packets(F f) {
    for (int k = block_; k * kTilePackets < call_.packets; k += call_.grid) {
      for (int t = thread_; t < packets(k); t += kThreads) f(k, t);
    }
  }

  int packets(int k) const { return std::min(kTilePackets, call_.packets - k * kTilePackets); }

  Packet own(int r, int k, int t) const {
    Packet p;
    for (int w = 0; w < kWords; ++w) p.words[w] = payload(r, n_, k * kTilePackets + t, w);
    return p;
  }

  std::atomic<uint32_t>* slot(const Region& region, int rank, int source, int k, int i) const {
    return &m_.ranks[rank]->slots[region.offset(half_, source, k, i) / 4];
  }

  uint32_t* plain(const Region& region, int rank, int source, int k, int i) const {
    return &m_.ranks[rank]->plain[region.offset(half_, source, k, i) / 4];
  }

  void push(const Region& region, int rank, int source, int k, int i, const Packet& p) {
    std::atomic<uint32_t>* to = slot(region, rank, source, k, i);
    const int first = (i + rank + n_) % kWords;
    for (int j = 0; j < kWords; ++j) {
      const int w = (first + j) % kWords;
      to[w].store(p.words[w], std::memory_order_relaxed);
      if (j == 0 && (i + n_) % 61 == 0) sched_yield();
    }
  }

  Packet receive(const Region& region, int source, int k, int i) {
    std::atomic<uint32_t>* at = slot(region, rank_, source, k, i);
    Packet p;
    for (;;) {
      bool whole = true;
      for (int w = 0; w < kWords; ++w) {
        p.words[w] = at[w].load(std::memory_order_relaxed);
        whole = whole && p.words[w] != kSentinel;
      }
      if (whole) break;
      idle();
    }
    if (m_.broken == Broken::kWrongClear) {
      at += (half_ & 1 ? -1 : 1) * static_cast<int64_t>(region.half / 4);
    }
    for (int w = 0; w < kWords && m_.broken != Broken::kNoClear; ++w)
      at[w].store(kSentinel, std::memory_order_relaxed);
    return p;
  }

  void idle() {
    sched_yield();
    if (++polls_ % 1024 == 0 && seconds() > m_.deadline) give_up(4, "a wait did not end");
  }

  void check(const Packet& p, int k, int t) {
    Packet expected = own(0, k, t);
    for (int r = 1; r < m_.world; ++r) add(expected, own(r, k, t));
    if (std::memcmp(&p, &expected, sizeof(p)) != 0) give_up(3, "a sum is wrong");
  }

  static void add(Packet& to, const Packet& p) {
    for (int w = 0; w < kWords; ++w) to.words[w] += p.words[w];
  }

  void one_shot() {
    const Region& region = m_.layout.one_shot;
    for_packets([&](int k, int t) {
      for (int r = 0; r < m_.world; ++r) {
        if (r != rank_) push(region, r, rank_, k, t, own(rank_, k, t));
      }
    });
    for_packets([&](int k, int t) {
      Packet sum = own(rank_, k, t);
      for (int r = 0; r < m_.world; ++r) {
        if (r != rank_) add(sum, receive(region, r, k, t));
      }
      check(sum, k, t);
    });
  }

  void scatter(const Region& region, int base, int num) {
    for_packets([&](int k, int t) {
      const int owner = owner_of(t, packets(k), num);
      const int i = t - share_begin(owner, packets(k), num);
      if (base + owner != rank_) push(region, base + owner, rank_ - base, k, i, own(rank_, k, t));
    });
  }

  // f(tile, packet, its place in the share, sum) for the packets that this rank owns.
  template <class F>
  void collect(const Region& region, int base, int num, F f) {
    const int self = rank_ - base;
    for_packets([&](int k, int t) {
      if (owner_of(t, packets(k), num) != self) return;
      const int i = t - share_begin(self, packets(k), num);
      Packet sum = own(rank_, k, t);
      for (int r = 0; r < num; ++r) {
        if (r != self) add(sum, receive(region, r, k, i));
      }
      f(k, t, i, sum);
    });
  }

  void take_gathered(const Region& region) {
    for_packets([&](int k, int t) { check(receive(region, 0, k, t), k, t); });
  }

  // A partial sum fills kWidth packets: its low and its high halves.
  static Packet part(const Packet& sum, int j) {
    Packet p;
    for (int w = 0; w < kWords; ++w) p.words[w] = j ? sum.words[w] >> 16 : sum.words[w] & 0xffff;
    return p;
  }
  static void add_part(Packet& to, const Packet& p, int j) {
    for (int w = 0; w < kWords; ++w) to.words[w] += j ? p.words[w] << 16 : p.words[w];
  }

  void hierarchical(bool pull) {
    const Layout& l = m_.layout;
    const int num = m_.island, self = rank_ % num, base = rank_ - self;
    const int num_islands = m_.world / num, island = rank_ / num;
    scatter(l.island_scatter, base, num);
    collect(l.island_scatter, base, num, [&](int k, int, int i, const Packet& sum) {
      for (int j = 0; j < kWidth; ++j) {
        const Packet p = part(sum, j);
        if (pull) {
          std::memcpy(plain(l.staging, rank_, 0, k, i * kWidth + j), &p, sizeof(p));
          continue;
        }
        for (int g = 0; g < num_islands; ++g)
          push(l.across, g * num + self, island, k, i * kWidth + j, p);
      }
    });
    if (pull) {
      uint32_t others = 0;
      for (int g = 0; g < num_islands; ++g) others |= g == island ? 0 : 1u << (g * num + self);
      publish(others);
      await(others);
    }
    for_packets([&](int k, int t) {
      if (owner_of(t, packets(k), num) != self) return;
      const int i = t - share_begin(self, packets(k), num);
      Packet sum{};
      for (int g = 0; g < num_islands; ++g) {
        for (int j = 0; j < kWidth; ++j) {
          Packet p;
          if (pull) {
            std::memcpy(&p, plain(l.staging, g * num + self, 0, k, i * kWidth + j), sizeof(p));
          } else {
            p = receive(l.across, g, k, i * kWidth + j);
          }
          add_part(sum, p, j);
        }
      }
      for (int r = 0; r < num; ++r) push(l.island_gather, base + r, 0, k, t, sum);
    });
    take_gathered(l.island_gather);
  }

  void pass_on() {
    const Region& region = m_.layout.exchange;
    const bool sends =
        call_.kind == Kind::kGather || (call_.kind == Kind::kBroadcast && call_.source == rank_);
    const uint32_t others = ((1u << m_.world) - 1) & ~(1u << rank_);
    if (sends) {
      for_packets([&](int k, int t) {
        const Packet p = own(rank_, k, t);
        for (int r = 0; r < m_.world; ++r) {
          if (r != rank_) std::memcpy(plain(region, r, rank_, k, t), &p, sizeof(p));
        }
      });
    }
    publish(others);
    await(others);
    if (call_.kind == Kind::kBarrier) return;
    for_packets([&](int k, int t) {
      for (int r = 0; r < m_.world; ++r) {
        if (r == rank_ || (call_.kind == Kind::kBroadcast && r != call_.source)) continue;
        const Packet expected = own(r, k, t);
        if (std::memcmp(plain(region, rank_, r, k, t), &expected, sizeof(expected)) != 0)
          give_up(3, "a gathered packet is wrong");
      }
    });
  }

  void publish(uint32_t ranks) {
    me_.blocks[block_]->wait();
    if (thread_ != 0) return;
    const auto order =
        m_.broken == Broken::kRelaxedFlag ? std::memory_order_relaxed : std::memory_order_release;
    for (int r = 0; r < m_.world; ++r) {
      if (ranks >> r & 1) m_.ranks[r]->flags[block_][rank_].store(epoch_, order);
    }
  }

  void await(uint32_t ranks) {
    if (m_.broken == Broken::kNoFlag) return;
    const auto order =
        m_.broken == Broken::kRelaxedAwait ? std::memory_order_relaxed : std::memory_order_acquire;
    for (int r = 0; r < m_.world; ++r) {
      if (!(ranks >> r & 1)) continue;
      while (me_.flags[block_][r].load(order) - epoch_ > 1) idle();
    }
  }

  void finish() {
    me_.blocks[block_]->wait();
    if (thread_ == 0) {
      const uint32_t before = me_.arrived.fetch_add(1, std::memory_order_relaxed);
      const bool last = before + 2 == static_cast<uint32_t>(call_.grid);
      if (last) me_.arrived.store(kNobody, std::memory_order_relaxed);
      if (m_.broken == Broken::kFirstBlockEnds ? before == kNobody : last)
        me_.finished.store(epoch_, std::memory_order_relaxed);
    }
    for (int r = 0; r < m_.world; ++r)
      m_.ranks[r]->ends[(epoch_ - 1) % 4].load(std::memory_order_acquire);
  }

  Machine& m_;
  Rank& me_;
  const Collective& call_;
  const int rank_, block_, thread_, n_;
  uint32_t epoch_, half_;
  uint32_t polls_ = 0;
};

void end_kernel(Rank& rank, bool speaks) {
  rank.stream.wait();
  if (speaks) {
    const uint32_t epoch = rank.finished.load(std::memory_order_relaxed);
    rank.ends[epoch % 4].store(epoch, std::memory_order_release);
  }
  rank.stream.wait();
}

std::vector<Collective> sequence(int world, int island, int num, unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<Collective> calls;
  for (int n = 0; n < num; ++n) {
    Collective c;
    do {
      c.kind = static_cast<Kind>(below(7));
    } while (island == 0 && (c.kind == Kind::kHierarchical || c.kind == Kind::kHierarchicalPull));
    c.packets = below(3) ? 1 + below(2 * world) : 1 + below(kTiles * kTilePackets);
    c.grid = std::min(1 + below(kBlocks), (c.packets + kTilePackets - 1) / kTilePackets);
    c.source = below(world);
    c.late_rank = below(world);
    c.late_for = below(4) ? below(4) : 64;
    calls.push_back(c);
  }
  return calls;
}

// Each packet has one owner, whose share holds it.
void check_shares() {
  for (int num = 1; num <= kMaxRanks; ++num) {
    for (int packets = 1; packets <= kTilePackets; ++packets) {
      for (int t = 0; t < packets; ++t) {
        const int owner = owner_of(t, packets, num);
        const int i = t - share_begin(owner, packets, num);
        if (owner < 0 || owner >= num || i < 0 || i >= static_cast<int>(share(num)) ||
            t >= share_begin(owner + 1, packets, num))
          give_up(3, "a packet has no owner");
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  Machine m;
  m.world = std::atoi(argv[1]);
  m.island = std::atoi(argv[2]);
  const int num_calls = std::atoi(argv[3]);
  m.calls = sequence(m.world, m.island, num_calls, static_cast<unsigned>(std::atoi(argv[4])));
  m.broken = Broken::kNothing;
  for (int i = 0; argc > 5 && i < static_cast<int>(std::size(kBrokenNames)); ++i) {
    if (std::string(argv[5]) == kBrokenNames[i]) m.broken = static_cast<Broken>(i);
  }
  if (argc > 5 && m.broken == Broken::kNothing) return 2;
  check_shares();
  m.layout = layout(m.world, kTiles * kTileBytes, kTiles * kTileBytes, m.island);
  m.deadline = seconds() + (m.broken == Broken::kNothing ? 120 : 3);
  for (int r = 0; r < m.world; ++r) m.ranks.emplace_back(new Rank(m.layout.total));

  std::vector<std::thread> threads;
  for (int r = 0; r < m.world; ++r) {
    for (int b = 0; b < kBlocks; ++b) {
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&m, r, b, t] {
          for (int n = 0; n < static_cast<int>(m.calls.size()); ++n) {
            const Collective& c = m.calls[n];
            for (int i = 0; r == c.late_rank && i < c.late_for; ++i) sched_yield();
            if (b < c.grid) Thread(m, r, b, t, n).run();
            end_kernel(*m.ranks[r], b == 0 && t == 0);
          }
        });
      }
    }
  }
  for (std::thread& t : threads) t.join();
  for (int r = 0; r < m.world; ++r) {
    for (uint64_t i = m.layout.one_shot.begin / 4; i < m.layout.slots_end / 4; ++i) {
      if (m.ranks[r]->slots[i].load(std::memory_order_relaxed) != kSentinel)
        give_up(3, "a word is left in a slot");
    }
  }
  std::printf("%d calls of %d ranks\n", num_calls, m.world);
  return 0;
}
