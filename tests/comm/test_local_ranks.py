"""All ranks in one process, as streams of one device: the checks that a GPU is shown first."""

import pytest
import torch
from cuda_on_host import emulated, fake_driver, host_build

from spec_kernels.comm.device_group import DeviceGroup
from spec_kernels.testing import collectives

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)


@pytest.fixture(params=["cuda_on_host"])
def machine(request):
    machine = host_build.load()
    machine.configure(2, emulated.RESIDENT)
    yield machine
    machine.set_clock(1)
    machine.configure(host_build.schedule())


@pytest.fixture
def fake(tmp_path):
    return fake_driver.load(tmp_path)


@pytest.fixture
def local(machine, fake):
    """``LocalRanks`` on the emulated machine."""
    made = []

    def make(num_ranks, **options):
        options = {"one_shot_bytes": 4096, "two_shot_bytes": 8192} | options
        options["platform"] = emulated.platform(fake, machine, host_clock=False)
        streams = emulated.Streams(machine, num_ranks)
        made.append(collectives.LocalRanks(num_ranks, 0, streams, **options))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
    assert fake.held() == 0 and fake.violations() == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 7])
def test_the_checks_pass_right_kernels(local, num_ranks):
    ranks = local(num_ranks)
    exact = ranks.algorithms()
    assert len(exact) == (4 if num_ranks == 4 else 2)
    sums = collectives.check_sums(ranks, (0, 5, 300), exact, (torch.bfloat16,))
    assert list(sums) == exact
    assert list(collectives.check_fused(ranks, ((3, 70),), dtypes=(torch.bfloat16,))) == exact
    assert list(collectives.check_moves(ranks, (0, 3, 5000))) == [
        "0 bytes",
        "3 bytes",
        "5000 bytes",
    ]
    assert len(list(collectives.check_replays(ranks, (5, 2000), 2))) == 2


def test_a_missing_rank_is_named(local, machine):
    machine.set_clock(1000)
    said = collectives.check_missing_rank(local(3, timeout_ms=20))
    assert (
        "rank 2 did not arrive" in said and "phase push" in said and said.startswith("DeviceGroup")
    )


def test_streams_and_local_groups_need_ranks(local):
    for num in (0, 9):
        with pytest.raises(ValueError, match=f"num_ranks: expected 1 to 8 ranks, got {num}"):
            DeviceGroup.local(num, 0)


def test_the_checks_fail_wrong_kernels(local, monkeypatch):
    real, kept = DeviceGroup.all_reduce, []

    def all_reduce(self, x, out=None, algorithm=0):
        kept.append(x + 1 if self.rank == 1 else x)  # until the kernel has run
        return real(self, kept[-1], out, algorithm)

    monkeypatch.setattr(DeviceGroup, "all_reduce", all_reduce)
    with pytest.raises(AssertionError, match="one_shot, integers 8 torch.float32, rank 0: "):
        list(collectives.check_sums(local(2), (8,), ["one_shot"]))
    with pytest.raises(AssertionError, match="replay 0 of 8 elements by one_shot, rank 0: "):
        list(collectives.check_replays(local(2), (8,)))


def test_garbage_for_a_missing_rank_fails(local, monkeypatch):
    ranks = local(2)
    monkeypatch.setattr(ranks, "call", lambda *_, **__: None)
    with pytest.raises(AssertionError, match="rank 0: 1000 not poisoned"):
        collectives.check_missing_rank(ranks)
