"""The device side of a communicator, in processes: emulated kernels on slabs in shared memory, with
a driver that can be told to fail.
"""

import ctypes
import dataclasses
import os
import random
import signal
import subprocess
import time

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build
from torch import distributed

from spec_kernels.comm import Communicator, device_group, p2p, schedules
from spec_kernels.comm.communicator import shared_memory_reason
from spec_kernels.comm.device_group import DeviceGroup
from spec_kernels.comm.launch import RankGroup, launch
from spec_kernels.comm.selection import Entry as Choice
from spec_kernels.comm.selection import Selection
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS
from spec_kernels.ops.pcie_allreduce.checks import SCALE_GROUP
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum

TIMEOUT = 120
# Trying peers with data takes longest here, and has tests of its own.
SMALL = dict(one_shot_bytes=4 << 10, two_shot_bytes=8 << 10, verify=False)
REASON = host_build.missing() or shared_memory_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no emulated ranks: {REASON}")


@pytest.fixture(scope="module")
def machine():
    return host_build.load()


@pytest.fixture
def fake(tmp_path):
    return fake_driver.load(tmp_path)


@pytest.fixture
def platform(fake, machine):
    return emulated.platform(fake, machine, host_clock=True)


def run(fn, world_size, *args, **options):
    return launch(fn, world_size, *args, timeout=TIMEOUT, **options)


def revealing(num, dtype, seed):
    """``[8, num]``: large terms that cancel between ranks, small ones that only one order keeps."""
    g = torch.Generator().manual_seed(seed)
    big = torch.randint(0, 3, (8, num), generator=g) * torch.tensor(2.0**12)
    sign = torch.tensor([1, -1, 1, -1, -1, 1, 1, -1])[:, None]
    return (big * sign + torch.randn((8, num), generator=g)).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_in_processes_sum_on_their_devices(world_size, platform, fake):
    def worker(comm):
        options = SMALL | dict(verify=True)
        with DeviceGroup(comm, comm.rank, platform=platform, **options) as group:
            assert world_size == 1 or group.links.sound
            for num in (0, 1, 7, 100, 1023):
                parts = list(revealing(num, torch.bfloat16, num)[:world_size])
                got = group.all_reduce(parts[comm.rank])
                assert torch.equal(got, ordered_sum(parts)), num
            row = group.all_gather(torch.tensor([comm.rank, 7]))
            assert row.tolist() == [[r, 7] for r in range(world_size)]
            word = torch.tensor([comm.rank])
            assert group.broadcast(word, src=world_size - 1).item() == world_size - 1
            group.barrier()
            group.check()
        with pytest.raises(RuntimeError, match="expected an open one, got one that was closed"):
            group.all_reduce(torch.ones(1))
        group.close()
        return fake.held(), fake.violations()

    assert run(worker, world_size) == [(0, 0)] * world_size


MIRRORED = """
#include <cstdio>
#include "pcie_allreduce/p2p.h"
#include "pcie_allreduce/slab.h"
namespace p2p = spec_kernels::p2p;
using namespace spec_kernels::slab;
int main() {
  std::printf("%d %d %zu %zu", kVersion, kMaxRanks, sizeof(Attach), sizeof(Entry));
  std::printf(" %zu %zu %d", sizeof(Status), offsetof(Control, abort), kMaxEntries);
  std::printf(" %d %d %d", kMaxBlocks, kPacketBytes, kTilePackets);
  std::printf(" %d %d", static_cast<int>(kScaleGroup), kTwoShotInt8);
  std::printf(" %d %d %zu", p2p::kNumBlocks, p2p::kPacketBytes, sizeof(p2p::Findings));
  std::printf(" %zu", sizeof(p2p::Timing));
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks)
    for (int island = 0; island <= kMaxRanks; ++island)
      std::printf(" %d", has_islands(ranks, island));
#define AT(field) std::printf(" %zu", offsetof(Attach, field));
  FIELDS
}
"""


