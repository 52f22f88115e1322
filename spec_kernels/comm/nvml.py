"""What NVIDIA's driver says of its GPUs, through NVML (``libnvidia-ml.so.1``), as plain data.

The library is loaded by name and every function looked up when it is called, so an old or partial
one costs only what it lacks. Constants and signatures: NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from spec_kernels.comm.sysfs import normal_address, printable

LIBRARY = "libnvidia-ml.so.1"
TOPOLOGY_LABELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
P2P_STATES = {
    0: "ok",
    1: "chipset not supported",
    2: "GPU not supported",
    3: "topology not supported",
    4: "disabled by a driver setting",
    5: "not supported",
}
_P2P_READ, _P2P_WRITE = 0, 1
_TEXT_BYTES = 96


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    ]


@dataclass(frozen=True)
class NvmlGpu:
    """A GPU as the driver lists it. None is unknown.

    Attributes:
        index: its number in ``nvidia-smi``.
        uuid, name: as the driver spells them.
        pci: ``domain:bus:device.function``.
        gen, width: of the link, now.
        max_gen, max_width: what GPU and slot can do together.
        gpu_max_gen: what the GPU alone could do.
        performance_state: 0 (fastest) to 15.
        mig: whether it is, or after a reset will be, split into MIG devices.
    """

    index: int
    uuid: str
    name: str
    pci: str
    gen: int | None = None
    width: int | None = None
    max_gen: int | None = None
    max_width: int | None = None
    gpu_max_gen: int | None = None
    performance_state: int | None = None
    mig: bool | None = None


Square = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class NvmlReading:
    """All that was asked.

    Attributes:
        absent: why there is nothing to read; "" if NVML works.
        driver: the driver's version.
        gpus: in the driver's order.
        labels: common ancestors as in ``topology.LABELS``, "?" where NVML does not say.
        p2p_read, p2p_write: the states of ``P2P_STATES``, "?" where NVML does not say.
        problems: devices that could not be read, and why.
    """

    absent: str = ""
    driver: str = ""
    gpus: tuple[NvmlGpu, ...] = ()
    labels: Square = ()
    p2p_read: Square = ()
    p2p_write: Square = ()
    problems: tuple[str, ...] = ()


class NvmlError(RuntimeError):
    """A call failed; ``code`` is NVML's, -1 if the library lacks the function."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.code = code


class _Library:
    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)

    def call(self, name: str, *args: object) -> None:
        try:
            function = getattr(self.lib, name)
        except AttributeError:
            raise NvmlError(name, -1, "this library does not have it") from None
        function.restype = ctypes.c_int
        code = function(*args)
        if code != 0:
            raise NvmlError(name, code, self.error_text(code))

    def error_text(self, code: int) -> str:
        try:
            function = self.lib.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        function.restype = ctypes.c_char_p
        return printable(function(ctypes.c_int(code)) or b"") or f"error {code}"

    def text(self, name: str, *args: object) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *args, buffer, ctypes.c_uint(_TEXT_BYTES))
        return printable(buffer.value)

    def number(self, name: str, *args: object) -> int:
        value = ctypes.c_uint()
        self.call(name, *args, ctypes.byref(value))
        return value.value


def _optional(ask: Callable[..., int], *args: object) -> int | None:
    """What ``ask`` gives, or None: the older driver or the device does not tell."""
    try:
        return ask(*args)
    except NvmlError:
        return None


def _gpu(nvml: _Library, index: int) -> tuple[NvmlGpu, ctypes.c_void_p]:
    device = ctypes.c_void_p()
    nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    info = _PciInfo()
    nvml.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
    pci = normal_address(printable(info.busId))
    if pci is None:
        raise NvmlError("nvmlDeviceGetPciInfo_v3", 0, f"no PCI address: {printable(info.busId)!r}")

    def mig() -> int:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        nvml.call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
        return current.value | pending.value

    def link(name: str) -> int | None:
        # 0: there is no link to speak of.
        return _optional(nvml.number, name, device) or None

    split = _optional(mig)
    state = _optional(nvml.number, "nvmlDeviceGetPerformanceState", device)
    gpu = NvmlGpu(
        index=index,
        uuid=nvml.text("nvmlDeviceGetUUID", device),
        name=nvml.text("nvmlDeviceGetName", device),
        pci=pci,
        gen=link("nvmlDeviceGetCurrPcieLinkGeneration"),
        width=link("nvmlDeviceGetCurrPcieLinkWidth"),
        max_gen=link("nvmlDeviceGetMaxPcieLinkGeneration"),
        max_width=link("nvmlDeviceGetMaxPcieLinkWidth"),
        gpu_max_gen=link("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
        performance_state=state if state is not None and state <= 15 else None,
        mig=None if split is None else bool(split),
    )
    return gpu, device


def _square(
    count: int, diagonal: str, names: dict[int, str], ask: Callable[[int, int], int]
) -> Square:
    def entry(i: int, j: int) -> str:
        if i == j:
            return diagonal
        value = _optional(ask, i, j)
        return names.get(value, "?") if value is not None else "?"

    return tuple(tuple(entry(i, j) for j in range(count)) for i in range(count))


def read_nvml(path: str = LIBRARY) -> NvmlReading:
    """Asks the NVML of ``path`` for its GPUs, their links and what each pair can do.

    Never raises for a library, driver or device that is missing or broken: ``absent`` and
    ``problems`` say so.
    """
    try:
        nvml = _Library(path)
    except OSError as error:
        return NvmlReading(absent=str(error))
    try:
        nvml.call("nvmlInit_v2")
        reading = _read(nvml)
        nvml.call("nvmlShutdown")
    except NvmlError as error:
        return NvmlReading(absent=str(error))
    return reading


def _read(nvml: _Library) -> NvmlReading:
    gpus, handles, problems = [], [], []
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        try:
            gpu, handle = _gpu(nvml, index)
        except NvmlError as error:
            problems.append(f"GPU {index} of the driver: {error}")
        else:
            gpus.append(gpu)
            handles.append(handle)

    def p2p(kind: int) -> Square:
        def ask(i: int, j: int) -> int:
            return nvml.number("nvmlDeviceGetP2PStatus", handles[i], handles[j], ctypes.c_int(kind))

        return _square(len(gpus), "self", P2P_STATES, ask)

    def ancestor(i: int, j: int) -> int:
        return nvml.number("nvmlDeviceGetTopologyCommonAncestor", handles[i], handles[j])

    return NvmlReading(
        driver=nvml.text("nvmlSystemGetDriverVersion"),
        gpus=tuple(gpus),
        labels=_square(len(gpus), "X", TOPOLOGY_LABELS, ancestor),
        p2p_read=p2p(_P2P_READ),
        p2p_write=p2p(_P2P_WRITE),
        problems=tuple(problems),
    )
