"""Device groups on the emulated machine: its kernels and streams, the fake driver's memory."""

from __future__ import annotations

import ctypes

import torch
from cuda_on_host import host_build
from cuda_on_host.fake_driver import FakeDriver

from spec_kernels.comm import p2p
from spec_kernels.comm.device_group import Platform, declare

RESIDENT = 64  # blocks of a launch: all of a grid, as the protocol asks of a device


def platform(fake: FakeDriver, machine: host_build.Machine, *, host_clock: bool) -> Platform:
    """``host_clock``: for ranks in processes of their own, which wait in real time."""

    def driver():
        if host_clock:
            machine.set_clock(0)
            machine.configure(2, RESIDENT, max_steps=1 << 62)
        return fake.driver()

    def tensor(address, num_bytes, device):
        memory = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    return Platform(
        driver=driver,
        library=p2p.declare(declare(machine.library)),
        ops=getattr(torch.ops, host_build.NAMESPACE),
        torch_device=lambda name: torch.device("cpu"),
        tensor=tensor,
    )


class Streams:
    """``spec_kernels.testing.collectives.Streams`` on the emulated machine."""

    def __init__(self, machine: host_build.Machine, num_ranks: int):
        self.machine = machine
        self._streams = [machine.create_stream(rank) for rank in range(num_ranks)]

    def on(self, rank: int):
        return self.machine.on_stream(self._streams[rank])

    def synchronize(self) -> None:
        self.machine.synchronize()

    def record(self, rank: int, function):
        with self.machine.record() as graph, self.on(rank):
            function()
        return lambda: self.machine.replay(graph)