def test_what_python_repeats_is_as_the_headers_have_it(tmp_path):
    fields = [name for name, _ in device_group.Attach._fields_]
    source, program = tmp_path / "mirrored.cpp", tmp_path / "mirrored"
    source.write_text(MIRRORED.replace("FIELDS", "".join(f"AT({name}) " for name in fields)))
    command = [host_build.compiler(), "-std=c++17", f"-I{host_build.ROOT / 'csrc'}"]
    done = host_build.run_compiler([*command, str(source), "-o", str(program)])
    assert done.returncode == 0, done.stderr
    told = list(map(int, subprocess.run([program], capture_output=True, text=True).stdout.split()))
    ranks = range(1, device_group.MAX_RANKS + 1)
    assert told == [
        device_group.VERSION, device_group.MAX_RANKS, ctypes.sizeof(device_group.Attach),
        ctypes.sizeof(device_group.Entry), device_group.STATUS_BYTES, device_group.ABORT_OFFSET,
        device_group.MAX_ENTRIES,
        schedules.MAX_BLOCKS, schedules.PACKET_BYTES, schedules.TILE_PACKETS,
        SCALE_GROUP, max(ALGORITHMS.values()),
        p2p._NUM_BLOCKS, p2p._PACKET_BYTES, p2p._RECORD_BYTES, p2p._RECORD_BYTES,
        *(schedules.has_islands(num, size) for num in ranks for size in (0, *ranks)),
        *(getattr(device_group.Attach, name).offset for name in fields),
    ]  # fmt: skip


def test_ranks_that_meet_through_gloo(platform):
    def worker(comm):
        assert comm.transport.startswith("gloo")
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL) as group:
            return group.all_reduce(torch.ones(3)).tolist()

    assert run(worker, 2, transport="gloo") == [[2.0] * 3] * 2


# What devices fail at, and what the ranks are told


