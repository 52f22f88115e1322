"""The simulator's schedules against what the CUDA kernels really store and load."""

import pytest
import torch
from cuda_on_host import host_build

from spec_kernels.comm.schedules import algorithms_for, build, has_islands
from spec_kernels.ops.pcie_allreduce.algorithms import ALGORITHMS

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)


@pytest.fixture(scope="module")
def machine():
    m = host_build.load()
    m.configure(3, 64, 0)
    yield m
    m.configure(host_build.schedule())


def sent(machine, algorithm, x, num_ranks, island_size, num_blocks):
    """Bytes from rank to rank of one call on the emulated machine: packets, no flags."""
    from cuda_on_host.groups import Group

    table = ((1 << 40, 1, num_blocks),)
    options = dict(one_shot_bytes=16 << 10, two_shot_bytes=16 << 10, island_size=island_size)
    ranks = range(num_ranks)
    with Group(machine, num_ranks, table=table, **options) as group:
        slabs = [(slab.data_ptr(), slab.numel()) for slab in group.slabs]
        with machine.watch(slabs) as accessed:
            outs = [group.all_reduce(r, x, algorithm=ALGORITHMS[algorithm]) for r in ranks]
            group.synchronize()
            total = {}
            for r in ranks:
                for peer in set(ranks) - {r}:
                    stored = accessed(group.devices[r], peer, 1)
                    loaded = accessed(group.devices[r], peer, 0)
                    total[r, peer] = total.get((r, peer), 0) + stored
                    total[peer, r] = total.get((peer, r), 0) + loaded
    assert all(torch.equal(out, num_ranks * x) for out in outs)
    return {pair: num for pair, num in total.items() if num}


GROUPS = [(n, 0) for n in range(2, 9)]
GROUPS += [(n, size) for n in range(2, 9) for size in (2, 4) if has_islands(n, size)]


@pytest.mark.parametrize("num_ranks, island_size", GROUPS)
def test_bytes_are_those_of_the_kernels(machine, num_ranks, island_size):
    """Each pair's, for a packet, a part of a tile, and tiles that a grid takes in turns."""
    names = algorithms_for(num_ranks, island_size)
    for algorithm in names[2:] if island_size else names:
        for num_bytes, num_blocks, dtype in (
            (12, 1, torch.float32),
            (2048 - 2, 2, torch.bfloat16),
            (5 * 2048 + 16 * 37 + 4, 2, torch.float32),
            (5 * 2048 + 16 * 37 + 2, 3, torch.bfloat16),
        ):
            item = torch.empty(0, dtype=dtype).element_size()
            x = torch.arange(num_bytes // item).remainder(7).to(dtype)
            expected = build(
                algorithm,
                num_bytes,
                num_ranks,
                island_size=island_size,
                itemsize=item,
                num_blocks=num_blocks,
            ).bytes_between()
            got = sent(machine, algorithm, x, num_ranks, island_size, num_blocks)
            assert got == expected, (algorithm, num_bytes, num_blocks, dtype)


def test_the_count_can_differ(machine):
    """A schedule of another size, or of another algorithm, is not what the kernel does."""
    x = torch.ones(512)
    got = sent(machine, "two_shot", x, 4, 0, 1)
    assert got == build("two_shot", 2048, 4, itemsize=4).bytes_between()
    for other in (build("two_shot", 2032, 4, itemsize=4), build("one_shot", 2048, 4, itemsize=4)):
        assert got != other.bytes_between()
