"""The device side of a communicator, in processes: emulated kernels on slabs in shared memory, with
a driver that can be told to fail.
"""

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build

from spec_kernels.comm.communicator import shared_memory_reason
from spec_kernels.comm.device_group import DeviceGroup
from spec_kernels.comm.launch import launch
from spec_kernels.comm.selection import Entry as Choice
from spec_kernels.comm.selection import Selection
from spec_kernels.ops.pcie_allreduce.reference import ordered_sum

TIMEOUT = 120
SMALL = dict(one_shot_bytes=4 << 10, two_shot_bytes=8 << 10)
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
        with DeviceGroup(comm, comm.rank, platform=platform, **SMALL) as group:
            for num in (0, 1, 7, 100, 1023):
                parts = list(revealing(num, torch.bfloat16, num)[:world_size])
                got = group.all_reduce(parts[comm.rank])
                assert torch.equal(got, ordered_sum(parts)), num
            group.check()
        return fake.held(), fake.violations()

    assert run(worker, world_size) == [(0, 0)] * world_size


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


def test_a_rank_without_a_driver_tells_the_others(platform, fake):
    errors = attempt(2, platform, lambda comm: comm.rank == 0 and fake.fail("cuInit", 100))
    expect_on_all(errors, "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")
    assert "rank 0: CudaDriverError" in errors[1]


@pytest.mark.parametrize(
    "options, said",
    [
        (lambda rank: dict(one_shot_bytes=4096 * (1 + rank // 2)),
         "one_shot_bytes: rank 0 has 4096, rank 2 has 8192"),
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

    errors = attempt(3, platform, prepare)
    expect_on_all(errors, "peer access fails when tried with data", "rank 2 (GPU-20212223", stores)
    (text,) = set(errors)
    assert text.count("stores to") == 1 and "stores to rank 0" in text
    assert "rank 0 (GPU-00010203-0405-0607-0809-0a0b0c0d0e0f, 0000:c1:00.0) loads" not in text