def attempt(world_size, platform, prepare=lambda comm: None, device=lambda rank: rank, **options):
    """What making a group raised on each rank (None if nothing), and what it holds then."""

    def worker(comm):
        prepare(comm)
        error = None
        try:
            group = DeviceGroup(comm, device(comm.rank), platform=platform, **{**SMALL, **options})
        except (RuntimeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        else:
            group.close()
        comm.barrier()  # the ranks themselves can go on
        return error

    return run(worker, world_size)


def expect_on_all(errors, *said):
    assert all(errors), errors
    for error in errors:
        for text in said:
            assert text in error, (text, error)


@pytest.mark.parametrize(
    "call", ["cuMemAlloc_v2", "cuMemHostAlloc", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2",
             "cuDevicePrimaryCtxRetain", "cuMemsetD8_v2"]
)  # fmt: skip
def test_what_fails_on_one_rank_raises_on_all(call, platform, fake):
    def worker(comm):
        if comm.rank == 1:
            fake.fail(call, 2)
        with pytest.raises(RuntimeError) as caught:
            DeviceGroup(comm, comm.rank, platform=platform, **SMALL)
        comm.barrier()
        DeviceGroup(comm, comm.rank, platform=platform, **SMALL).close()  # the next try is fine
        return str(caught.value), fake.held(), fake.violations()

    for rank, (error, held, violations) in enumerate(run(worker, 3)):
        assert f"{call}(" in error and "CUDA_ERROR_OUT_OF_MEMORY" in error, error
        assert ("rank 1: " in error) == (rank != 1)
        assert (held, violations) == (0, 0)


def test_failures_anywhere_raise_on_all_and_leave_nothing(platform, fake):
    """One call of the driver's on one rank, wherever it happens to be; or none, and all is well."""
    calls = (
        "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemHostGetDevicePointer_v2", "cuMemsetD8_v2",
        "cuCtxSynchronize", "cuDevicePrimaryCtxRetain", "cuDeviceCanAccessPeer",
        "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuDeviceGetPCIBusId",
    )  # fmt: skip

    def worker(comm):
        made = 0
        for trial in range(40):
            rng = random.Random(trial)
            rank, call, after = rng.randrange(3), rng.choice(calls), rng.randrange(4)
            if comm.rank == rank:
                fake.fail(call, 2, after)
            failed = False
            try:
                group = DeviceGroup(
                    comm, comm.rank, platform=platform, **SMALL | dict(verify=trial % 8 == 0)
                )
            except RuntimeError:
                failed = True
            fake.fail(call, 2, 1 << 30)
            everywhere = comm.exchange(failed)
            assert len(set(everywhere)) == 1, (trial, rank, call, after, everywhere)
            if not failed:
                made += 1
                assert group.all_reduce(torch.ones(3)).eq(3).all()
                group.close()
            assert (fake.held(), fake.violations()) == (0, 0), (trial, rank, call, after)
            comm.barrier()
        return made

    (made,) = set(run(worker, 3))
    assert 5 < made < 35


def test_a_rank_without_a_driver_tells_the_others(platform, fake):
    errors = attempt(2, platform, lambda comm: comm.rank == 0 and fake.fail("cuInit", 100))
    expect_on_all(errors, "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")
    assert "rank 0: CudaDriverError" in errors[1]


@pytest.mark.parametrize(
    "options, said",
    [
        (lambda rank: dict(one_shot_bytes=4096 * (1 + rank // 2)),
         "one_shot_bytes: rank 0 has 4096, rank 2 has 8192"),
        (lambda rank: dict(verify=rank == 0), "verify: rank 0 has True, rank 1 has False"),
        (lambda rank: dict(timeout_ms=1000 + rank), "timeout_ms: rank 0 has 1000, rank 1 has 1001"),
        (lambda rank: dict(selection=Selection((Choice(1 << 20, "one_shot", 1 + rank),))),
         "selection: rank 0 has "),
    ],
)  # fmt: skip
def test_case_37_settings_that_differ_are_named(options, said, platform, fake):
    def worker(comm):
        with pytest.raises(RuntimeError, match="ranks disagree on their settings") as caught:
            DeviceGroup(comm, comm.rank, platform=platform, **{**SMALL, **options(comm.rank)})
        return str(caught.value), fake.held()

    answers = run(worker, 3)
    assert len(set(answers)) == 1 and said in answers[0][0] and answers[0][1] == 0


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(one_shot_bytes=0), "one_shot_bytes: expected 1 byte to 1 GiB, got 0"),
        (dict(timeout_ms=0), "timeout_ms: expected a positive number"),
        (dict(selection=Selection((Choice(9, "one_shot", 1),), island_size=2)),
         "selection: expected islands that part 3 ranks evenly, got islands of 2"),
    ],
)  # fmt: skip
def test_settings_that_no_group_can_have(options, said, platform):
    expect_on_all(attempt(3, platform, **options), f"ValueError: DeviceGroup: {said}")


def test_bad_settings_of_one_rank_do_not_leave_the_others_waiting(platform):
    def worker(comm):
        options = dict(timeout_ms=0) if comm.rank else {}
        with pytest.raises(ValueError if comm.rank else RuntimeError) as caught:
            DeviceGroup(comm, comm.rank, platform=platform, **{**SMALL, **options})
        return str(caught.value)

    zero, one = run(worker, 2)
    assert zero == f"DeviceGroup: rank 1: ValueError: {one}"


def test_case_39_devices_have_the_same_names_in_every_process(platform, fake):
    """Each rank sees the devices in an order of its own, and names its own by UUID or PCI id."""
    names = ["GPU-70717273", "0000:c4:00.0", "cuda:0"]

    def worker(comm):
        fake.devices(8, rotate=comm.rank)
        with DeviceGroup(comm, names[comm.rank], platform=platform, **SMALL) as group:
            x = group.all_reduce(torch.ones(100))
            assert x.eq(3).all()
            return [d.pci for d in group.devices]

    assert run(worker, 3) == [["0000:c8:00.0", "0000:c4:00.0", "0000:c3:00.0"]] * 3


