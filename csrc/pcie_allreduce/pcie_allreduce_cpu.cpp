#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "hidden_capture/hidden_capture_args.h"
#include "pcie_allreduce/pcie_allreduce.h"
#include "pcie_allreduce/pcie_allreduce_args.h"

namespace spec_kernels {
namespace {

using group::CallInfo;
using group::Failure;
using group::Header;
using group::Op;
using group::RankLine;

// The header of the segment behind `workspace`, or an error before anything else of it is read.
Header& checked_header(const char* op, const Tensor& workspace, int64_t rank, int64_t world_size) {
  check_cpu(op, "workspace", workspace);
  check_dtype(op, "workspace", workspace, ScalarType::Byte);
  check_shape(op, "workspace", workspace, {-1});
  check_contiguous(op, "workspace", workspace);
  const uint64_t size = static_cast<uint64_t>(workspace.numel());
  SK_CHECK(size >= sizeof(Header), op, "workspace",
           "at least " + std::to_string(sizeof(Header)) + " bytes", size);
  void* data = workspace.data_ptr();
  SK_CHECK(reinterpret_cast<uintptr_t>(data) % group::kSlotAlignment == 0, op, "workspace",
           "a page-aligned segment", "an address inside a page");
  Header& h = *static_cast<Header*>(data);
  SK_CHECK(h.magic == group::kMagic, op, "workspace", "a segment of spec_kernels (magic number)",
           "other bytes");
  SK_CHECK(h.version == group::kVersion, op, "workspace",
           "segment version " + std::to_string(group::kVersion), h.version);
  SK_CHECK(h.digest == group::header_digest(h), op, "workspace", "an intact header (digest)",
           "a damaged one");
  SK_CHECK(h.world_size == world_size, op, "world_size", h.world_size, world_size);
  SK_CHECK(h.total_bytes == size && h.capacity > 0 && h.capacity < size &&
               group::segment_bytes(h.world_size, h.capacity) == size,
           op, "workspace", std::to_string(h.total_bytes) + " bytes", size);
  SK_CHECK(h.ranks[rank].base.load(std::memory_order_relaxed) == reinterpret_cast<uintptr_t>(data),
           op, "workspace",
           "the mapped segment that rank " + std::to_string(rank) + " bound in this process",
           "a copy, or another rank's");
  return h;
}

// An empty tensor may have no address, which memcpy must not be given.
void copy_bytes(void* to, const void* from, int64_t num) {
  if (num > 0) std::memcpy(to, from, static_cast<size_t>(num));
}

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// What is added up, and how.
struct Sum {
  int64_t item_bytes;
  Summand type;
  Rounding rounding;
  int island_size;
  int64_t unit;  // elements that cannot be added up apart
};

// One collective call of one rank: its place in the row of steps, its waits, and its part in
// failing together.
class Call {
 public:
  Call(Op op, Header& header, int64_t rank, int64_t timeout_ms, const CallInfo& info)
      : op_(op),
        h_(header),
        line_(header.ranks[rank]),
        rank_(static_cast<uint32_t>(rank)),
        world_(header.world_size),
        timeout_ns_(timeout_ms * 1'000'000),
        info_(info),
        step_(line_.step) {
    if (h_.failure.state.load(std::memory_order_relaxed))
      group::throw_failure(h_, rank_, group::op_name(op_));
    SK_CHECK(line_.busy.exchange(1) == 0, group::op_name(op_), "workspace",
             "one call at a time in each rank", "a second one from another thread");
    line_.info[step_ & 1] = info_;
  }

