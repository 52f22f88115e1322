"""The little of the CUDA driver that a communicator needs, through ctypes: no torch, no toolkit.

Slabs must be allocations of their own: a framework's allocator may hand out memory that cannot be
exported (expandable segments). Devices are named by UUID or PCI id, which no setting renumbers.

Every status is checked; an error says which call failed, on what, and the driver's name for it.
Each call makes its device's primary context current (the one that the CUDA runtime and torch use)
and restores what was current before.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spec_kernels.comm.sysfs import normal_address

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that opening takes
_HOST_FLAGS = 1 | 2  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NOT_INITIALIZED, _ALREADY_ENABLED = 3, 704

_int, _unsigned, _size = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t
_address, _context = ctypes.c_uint64, ctypes.c_void_p


class _Handle(ctypes.Structure):  # CUipcMemHandle, passed by value
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


def _out(kind):
    return ctypes.POINTER(kind)


# Symbols as the library exports them: cuda.h renames some calls to a later version of them.
_CALLS = {
    "cuInit": [_unsigned],
    "cuDriverGetVersion": [_out(_int)],
    "cuGetErrorName": [_int, _out(ctypes.c_char_p)],
    "cuGetErrorString": [_int, _out(ctypes.c_char_p)],
    "cuDeviceGetCount": [_out(_int)],
    "cuDeviceGet": [_out(_int), _int],
    "cuDeviceGetName": [ctypes.c_char_p, _int, _int],
    "cuDeviceGetUuid_v2": [_out(_Uuid), _int],
    "cuDeviceGetPCIBusId": [ctypes.c_char_p, _int, _int],
    "cuDeviceGetAttribute": [_out(_int), _int, _int],
    "cuDeviceCanAccessPeer": [_out(_int), _int, _int],
    "cuDevicePrimaryCtxRetain": [_out(_context), _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxPushCurrent_v2": [_context],
    "cuCtxPopCurrent_v2": [_out(_context)],
    "cuCtxEnablePeerAccess": [_context, _unsigned],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [_out(_address), _size],
    "cuMemFree_v2": [_address],
    "cuMemsetD8_v2": [_address, ctypes.c_ubyte, _size],
    "cuMemsetD32Async": [_address, _unsigned, _size, ctypes.c_void_p],
    "cuStreamCreate": [_out(ctypes.c_void_p), _unsigned],
    "cuStreamSynchronize": [ctypes.c_void_p],
    "cuStreamDestroy_v2": [ctypes.c_void_p],
    "cuMemcpyHtoD_v2": [_address, ctypes.c_void_p, _size],
    "cuMemcpyDtoH_v2": [ctypes.c_void_p, _address, _size],
    "cuIpcGetMemHandle": [_out(_Handle), _address],
    "cuIpcOpenMemHandle_v2": [_out(_address), _Handle, _unsigned],
    "cuIpcCloseMemHandle": [_address],
    "cuMemHostAlloc": [_out(ctypes.c_void_p), _size, _unsigned],
    "cuMemHostGetDevicePointer_v2": [_out(_address), ctypes.c_void_p, _unsigned],
    "cuMemFreeHost": [ctypes.c_void_p],
}


class CudaDriverError(RuntimeError):
    """A call of the driver that failed: ``call``, and ``status`` (None: there is no driver)."""

    def __init__(self, message: str, call: str | None = None, status: int | None = None):
        super().__init__(message)
        self.call, self.status = call, status


def normal_pci_id(text: str) -> str:
    """``domain:bus:device.function`` as Linux writes it; domain 0 where there is none.

    Takes what the driver (``0000:C1:00.0``), NVML (``00000000:C1:00.0``) and lspci (``c1:00.0``)
    write. ValueError for anything else.
    """
    address = normal_address(text) or normal_address(f"0000:{text.strip()}")
    if address is None:
        raise ValueError(f"PCI id: expected domain:bus:device.function, got {text!r}")
    return address


@dataclass(frozen=True)
class DeviceName:
    """A device as this process sees it. ``ordinal`` counts the visible ones, as ``cuda:N`` does."""

    ordinal: int
    name: str
    uuid: str  # "GPU-…", as nvidia-smi and CUDA_VISIBLE_DEVICES write it
    pci: str  # see normal_pci_id
    sm: int  # compute capability, 120 for 12.0

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.uuid}, {self.pci})"


class Driver:
    """The loaded and initialised driver.

    A process that was forked from one that had initialised the driver cannot use it (a rule of
    CUDA); fork ranks before any of them, or their parent, touches a device.

    Raises:
        CudaDriverError: no library, an older one that lacks a call, or no device it can drive.
    """

    def __init__(self, path: str = LIBRARY):
        self.path = path
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaDriverError(f"no CUDA driver: {error}") from None
        self._functions = {}
        for name, arguments in _CALLS.items():
            try:
                function = getattr(self._library, name)
            except AttributeError:
                raise CudaDriverError(f"{path} is too old: it has no {name}", name) from None
            function.argtypes, function.restype = arguments, _int
            self._functions[name] = function
        self.call("cuInit", 0)
        self.version = self._ask("cuDriverGetVersion", _int)  # 13000 for 13.0
        self.devices = [self._describe(i) for i in range(self._ask("cuDeviceGetCount", _int))]

    def call(self, name: str, *arguments, about: str = "") -> None:
        """Calls ``name``; raises unless it succeeds. ``about`` says on what, for the message."""
        status = self._functions[name](*arguments)
        if status != 0:
            raise CudaDriverError(self._describe_error(name, status, about), name, status)

    def find(self, device) -> DeviceName:
        """The device that ``device`` names: an ordinal, ``cuda:N``, a UUID, a PCI id, a DeviceName.

        A UUID may be shortened while it names one device, as in CUDA_VISIBLE_DEVICES. ValueError
        when it names none of the visible devices, or several.
        """
        seen = ", ".join(map(str, self.devices)) or "none"
        if isinstance(device, int):
            found = [d for d in self.devices if d.ordinal == device]
        else:
            text = device.uuid if isinstance(device, DeviceName) else str(device)
            if re.fullmatch(r"cuda:\d+", text):
                found = [d for d in self.devices if d.ordinal == int(text[5:])]
            elif text.lower().startswith("gpu-"):
                found = [d for d in self.devices if d.uuid.lower().startswith(text.lower())]
            else:
                try:
                    pci = normal_pci_id(text)
                except ValueError:
                    pci = None
                found = [d for d in self.devices if d.pci == pci]
        if len(found) != 1:
            raise ValueError(
                "device: expected an ordinal, cuda:N, UUID or PCI id of one visible device, got "
                f"{device!r} (visible: {seen})"
            )
        return found[0]

    def can_access_peer(self, device: DeviceName, peer: DeviceName) -> bool:
        """Whether the driver says that ``device`` reaches memory of ``peer``; see ``comm.p2p``."""
        can = _int()
        about = f"{device} to {peer}"
        self.call(
            "cuDeviceCanAccessPeer", ctypes.byref(can), device.ordinal, peer.ordinal, about=about
        )
        return bool(can.value)

    def open(self, device) -> Device:
        """``device`` (see ``find``) ready for use; close it."""
        return Device(self, self.find(device))

    def _ask(self, name: str, kind, *arguments, about: str = ""):
        value = kind()
        self.call(name, ctypes.byref(value), *arguments, about=about)
        return value.value

    def _describe(self, ordinal: int) -> DeviceName:
        about = f"cuda:{ordinal}"
        device = self._ask("cuDeviceGet", _int, ordinal, about=about)
        name, pci, identity = (
            ctypes.create_string_buffer(256),
            ctypes.create_string_buffer(32),
            _Uuid(),
        )
        self.call("cuDeviceGetName", name, len(name), device, about=about)
        self.call("cuDeviceGetPCIBusId", pci, len(pci), device, about=about)
        self.call("cuDeviceGetUuid_v2", ctypes.byref(identity), device, about=about)
        major, minor = (
            self._ask("cuDeviceGetAttribute", _int, attribute, device, about=about)
            for attribute in _COMPUTE_CAPABILITY
        )
        return DeviceName(
            ordinal,
            name.value.decode(),
            f"GPU-{uuid.UUID(bytes=bytes(identity.bytes))}",
            normal_pci_id(pci.value.decode()),
            10 * major + minor,
        )

    def _describe_error(self, name: str, status: int, about: str) -> str:
        texts = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            known = self._functions[function](status, ctypes.byref(text)) == 0 and text.value
            texts.append(text.value.decode() if known else f"status {status}")
        what = f"{name}({about})" if about else name
        hint = ""
        if name == "cuInit" and status == _NOT_INITIALIZED:
            hint = " (was this process forked after its parent had used CUDA?)"
        return f"{what}: {texts[0]}: {texts[1]}{hint}"


class Device:
    """A device with its primary context held. Addresses are plain integers.

    A context manager; closing releases the context, and memory that was not freed stays with it.
    """

    def __init__(self, driver: Driver, name: DeviceName):
        self.driver, self.name = driver, name
        self._context = _context(
            driver._ask("cuDevicePrimaryCtxRetain", _context, name.ordinal, about=str(name))
        )

    def allocate(self, num_bytes: int) -> int:
        """Memory of this device alone, not cleared."""
        return self._ask("cuMemAlloc_v2", _address, num_bytes, about=f"{num_bytes} bytes")

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        """Sets every byte; ``synchronize`` says when it is done."""
        self._call("cuMemsetD8_v2", address, byte, num_bytes, about=f"{num_bytes} bytes")

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", address, data, len(data), about=f"{len(data)} bytes")

    def read(self, address: int, num_bytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH_v2", buffer, address, num_bytes, about=f"{num_bytes} bytes")
        return buffer.raw

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def store_words(self, words: Mapping[int, int]) -> None:
        """Sets 32-bit words by address, past whatever runs on this device or waits to run."""
        stream = self._ask("cuStreamCreate", ctypes.c_void_p, _NON_BLOCKING)
        try:
            for address, word in words.items():
                self._call("cuMemsetD32Async", address, word, 1, stream)
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy_v2", stream)

    def export(self, address: int) -> bytes:
        """A handle through which other processes open the allocation that starts at ``address``."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_memory(self, handle: bytes) -> int:
        """Maps another process's exported memory; ``close_memory`` it before its owner frees it."""
        address = _address()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            _LAZY_PEER_ACCESS,
        )
        return address.value

    def close_memory(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def enable_peer_access(self, peer: Device) -> None:
        """Lets kernels here use memory of ``peer``, in this process; more than once is fine."""
        try:
            self._call("cuCtxEnablePeerAccess", peer._context, 0, about=f"to {peer.name}")
        except CudaDriverError as error:
            if error.status != _ALREADY_ENABLED:
                raise

    def allocate_host(self, num_bytes: int) -> tuple[int, int]:
        """Host memory that the device can use: (the host's address, the device's)."""
        host = self._ask("cuMemHostAlloc", ctypes.c_void_p, num_bytes, _HOST_FLAGS,
                         about=f"{num_bytes} bytes")  # fmt: skip
        try:
            return host, self._ask("cuMemHostGetDevicePointer_v2", _address, host, 0)
        except CudaDriverError:
            self.free_host(host)
            raise

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def close(self) -> None:
        """Releases the context. May be called twice."""
        if self._context is not None:
            self._context = None
            about = str(self.name)
            self.driver.call("cuDevicePrimaryCtxRelease_v2", self.name.ordinal, about=about)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        if self._context is None:
            raise CudaDriverError(f"{self.name} was closed")
        self.driver.call("cuCtxPushCurrent_v2", self._context, about=str(self.name))
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(_context()), about=str(self.name))

    def _call(self, name: str, *arguments, about: str = "") -> None:
        where = f"{about} on {self.name}" if about else str(self.name)
        with self._current():
            self.driver.call(name, *arguments, about=where)

    def _ask(self, name: str, kind, *arguments, about: str = ""):
        value = kind()
        self._call(name, ctypes.byref(value), *arguments, about=about)
        return value.value