def test_two_ranks_on_one_device_is_a_mistake_unless_asked_for(platform):
    errors = attempt(3, platform, device=lambda rank: rank // 2)
    expect_on_all(errors, "ranks 0 and 1 both have GPU-00", "share_device=True")
    assert attempt(3, platform, device=lambda rank: rank // 2, share_device=True) == [None] * 3


# Peers that cannot be relied on


def test_peer_access_that_the_driver_denies(platform, fake):
    def prepare(comm):
        fake.link(1, 2, fake_driver.SAYS_NONE)

    errors = attempt(3, platform, prepare)
    expect_on_all(errors, "memory of rank 2", "from cuda:1", "cannot reach that one")


def test_a_peer_that_cannot_be_opened(platform, fake):
    def prepare(comm):
        fake.devices(8, rotate=comm.rank)
        fake.link(0, 1, fake_driver.REFUSED)

    errors = attempt(
        2, platform, prepare, device=lambda rank: ("0000:c1:00.0", "0000:c2:00.0")[rank]
    )
    expect_on_all(errors, "memory of rank 1 (GPU-10111213")


@pytest.mark.parametrize(
    "kind, stores, loads",
    [
        (fake_driver.DROPS, "nothing arrived in 500 ms", None),
        (fake_driver.PARTIAL, "words arrived in 500 ms", None),
        (fake_driver.LATE, "nothing arrived in 500 ms", None),
    ],
    ids=["drops", "partial", "late"],
)
def test_peer_access_that_is_claimed_but_loses_data_is_found(kind, stores, loads, platform, fake):
    """Of one pair, in one direction."""

    def prepare(comm):
        fake.link(2, 0, kind)

    errors = attempt(3, platform, prepare, verify=True)
    expect_on_all(errors, "peer access fails when tried with data", "rank 2 (GPU-20212223", stores)
    (text,) = set(errors)
    assert text.count("stores to") == 1 and "stores to rank 0" in text
    assert "rank 0 (GPU-00010203-0405-0607-0809-0a0b0c0d0e0f, 0000:c1:00.0) loads" not in text


# Calls


def choices(world_size):
    """Every exact algorithm, by size; the islands are pairs."""
    if world_size % 2 or world_size == 2:
        return Selection((Choice(1 << 12, "one_shot", 2), Choice(1 << 20, "two_shot", 3)))
    names = ("one_shot", "two_shot", "hierarchical", "hierarchical_pull")
    sizes = (1 << 10, 1 << 11, 1 << 12, 1 << 20)
    return Selection(tuple(Choice(s, n, 2) for s, n in zip(sizes, names, strict=True)), 2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_hundreds_of_calls_of_every_algorithm(world_size, platform):
    """Random sizes, dtypes and algorithms, by table and by name, in place and not, never joined."""

    def worker(comm):
        selection = choices(world_size)
        names = ["auto", *(e.algorithm for e in selection.entries)]
        with DeviceGroup(comm, comm.rank, platform=platform, selection=selection, **SMALL) as group:
            for k in range(150):
                rng = random.Random(k)
                num = int(rng.choice((1, 40, 500, 2000)) * rng.random()) + 1
                dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
                parts = list(revealing(num, dtype, k)[:world_size])
                x = parts[comm.rank].clone()
                out = x if rng.random() < 0.3 else None
                got = group.all_reduce(x, out, algorithm=rng.choice(names))
                assert torch.equal(got, ordered_sum(parts)), (k, num, dtype)
        return True

    assert run(worker, world_size) == [True] * world_size


def test_the_fused_form_is_the_two_ops(platform, monkeypatch):
    """Through the communicator, which gives the group what is on its device."""
    monkeypatch.setattr(DeviceGroup, "takes", lambda self, x: x.dtype == torch.bfloat16)

    def worker(comm):
        comm.attach_device(comm.rank, platform=platform, selection=choices(4), **SMALL)
        for rows, algorithm in ((1, "auto"), (3, "two_shot"), (2, "hierarchical")):
            parts = [p.view(rows, 70) for p in revealing(70 * rows, torch.bfloat16, rows)[:4]]
            g = torch.Generator().manual_seed(rows)
            residual = torch.randn(rows, 70, generator=g).bfloat16()
            weight = torch.rand(70, generator=g).bfloat16()
            capture = torch.zeros(rows, 2, 70, dtype=torch.bfloat16)
            apart, captured = residual.clone(), capture.clone()
            out = comm.all_reduce_norm(
                parts[comm.rank], residual, weight, 1e-5, capture=capture, slot=1,
                algorithm=algorithm,
            )  # fmt: skip
            want = torch.empty_like(out)
            summed = ordered_sum(parts)
            platform.ops.hidden_capture.default(summed, apart, weight, 1e-5, want, captured, 1)
            assert torch.equal(out, want) and torch.equal(residual, apart)
            assert torch.equal(capture, captured)
        comm.close()

    run(worker, 4)


def test_two_groups_interleaved(platform):
    """Of one communicator and of two; each keeps its own epochs and slabs."""
    other = Communicator.create_group(2)

    def worker(comm):
        with other.bind(comm.rank) as second:
            options = [dict(one_shot_bytes=4096), dict(two_shot_bytes=4096), {}]
            comms = [comm, comm, second]
            groups = [
                DeviceGroup(c, comm.rank, platform=platform, **(SMALL | o))
                for c, o in zip(comms, options, strict=True)
            ]
            for k in range(40):
                which = random.Random(k).randrange(3)
                got = groups[which].all_reduce(torch.full((100 + k,), 0.0 + k + comm.rank))
                assert got.eq(2 * k + 1).all(), (k, which)
            for group in groups:
                group.close()

    run(worker, 2)


def test_ranks_that_come_and_call_late(platform):
    def worker(comm):
        time.sleep(0.05 * (comm.world_size - comm.rank))
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL) as group:
            for k in range(6):
                if k % 3 == comm.rank:
                    time.sleep(0.05)
                assert group.all_reduce(torch.ones(700)).eq(3).all()

    run(worker, 3)


def test_a_communicator_gives_its_device_tensors_to_the_group(platform, machine, monkeypatch):
    """Here every tensor is on the host, so the dtype stands for the device."""
    monkeypatch.setattr(DeviceGroup, "takes", lambda self, x: x.dtype == torch.bfloat16)

    def worker(comm):
        group = comm.attach_device(comm.rank, platform=platform, **SMALL)
        before = machine.num_launches()
        assert comm.all_reduce(torch.ones(9)).eq(2).all()
        assert comm.all_gather(torch.ones(1)).numel() == 2
        assert machine.num_launches() == before
        x = torch.ones(9, dtype=torch.bfloat16)
        assert comm.all_reduce(x, algorithm="two_shot").eq(2).all()
        assert comm.all_gather(x).shape == (2, 9) and comm.broadcast(x, 1) is x
        assert machine.num_launches() == before + 3
        with pytest.raises(ValueError, match="attach_device: expected none yet"):
            comm.attach_device(comm.rank, platform=platform)
        group.close()
        with pytest.raises(RuntimeError, match="one that was closed"):
            comm.all_reduce(x)
        group = comm.attach_device(comm.rank, platform=platform, **SMALL)
        assert comm.all_reduce(x).eq(2).all()
        comm.close()
        with pytest.raises(RuntimeError, match="one that was closed"):
            group.all_reduce(x)

    run(worker, 2)


def test_messages_beyond_the_selection_need_a_fallback(platform):
    def worker(comm):
        selection = Selection((Choice(400, "one_shot", 1),))
        with DeviceGroup(comm, comm.rank, platform=platform, selection=selection, **SMALL) as group:
            assert group.all_reduce(torch.ones(100)).eq(2).all()
            with pytest.raises(ValueError) as caught:
                group.all_reduce(torch.ones(101))
            assert group.all_reduce(torch.ones(101), algorithm="two_shot").eq(2).all()
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL) as group:
            assert group.all_reduce(torch.ones(9000)).eq(2).all()
        return str(caught.value)

    (text,) = set(run(worker, 2))
    assert text.startswith("pcie_allreduce: input: expected at most 400 bytes")
    assert "fallback=" in text and "got 404 bytes" in text


def gloo(comm, path):
    """A process group of the same ranks."""
    store = distributed.FileStore(str(path), comm.world_size)
    distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.world_size)
    return distributed.group.WORLD