  ~Call() {
    line_.step = step_;
    line_.calls += 1;
    line_.busy.store(0, std::memory_order_release);
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Bytes of `total` that one step carries, a multiple of `unit`; at least one step, so that empty
  // calls meet too.
  template <class Step>
  void for_chunks(int64_t total, int64_t unit, Step step) {
    const int64_t chunk = capacity() / unit * unit;
    num_chunks_ = std::max<int64_t>(1, (total + chunk - 1) / chunk);
    for (chunk_ = 0; chunk_ < num_chunks_; ++chunk_) {
      step(chunk_ * chunk, std::min(chunk, total - chunk_ * chunk));
      ++step_;
    }
  }

  int64_t capacity() const { return static_cast<int64_t>(h_.capacity); }

  char* slot(uint32_t rank) const { return data() + ((step_ & 1) * world_ + rank) * h_.capacity; }

  char* result() const { return data() + 2 * world_ * h_.capacity; }

  // All ranks' data stand in their slots once this returns.
  void meet(const char* mine, int64_t bytes) {
    copy_bytes(slot(rank_), mine, bytes);
    meet();
  }

  void meet() {
    if (arrive()) {
      h_.progress.value.store(2 * step_ + 2, std::memory_order_relaxed);
      wake(h_.arrivals.value, INT_MAX);
    } else {
      await(h_.arrivals.value, target(), "arrive", num_missing());
    }
    check_calls();
  }

  // The sum stands in result() until this rank's next step, and in `output` if that is not null.
  void all_reduce(const char* input, char* output, int64_t num, const Sum& sum) {
    const int64_t item_bytes = sum.item_bytes;
    const int64_t bytes = num * item_bytes;
    const auto reduce = SK_KERNEL(pcie_reduce);
    ReduceArgs args{};
    args.num_ranks = static_cast<int>(world_);
    args.type = sum.type;
    args.rounding = sum.rounding;
    args.island_size = sum.island_size;
    for (uint32_t r = 0; r < world_; ++r) args.in[r] = slot(r);

    const int64_t block =
        round_up(std::max<int64_t>(1, h_.policy.block_bytes / item_bytes), sum.unit);
    const uint32_t num_blocks = static_cast<uint32_t>((num + block - 1) / block);
    const uint32_t opened = 2 * step_ + 1;
    const uint32_t published = 2 * step_ + 2;
    const auto work = [&] {
      line_.working.store(step_ + 1, std::memory_order_relaxed);
      for (uint32_t b; (b = h_.next_block.value.fetch_add(1)) < num_blocks;) {
        ReduceArgs part = args;
        const int64_t begin = b * block;
        for (uint32_t r = 0; r < world_; ++r)
          part.in[r] = static_cast<const char*>(args.in[r]) + begin * item_bytes;
        part.out = result() + begin * item_bytes;
        part.num = std::min(block, num - begin);
        reduce(part);
        if (h_.finished_blocks.value.fetch_add(1) + 1 == num_blocks) publish(published, INT_MAX);
      }
      line_.working.store(0, std::memory_order_relaxed);
    };

    // With everybody else here this rank is the last, and if it also works alone nobody will read
    // its slot.
    const bool alone =
        num_blocks <= 1 && h_.arrivals.value.load(std::memory_order_acquire) + 1 == target();
    if (!alone) copy_bytes(slot(rank_), input, bytes);
    // Said before it is known, so that a last rank that stops right after arriving is named.
    line_.working.store(step_ + 1, std::memory_order_relaxed);
    if (arrive()) {
      check_calls();
      if (num_blocks <= 1) {
        args.in[rank_] = input;
        args.out = result();
        args.copy = output;
        args.num = num;
        reduce(args);
        publish(published, INT_MAX);
        line_.working.store(0, std::memory_order_relaxed);
        return;
      }
      h_.next_block.value.store(0, std::memory_order_relaxed);
      h_.finished_blocks.value.store(0, std::memory_order_relaxed);
      if (h_.policy.num_workers > 1) {
        publish(opened, static_cast<int>(h_.policy.num_workers) - 1);
      } else {
        h_.progress.value.store(opened);
      }
      work();
    } else {
      line_.working.store(0, std::memory_order_relaxed);
      await(h_.progress.value, opened, "arrive", num_missing());
      if (h_.progress.value.load(std::memory_order_acquire) == opened) work();
    }
    await(h_.progress.value, published, "reduce", world_ - 1);
    if (output) copy_bytes(output, result(), bytes);
  }

 private:
  char* data() const { return reinterpret_cast<char*>(&h_) + group::data_offset(); }

  uint32_t target() const { return (step_ + 1) * world_; }

  // True for the last rank to arrive.
  bool arrive() {
    line_.arrived.store(step_ + 1, std::memory_order_relaxed);
    return h_.arrivals.value.fetch_add(1) + 1 == target();
  }

  void publish(uint32_t progress, int num_woken) {
    h_.progress.value.store(progress);
    wake(h_.progress.value, num_woken);
  }

  // The caller wrote the word first, a sleeper counts itself first: one of the two sees the other.
  void wake(std::atomic<uint32_t>& word, int num) {
    if (h_.sleepers.value.load()) group::futex_wake(word, num);
  }

  // Polls while there is a core to spare for it, `num_busy` other ranks being at work. Where that
  // is in vain (other programs have the cores, or the others compute for long) a rank grants itself
  // less and less, and now and then tries anew.
  bool poll(const std::atomic<uint32_t>& word, uint32_t target, uint32_t num_busy) {
    constexpr uint32_t kFewest = 32, kTryAnew = 64;
    const uint32_t most = h_.policy.spin_iterations;
    if (most == 0 || num_busy > h_.policy.num_spare) return false;
    const bool anew = line_.missed_spins % kTryAnew == 0;
    const uint32_t spins = anew ? most : std::min(line_.spins, most);
    for (uint32_t i = 0; i < spins; ++i) {
      if (group::reached(word.load(std::memory_order_acquire), target)) {
        line_.spins = std::max(line_.spins, 8 * i + kFewest);
        return true;
      }
      group::pause();
    }
    line_.spins = std::max(spins - spins / 4, kFewest);
    ++line_.missed_spins;
    return false;
  }

  uint32_t num_missing() const {
    return target() - h_.arrivals.value.load(std::memory_order_relaxed);
  }

  void await(std::atomic<uint32_t>& word, uint32_t target, const char* phase, uint32_t num_busy) {
    if (poll(word, target, num_busy)) return;
    const int64_t start = group::now_ns();
    for (int64_t waited = 0;;) {
      if (h_.failure.state.load()) group::throw_failure(h_, rank_, group::op_name(op_));
      h_.sleepers.value.fetch_add(1);
      const uint32_t value = word.load();
      if (!group::reached(value, target)) {
        group::futex_wait(word, value, std::min(group::kSliceNanoseconds, timeout_ns_ - waited));
      }
      h_.sleepers.value.fetch_sub(1);
      if (group::reached(word.load(std::memory_order_acquire), target)) return;
      waited = group::now_ns() - start;
      check_peers(phase, waited);
      if (waited >= timeout_ns_) fail(Failure::kTimeout, late_ranks(), phase, waited);
    }
  }

  bool arrived(uint32_t r) const { return group::reached(h_.ranks[r].arrived.load(), step_ + 1); }

  // Who is waited for: ranks not yet here, or, when all are, those at work on the result.
  uint32_t late_ranks() const {
    uint32_t absent = 0, working = 0;
    for (uint32_t r = 0; r < world_; ++r) {
      if (!arrived(r)) absent |= 1u << r;
      if (h_.ranks[r].working.load() == step_ + 1) working |= 1u << r;
    }
    return absent ? absent : working;
  }

  void check_peers(const char* phase, int64_t waited) {
    uint32_t died = 0, left = 0;
    for (uint32_t r = 0; r < world_; ++r) {
      const uint32_t alive = h_.ranks[r].alive.load();
      if (alive == group::kLeft) {
        if (!arrived(r)) left |= 1u << r;
      } else if (alive & group::kOwnerDied) {
        died |= 1u << r;
      }
    }
    if (died) fail(Failure::kDied, died, phase, waited);
    if (left) fail(Failure::kLeft, left, phase, waited);
  }

  void check_calls() {
    if (chunk_ != 0) return;
    for (uint32_t r = 0; r < world_; ++r) {
      const CallInfo& theirs = h_.ranks[r].info[step_ & 1];
      if (theirs == info_) continue;
      fail(Failure::kMismatch, 1u << r, "arrive", 0, &theirs);
    }
  }

  [[noreturn]] void fail(Failure kind, uint32_t ranks, const char* phase, int64_t waited,
                         const CallInfo* theirs = nullptr) {
    group::record_failure(h_, kind, rank_, [&](group::FailureRecord& f) {
      f.ranks = ranks;
      f.epoch = line_.calls;
      f.step = step_;
      f.chunk = static_cast<uint32_t>(chunk_);
      f.num_chunks = static_cast<uint32_t>(num_chunks_);
      f.op = static_cast<uint32_t>(op_);
      f.waited_ms = static_cast<uint32_t>(waited / 1'000'000);
      std::strncpy(f.phase, phase, sizeof(f.phase) - 1);
      f.mine = info_;
      if (theirs) {
        f.theirs = *theirs;
        f.other = static_cast<uint32_t>(__builtin_ctz(ranks));
      }
    });
    group::throw_failure(h_, rank_, group::op_name(op_));
  }

  const Op op_;
  Header& h_;
  RankLine& line_;
  const uint32_t rank_, world_;
  const int64_t timeout_ns_;
  const CallInfo info_;
  uint32_t step_;
  int64_t chunk_ = 0;
  int64_t num_chunks_ = 1;
};

CallInfo call_info(Op op, ScalarType dtype, int64_t bytes, int64_t item_bytes) {
  CallInfo info{};
  info.numel = static_cast<uint64_t>(bytes / item_bytes);
  info.item_bytes = static_cast<uint32_t>(item_bytes);
  info.op = static_cast<uint8_t>(op);
  info.dtype = static_cast<int8_t>(dtype);
  return info;
}

CallInfo call_info(Op op, const Tensor& t) {
  return call_info(op, t.scalar_type(), num_bytes(t), static_cast<int64_t>(t.element_size()));
}

Span segment_of(const Header& header) {
  return {reinterpret_cast<const char*>(&header), static_cast<int64_t>(header.total_bytes)};
}

// The algorithms that give the exact sum differ in what they send where, which shared memory has no
// use for; the others are what they say they are.
Sum checked_sum(const char* op, const Tensor& input, ScalarType dtype, int64_t algorithm,
                int64_t world_size) {
  check_algorithm(op, input, algorithm);
  Sum sum{};
  sum.item_bytes = dtype == ScalarType::Float ? 4 : 2;
  sum.type = dtype == ScalarType::Float      ? Summand::kF32
             : dtype == ScalarType::BFloat16 ? Summand::kBf16
                                             : Summand::kF16;
  sum.unit = 1;
  if (algorithm == slab::kHierarchicalBf16) {
    sum.rounding = Rounding::kBf16Islands;
    sum.island_size = slab::bf16_island_size(static_cast<int>(world_size));
    SK_CHECK(world_size == 1 || slab::has_islands(static_cast<int>(world_size), sum.island_size),
             op, "algorithm", "4, 6 or 8 ranks for hierarchical_bf16", world_size);
  } else if (algorithm > slab::kHierarchicalBf16) {
    sum.rounding = algorithm == slab::kTwoShotFp8 ? Rounding::kFp8 : Rounding::kInt8;
    sum.unit = slab::kScaleGroup;
  }
  return sum;
}

void pcie_allreduce(Tensor input, Tensor out, Tensor workspace, int64_t rank, int64_t world_size,
                    int64_t timeout_ms, int64_t algorithm) {
  const char* op = group::op_name(Op::kAllReduce);
  check_group(op, rank, world_size, timeout_ms);
  check_cpu(op, "input", input);
  check_cpu(op, "out", out);
  const InputAndOut found = check_allreduce(op, input, out);
  const Sum sum = checked_sum(op, input, found.dtype, algorithm, world_size);
  const char* from = found.input.begin;
  char* to = const_cast<char*>(found.out.begin);
  const int64_t bytes = found.input.bytes;
  if (world_size == 1) {
    if (from != to) copy_bytes(to, from, bytes);
    return;
  }
  Header& header = checked_header(op, workspace, rank, world_size);
  check_apart(op, "input", found.input, segment_of(header));
  check_apart(op, "out", found.out, segment_of(header));
  CallInfo info = call_info(Op::kAllReduce, found.dtype, bytes, sum.item_bytes);
  info.algorithm = static_cast<uint32_t>(algorithm);
  Call call(Op::kAllReduce, header, rank, timeout_ms, info);
  call.for_chunks(bytes, sum.unit * sum.item_bytes, [&](int64_t begin, int64_t num) {
    call.all_reduce(from + begin, to + begin, num / sum.item_bytes, sum);
  });
}

// Writes bytes [begin, begin + num) of rows that lie `stride` bytes apart.
void copy_to_rows(char* rows, int64_t row_bytes, int64_t stride, const char* from, int64_t begin,
                  int64_t num) {
  while (num > 0) {
    const int64_t column = begin % row_bytes;
    const int64_t piece = std::min(num, row_bytes - column);
    copy_bytes(rows + begin / row_bytes * stride + column, from, piece);
    from += piece;
    begin += piece;
    num -= piece;
  }
}

void pcie_allreduce_norm(Tensor input, Tensor residual, Tensor weight, double eps, Tensor out,
                         std::optional<Tensor> capture, int64_t slot, Tensor workspace,
                         int64_t rank, int64_t world_size, int64_t timeout_ms, int64_t algorithm) {
  const char* op = group::op_name(Op::kAllReduceNorm);
  check_group(op, rank, world_size, timeout_ms);
  check_cpu(op, "residual", residual);
  HiddenCaptureArgs args =
      hidden_capture_args(op, input, residual, weight, eps, out, capture, slot, "input");
  check_contiguous(op, "input", input);
  const ScalarType dtype = input.scalar_type();
  const Sum sum = checked_sum(op, input, dtype, algorithm, world_size);
  const int64_t num_rows = input.size(0);
  if (world_size == 1) return hidden_capture_cpu(args, num_rows);
  Header& header = checked_header(op, workspace, rank, world_size);
  const Span from = span_of(input);
  check_apart(op, "input", from, segment_of(header));
  for (const NamedTensor& t : {NamedTensor{"residual", &residual}, NamedTensor{"weight", &weight},
                               NamedTensor{"out", &out}, NamedTensor{"capture", given(capture)}}) {
    SK_CHECK(!t.tensor || !may_overlap(Footprint(*t.tensor), Footprint(workspace)), op, t.name,
             "memory apart from workspace", "an overlap");
  }
  CallInfo info = call_info(Op::kAllReduceNorm, dtype, from.bytes, sum.item_bytes);
  info.algorithm = static_cast<uint32_t>(algorithm);
  info.row = static_cast<uint32_t>(args.hidden);
  Call call(Op::kAllReduceNorm, header, rank, timeout_ms, info);
  const int64_t row_bytes = args.hidden * sum.item_bytes;
  if (row_bytes > 0 && row_bytes <= call.capacity()) {
    call.for_chunks(from.bytes, row_bytes, [&](int64_t begin, int64_t num) {
      call.all_reduce(from.begin + begin, nullptr, num / sum.item_bytes, sum);
      HiddenCaptureArgs rows = rows_from(args, begin / row_bytes);
      rows.x = call.result();
      rows.x_stride = args.hidden;
      hidden_capture_cpu(rows, num / row_bytes);
    });
    return;
  }
  // A row that does not fit into a slot is put together first.
  const int64_t out_stride = args.out_stride * sum.item_bytes;
  call.for_chunks(from.bytes, sum.unit * sum.item_bytes, [&](int64_t begin, int64_t num) {
    call.all_reduce(from.begin + begin, nullptr, num / sum.item_bytes, sum);
    copy_to_rows(static_cast<char*>(args.out), row_bytes, out_stride, call.result(), begin, num);
  });
  args.x = args.out;
  args.x_stride = args.out_stride;
  hidden_capture_cpu(args, num_rows);
}

void pcie_all_gather(Tensor input, Tensor out, Tensor workspace, int64_t rank, int64_t world_size,
                     int64_t timeout_ms) {
  const char* op = group::op_name(Op::kAllGather);
  check_group(op, rank, world_size, timeout_ms);
  check_cpu(op, "input", input);
  check_cpu(op, "out", out);
  check_all_gather(op, input, out, world_size);
  const int64_t bytes = num_bytes(input);
  if (world_size == 1) {
    copy_bytes(out.data_ptr(), input.data_ptr(), bytes);
    return;
  }
  Header& header = checked_header(op, workspace, rank, world_size);
  check_apart(op, "input", input, workspace);
  check_apart(op, "out", out, workspace);
  Call call(Op::kAllGather, header, rank, timeout_ms, call_info(Op::kAllGather, input));
  call.for_chunks(bytes, 1, [&](int64_t begin, int64_t num) {
    const char* mine = static_cast<const char*>(input.data_ptr()) + begin;
    call.meet(mine, num);
    for (int64_t r = 0; r < world_size; ++r) {
      copy_bytes(static_cast<char*>(out.data_ptr()) + r * bytes + begin,
                 r == rank ? mine : call.slot(static_cast<uint32_t>(r)), num);
    }
  });
}

void pcie_broadcast(Tensor tensor, int64_t src, Tensor workspace, int64_t rank, int64_t world_size,
                    int64_t timeout_ms) {
  const char* op = group::op_name(Op::kBroadcast);
  check_group(op, rank, world_size, timeout_ms);
  check_cpu(op, "tensor", tensor);
  check_broadcast(op, tensor, src, world_size);
  if (world_size == 1) return;
  Header& header = checked_header(op, workspace, rank, world_size);
  check_apart(op, "tensor", tensor, workspace);
  CallInfo info = call_info(Op::kBroadcast, tensor);
  info.src = static_cast<int16_t>(src);
  Call call(Op::kBroadcast, header, rank, timeout_ms, info);
  call.for_chunks(num_bytes(tensor), 1, [&](int64_t begin, int64_t num) {
    char* mine = static_cast<char*>(tensor.data_ptr()) + begin;
    if (src == rank) copy_bytes(call.slot(static_cast<uint32_t>(src)), mine, num);
    call.meet();
    if (src != rank) copy_bytes(mine, call.slot(static_cast<uint32_t>(src)), num);
  });
}

void pcie_barrier(Tensor workspace, int64_t rank, int64_t world_size, int64_t timeout_ms) {
  const char* op = group::op_name(Op::kBarrier);
  check_group(op, rank, world_size, timeout_ms);
  if (world_size == 1) return;
  Header& header = checked_header(op, workspace, rank, world_size);
  CallInfo info{};
  info.op = static_cast<uint8_t>(Op::kBarrier);
  Call call(Op::kBarrier, header, rank, timeout_ms, info);
  call.for_chunks(0, 1, [&](int64_t, int64_t) { call.meet(); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(spec_kernels, CPU, m) {
  m.impl("pcie_allreduce", TORCH_BOX(&pcie_allreduce));
  m.impl("pcie_allreduce_norm", TORCH_BOX(&pcie_allreduce_norm));
  m.impl("pcie_all_gather", TORCH_BOX(&pcie_all_gather));
  m.impl("pcie_broadcast", TORCH_BOX(&pcie_broadcast));
  m.impl("pcie_barrier", TORCH_BOX(&pcie_barrier));
}

}  // namespace spec_kernels
