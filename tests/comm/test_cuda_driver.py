"""The driver through ctypes: every call checked, devices by names that nothing renumbers."""

import os
import re
from pathlib import Path

import pytest
from cuda_on_host import fake_driver, host_build

from spec_kernels.comm.cuda_driver import _CALLS, CudaDriverError, Driver, normal_pci_id

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no fake driver: {host_build.missing()}"
)
OUT_OF_MEMORY, NOT_INITIALIZED, NO_DEVICE = 2, 3, 100


@pytest.fixture
def fake(tmp_path):
    return fake_driver.load(tmp_path)


def in_child(function):
    """What ``function`` raised in a forked child, as text; empty if nothing."""
    read, write = os.pipe()
    if os.fork() == 0:
        text = ""
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.wait()
    return text


def test_devices_have_names_that_nothing_renumbers(fake):
    fake.devices(4, rotate=1)
    driver = fake.driver()
    assert driver.version == 13000 and [d.ordinal for d in driver.devices] == [0, 1, 2, 3]
    first, last = driver.devices[0], driver.devices[3]
    assert first.uuid == "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    assert (first.pci, first.sm, last.pci) == ("0000:c2:00.0", 120, "0000:c1:00.0")
    for name in (3, "cuda:3", last.uuid, last.uuid[:10].upper(), "00000000:C1:00.0", "C1:00.0"):
        assert driver.find(name) == last


@pytest.mark.parametrize("name", [4, -1, "cuda:9", "GPU-", "GPU-77", "0000:ff:00.0", "gpu", ""])
def test_case_39_names_of_no_device_or_several(fake, name):
    fake.devices(2, 0)
    with pytest.raises(ValueError, match="one visible device") as caught:
        fake.driver().find(name)
    assert "0000:c2:00.0" in str(caught.value)


def test_pci_ids_are_written_one_way():
    for text in ("0000:C1:00.0", "00000000:c1:00.0", "c1:00.0", " 0000:c1:00.0 "):
        assert normal_pci_id(text) == "0000:c1:00.0"
    assert normal_pci_id("10002:0f:1f.7".upper()) == "10002:0f:1f.7"
    for text in ("", "c1", "0000:c1:00.8", "0000:xx:00.0", "1:2:3:4.0"):
        with pytest.raises(ValueError, match="PCI id"):
            normal_pci_id(text)


def test_memory_is_filled_copied_and_given_back(fake):
    with fake.driver().open(1) as device:
        address = device.allocate(5000)
        device.fill(address, 0xFF, 5000)
        device.write(address + 10, b"hello")
        device.synchronize()
        assert device.read(address + 8, 8) == b"\xff\xffhello\xff"
        host, mapped = device.allocate_host(64)
        assert host and mapped
        device.free_host(host)
        device.free(address)
        with pytest.raises(CudaDriverError, match=r"cuMemFree_v2\(cuda:1 .*INVALID_VALUE"):
            device.free(address)
    assert fake.held() == 0
    device.close()
    with pytest.raises(CudaDriverError, match="was closed"):
        device.allocate(1)