def test_a_fallback_takes_longer_messages(platform, machine, tmp_path):
    def worker(comm):
        fallback = gloo(comm, tmp_path / "store")
        options = dict(selection=Selection((Choice(400, "one_shot", 1),)), fallback=fallback)
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL, **options) as group:
            before = machine.num_launches()
            x = torch.full((101,), 1.0 + comm.rank)
            assert group.all_reduce(x).eq(3).all() and x.eq(1 + comm.rank).all()
            assert machine.num_launches() == before
            assert group.all_reduce(x, algorithm="auto").eq(3).all()
            assert machine.num_launches() == before
            assert group.all_reduce(x[:100]).eq(3).all()
            assert machine.num_launches() == before + 1
            rows, residual, weight = x[None].clone(), torch.ones(1, 101), torch.ones(101)
            normed = group.all_reduce_norm(rows, residual, weight, 0.0)
            assert residual.eq(4).all() and normed.allclose(torch.ones(1, 101))
            assert rows.eq(1 + comm.rank).all() and machine.num_launches() == before + 2
            for out in (torch.empty(2, 101), torch.empty(101).double(), torch.empty(202)[::2]):
                with pytest.raises(ValueError, match="pcie_allreduce: out: expected"):
                    group.all_reduce(x, out)
            with pytest.raises(ValueError, match="out: expected a tensor other than residual"):
                group.all_reduce_norm(rows, residual, weight, 0.0, out=residual[:])
            assert residual.eq(4).all()
        distributed.destroy_process_group()

    run(worker, 2)