def test_another_process_opens_what_was_exported(fake, tmp_path):
    def exporter(read, write):
        device = fake.driver().open(0)
        address = device.allocate(8192)
        device.fill(address, 7, 8192)
        os.write(write[1], device.export(address))
        os.read(read[0], 1)
        assert device.read(address + 8190, 2) == b"ok"
        device.free(address)
        assert fake.violations() == 0

    there, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            exporter(back, there)
            code = 0
        finally:
            os._exit(code)
    handle = os.read(there[0], 64)
    with fake.driver().open(3) as device:
        address = device.open_memory(handle)
        assert device.open_memory(handle) == address
        assert device.read(address, 3) == b"\7\7\7"
        device.write(address + 8190, b"ok")
        device.close_memory(address)
        device.close_memory(address)
        with pytest.raises(CudaDriverError, match="cuIpcCloseMemHandle"):
            device.close_memory(address)
        with pytest.raises(CudaDriverError, match="cuIpcOpenMemHandle_v2.*INVALID_HANDLE"):
            device.open_memory(bytes(64))
    os.write(back[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0 and fake.held() == 0


def test_the_fake_keeps_the_rules_of_ipc(fake):
    """Nobody opens his own memory, and importers close before the owner frees."""
    there, back = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        device = fake.driver().open(0)
        address = device.allocate(4096)
        handle = device.export(address)
        try:
            device.open_memory(handle)
        except CudaDriverError as error:
            os.write(there[1], handle + str(error).encode())
        os.read(back[0], 1)
        device.free(address)
        os._exit(fake.violations())
    told = os.read(there[0], 500)
    assert b"cuIpcOpenMemHandle_v2" in told and b"CUDA_ERROR_INVALID_CONTEXT" in told
    with fake.driver().open(0) as device:
        address = device.open_memory(told[:64])
        os.write(back[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert device.read(address, 2) == b"\xee\xee"


def test_a_fork_after_use_is_explained(fake):
    fake.driver()
    assert "cuInit: CUDA_ERROR_NOT_INITIALIZED" in in_child(fake.driver)
    assert "forked after its parent had used CUDA?" in in_child(fake.driver)


def test_every_status_is_checked(fake):
    driver = fake.driver()
    fake.fail("cuMemAlloc_v2", OUT_OF_MEMORY, after=1)
    device = driver.open(2)
    device.allocate(64)
    with pytest.raises(CudaDriverError) as caught:
        device.allocate(1 << 20)
    assert (caught.value.call, caught.value.status) == ("cuMemAlloc_v2", OUT_OF_MEMORY)
    assert str(caught.value) == (
        f"cuMemAlloc_v2(1048576 bytes on {device.name}): CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    )
    fake.fail("cuCtxSynchronize", 12345)
    with pytest.raises(CudaDriverError, match="status 12345: status 12345"):
        device.synchronize()
    fake.fail("cuMemHostGetDevicePointer_v2", 1)
    held = fake.held()
    with pytest.raises(CudaDriverError, match="cuMemHostGetDevicePointer_v2"):
        device.allocate_host(64)
    assert fake.held() == held
    other = driver.open(0)
    device.enable_peer_access(other)
    device.enable_peer_access(other)


def test_the_drivers_word_on_peers(fake):
    fake.devices(3)
    fake.link(0, 1, fake_driver.REFUSED)
    driver = fake.driver()
    zero, one, two = driver.devices
    assert not driver.can_access_peer(zero, one) and driver.can_access_peer(one, zero)
    assert driver.can_access_peer(zero, two)
    with pytest.raises(CudaDriverError, match="PEER_ACCESS_UNSUPPORTED"):
        driver.open(0).enable_peer_access(driver.open(1))


def test_no_driver_no_device_and_an_old_driver(fake, tmp_path):
    with pytest.raises(CudaDriverError, match="no CUDA driver: .*nowhere.so"):
        Driver(str(tmp_path / "nowhere.so"))
    fake.devices(0)
    with pytest.raises(CudaDriverError, match="cuInit: CUDA_ERROR_NO_DEVICE"):
        fake.driver()
    with pytest.raises(CudaDriverError, match="libc.so.6 is too old: it has no cuInit"):
        Driver("libc.so.6")


def header():
    found = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    return found[-1] if found else None


@pytest.mark.skipif(header() is None, reason="no CUDA toolkit with cuda.h")
def test_the_symbols_are_those_of_cuda_h():
    """Which declares ``cuX`` and says by a macro what the library calls it."""
    text = header().read_text(errors="replace")
    renamed = dict(re.findall(r"#define (cu\w+)\s+(?:__CUDA_API_PT[DS][SZ]\()?(cu\w+)\)?\n", text))
    for name in _CALLS:
        base = re.sub(r"_v\d$", "", name)
        assert re.search(rf"\bCUDAAPI {base}\(", text), name
        assert renamed.get(base, base) == name