def test_several_machines(platform, tmp_path, monkeypatch, fake):
    """An error without a fallback, and all of the fallback's with one."""

    def worker(comm):
        monkeypatch.setattr(device_group, "_machine", lambda: f"machine {comm.rank}")
        with pytest.raises(RuntimeError, match="ranks on one machine, or fallback=.*2 machines"):
            DeviceGroup(comm, 0, platform=platform, **SMALL)
        fallback = gloo(comm, tmp_path / "store")
        with DeviceGroup(comm, 0, platform=platform, fallback=fallback, **SMALL) as group:
            assert group.all_reduce(torch.ones(5)).eq(2).all()
            assert group.all_gather(torch.tensor([[comm.rank]])).tolist() == [[[0]], [[1]]]
            assert group.broadcast(torch.tensor([comm.rank]), 1).item() == 1
            assert group.all_reduce(torch.ones(5), algorithm="auto").eq(2).all()
            with pytest.raises(ValueError, match="algorithm: expected auto, for ranks on several"):
                group.all_reduce(torch.ones(5), algorithm="one_shot")
            with pytest.raises(ValueError, match="pcie_broadcast: src: expected"):
                group.broadcast(torch.ones(5), 2)
            with pytest.raises(ValueError, match="pcie_all_gather: input: expected a contiguous"):
                group.all_gather(torch.ones(4, 2).T)
            group.barrier()
            group.check()
        distributed.destroy_process_group()
        return fake.held()

    assert run(worker, 2) == [0, 0]


def test_case_40_a_second_stream_is_refused(platform, machine):
    def worker(comm):
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL) as group:
            x = torch.ones(3)
            group.all_reduce(x)
            other = machine.create_stream(0)
            with machine.on_stream(other), pytest.raises(ValueError, match="stream"):
                group.all_reduce(x)
            group.use_stream(other)
            with machine.on_stream(other):
                y = group.all_reduce(x)
            machine.synchronize()
            assert y.eq(2).all()

    run(worker, 2)


# Ranks that fail


def survivors(fn, world_size, lost):
    """Errors of the ranks that ``fn(comm)`` leaves, when rank ``lost`` is gone for good."""
    with RankGroup(fn, world_size) as ranks:
        outcomes = ranks.wait(TIMEOUT, stop_on_failure=False)
    assert outcomes[lost].error is not None
    return [o for rank, o in enumerate(outcomes) if rank != lost]


PATIENCE_MS = 60_000  # while all ranks are well, however busy this machine is
GIVE_UP_MS = 1500  # once a rank is known to be gone


def waiting(group, milliseconds):
    """How long calls from here on wait."""
    group.settings = dataclasses.replace(group.settings, timeout_ms=milliseconds)


@pytest.mark.parametrize("algorithm", ["one_shot", "hierarchical"])
def test_case_36_a_rank_that_is_killed_is_named_by_all(algorithm, platform):
    def worker(comm):
        options = dict(selection=choices(4), timeout_ms=PATIENCE_MS)
        group = DeviceGroup(comm, comm.rank, platform=platform, **SMALL, **options)
        for k in range(8):
            if comm.rank == 2 and k == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            waiting(group, PATIENCE_MS if k < 5 else GIVE_UP_MS)
            x = torch.ones(600)
            try:
                out = group.all_reduce(x, algorithm=algorithm)
                group.check()
            except RuntimeError as error:
                assert k >= 5 and out.isnan().all()
                with pytest.raises(RuntimeError) as again:
                    group.all_reduce(x, algorithm=algorithm)
                return str(error), str(again.value)
            assert k < 5 and out.eq(4).all(), k
        return None

    texts = [o.value for o in survivors(worker, 4, 2)]
    assert all(texts), texts
    # Whoever waits for the dead rank itself says so; the others say who told them.
    assert any("rank 2 did not arrive (epoch 5, phase " in first for first, _ in texts), texts
    for first, again in texts:
        assert first.startswith("DeviceGroup.check: rank ") and again.startswith("pcie_allreduce: ")
        assert "did not arrive" in first or "gave up" in first
        assert first.split(": ", 1)[1] == again.split(": ", 1)[1], "the first error stays the error"


def test_case_36_a_rank_that_was_stopped_learns_of_it_when_it_goes_on(platform):
    def worker(comm):
        pids = comm.exchange(os.getpid())
        group = DeviceGroup(comm, comm.rank, platform=platform, timeout_ms=PATIENCE_MS, **SMALL)
        group.all_reduce(torch.ones(5))
        waiting(group, GIVE_UP_MS)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        out = group.all_reduce(torch.ones(5))
        os.kill(pids[1], signal.SIGCONT)
        with pytest.raises(RuntimeError) as caught:
            group.check()
        assert out.isnan().all()
        comm.barrier()
        group.close()
        return str(caught.value)

    zero, one, two = run(worker, 3)
    assert "gave up" in one
    assert any("rank 1 did not arrive (epoch 1, phase push" in text for text in (zero, two))


def test_a_rank_that_fails_ends_the_waiting_of_the_others(platform, fake):
    """At once, and not when the kernels' time is up."""

    def worker(comm):
        options = dict(platform=platform, timeout_ms=PATIENCE_MS, **SMALL)
        if comm.rank == 0:
            with pytest.raises(KeyError), DeviceGroup(comm, comm.rank, **options):
                raise KeyError("something else")
            comm.exchange(None)
            return None
        group = DeviceGroup(comm, comm.rank, **options)
        group.all_reduce(torch.ones(5))
        with pytest.raises(RuntimeError, match="rank 0 gave up") as caught:
            group.check()
        comm.exchange(None)
        group.leave()
        return str(caught.value)

    assert all(run(worker, 3)[1:])


def test_an_abort_of_the_communicator_reaches_its_devices(platform):
    def worker(comm):
        group = comm.attach_device(comm.rank, platform=platform, timeout_ms=PATIENCE_MS, **SMALL)
        if comm.rank == 0:
            comm.abort("of its own accord")
            with pytest.raises(RuntimeError, match="one that was closed"):
                group.all_reduce(torch.ones(5))
            return
        group.all_reduce(torch.ones(5))
        with pytest.raises(RuntimeError, match="rank 0 gave up"):
            group.check()
        with pytest.raises(RuntimeError, match="aborted by rank 0: of its own accord"):
            comm.close()

    run(worker, 2)


def test_a_slab_is_not_freed_under_a_rank_that_did_not_say_goodbye(platform, fake):
    def worker(comm):
        group = DeviceGroup(comm, comm.rank, platform=platform, timeout_ms=200, **SMALL)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1"):
            group.close()
        group.close()
        return fake.held()

    (zero,) = survivors(worker, 2, 1)
    assert zero.value == 3  # the slab, the record, the context
