"""NVML through ctypes: a stand-in library whose devices a text file describes."""

import pytest

from spec_kernels.comm.nvml import read_nvml
from spec_kernels.comm.visible import visible_devices

TWO = (
    "gpu GPU-aaaa0000-1111 00000000:3B:00.0 1 16 5 16 5 8 0 NVIDIA RTX PRO 6000",
    "gpu GPU-aaaa0001-1111 00010000:B1:00.0 5 8 5 16 6 0 0 NVIDIA RTX PRO 6000",
)


def test_devices_links_and_pairs(library, describe):
    describe(*TWO, "label 0 1 20", "label 1 0 20", "p2p 0 0 1 1", "p2p 1 1 0 4")
    seen = read_nvml(library)
    assert (seen.absent, seen.problems, seen.driver) == ("", (), "580.82.07")
    first, second = seen.gpus
    assert (first.index, first.uuid, first.pci) == (0, "GPU-aaaa0000-1111", "0000:3b:00.0")
    assert second.pci == "10000:b1:00.0"
    assert first.name == "NVIDIA RTX PRO 6000"
    assert (second.gen, second.width, second.max_gen, second.gpu_max_gen) == (5, 8, 5, 6)
    assert (first.performance_state, first.mig) == (8, False)
    assert seen.labels == (("X", "PXB"), ("PXB", "X"))
    assert seen.p2p_read == (("self", "chipset not supported"), ("ok", "self"))
    assert seen.p2p_write == (("self", "ok"), ("disabled by a driver setting", "self"))


def test_every_level_and_state(library, describe):
    for level, label in (
        (0, "PIX"),
        (10, "PIX"),
        (30, "PHB"),
        (40, "NODE"),
        (50, "SYS"),
        (77, "?"),
    ):
        describe(*TWO, f"label 0 1 {level}", "p2p 0 0 1 6")
        seen = read_nvml(library)
        assert seen.labels[0][1] == label and seen.labels[1][0] == "?"
        assert seen.p2p_read[0][1] == "?"


def test_no_devices(library, describe):
    describe()
    seen = read_nvml(library)
    assert (seen.absent, seen.gpus, seen.labels) == ("", (), ())


def test_mig_and_unknown_performance_state(library, describe):
    describe(TWO[0].replace(" 8 0 ", " 32 1 "))
    (gpu,) = read_nvml(library).gpus
    assert gpu.mig is True and gpu.performance_state is None


def test_no_library_says_why(tmp_path):
    assert "cannot open" in read_nvml("libno-such-nvml.so.1").absent
    (tmp_path / "text.so").write_text("not a library")
    assert read_nvml(str(tmp_path / "text.so")).absent


def test_a_library_without_nvml_says_so(tmp_path, build_nvml):
    source = tmp_path / "empty.cpp"
    source.write_text("int nothing;")
    assert "nvmlInit_v2" in read_nvml(build_nvml(source=source)).absent


def test_driver_not_loaded(library, describe):
    describe("fail nvmlInit_v2 9")
    assert read_nvml(library).absent == "nvmlInit_v2: Driver Not Loaded"


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"])
def test_a_failing_driver_is_absent(library, describe, call):
    describe(*TWO, f"fail {call} 999")
    assert read_nvml(library).absent == f"{call}: Unknown Error"


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3"]
)
def test_a_lost_device_is_named_and_the_others_stay(library, describe, call):
    describe(*TWO, f"fail {call} 15 0", "label 1 1 10")
    seen = read_nvml(library)
    assert [gpu.index for gpu in seen.gpus] == [1] and seen.labels == (("X",),)
    assert seen.problems == (f"GPU 0 of the driver: {call}: GPU is lost",)


@pytest.mark.parametrize("bus_id", ["", "rubbish", "00000000:3B:00.0junk", "-"])
def test_a_device_without_an_address_is_a_problem(library, describe, bus_id):
    describe(f"gpu GPU-aaaa0000 {bus_id or 'x'} 1 16 5 16 5 8 0 name")
    seen = read_nvml(library)
    assert seen.gpus == () and "no PCI address" in seen.problems[0]


def test_what_a_device_does_not_tell_is_none(library, describe):
    quiet = [
        "CurrPcieLinkGeneration",
        "CurrPcieLinkWidth",
        "MaxPcieLinkGeneration",
        "MaxPcieLinkWidth",
        "GpuMaxPcieLinkGeneration",
        "PerformanceState",
        "MigMode",
    ]
    describe(*TWO, *(f"fail nvmlDeviceGet{name} 3" for name in quiet))
    gpu = read_nvml(library).gpus[0]
    assert (gpu.gen, gpu.width, gpu.max_gen, gpu.max_width, gpu.gpu_max_gen) == (None,) * 5
    assert (gpu.performance_state, gpu.mig) == (None, None)


def test_a_link_of_zero_is_none(library, describe):
    describe(TWO[0].replace(" 1 16 5 16 5 ", " 0 0 0 0 0 "))
    gpu = read_nvml(library).gpus[0]
    assert (gpu.gen, gpu.width, gpu.max_gen, gpu.max_width) == (None,) * 4


def test_an_old_library_lacks_functions(build_nvml, describe):
    describe(*TWO)
    gpu = read_nvml(build_nvml("OLD_NVML")).gpus[0]
    assert gpu.gpu_max_gen is None and gpu.mig is None and gpu.max_gen == 5


def test_names_are_printable(library, describe):
    describe("gpu GPU-\x1b[31m 00000000:3B:00.0 1 16 5 16 5 8 0 \x07RTX\x9b 6000\x1b[0m")
    gpu = read_nvml(library).gpus[0]
    assert gpu.uuid.isprintable() and gpu.name.isprintable()


# CUDA_VISIBLE_DEVICES


def test_visible_devices(library, describe):
    describe(*TWO, TWO[0].replace("aaaa0000", "bbbb0000").replace("3B", "5E"))
    gpus = read_nvml(library).gpus
    for text, wanted in (
        (None, (0, 1, 2)),
        ("", ()),
        (" ", ()),
        ("1", (1,)),
        ("2,0", (2, 0)),
        (" 2 , 0 ", (2, 0)),
        ("0,2,-1,1", (0, 2)),
        ("0,7,1", (0,)),
        ("-1", ()),
        ("GPU-bbbb", (2,)),
        ("gpu-AAAA0001-1111,GPU-aaaa0000", (1, 0)),
        ("0000:3b:00.0", (0,)),
        ("3B:00.0,10000:b1:00.0", (0, 1)),
        ("00000000:5E:00.0", (2,)),
    ):
        assert visible_devices(text, gpus) == wanted, text


@pytest.mark.parametrize(
    "text, message",
    [
        ("MIG-0a1b2c3d", "'MIG-0a1b2c3d': MIG devices cannot reach"),
        ("mig-gpu-aaaa/1/0", "MIG devices"),
        ("GPU-aaaa", "2 of the 3 GPUs have this name"),
        ("GPU-cccc", "none of the 3 GPUs has this name"),
        ("0000:99:00.0", "none of the 3"),
        ("0,0", "'0': this GPU is named twice"),
        ("0,GPU-aaaa0000", "named twice"),
        ("0,,1", "expected a number, a UUID"),
        ("first", "expected a number, a UUID"),
        ("0x1", "expected a number"),
        ("²", "expected a number"),
    ],
)
def test_what_visible_devices_refuses(library, describe, text, message):
    describe(*TWO, TWO[0].replace("aaaa0000", "bbbb0000").replace("3B", "5E"))
    with pytest.raises(ValueError, match=message):
        visible_devices(text, read_nvml(library).gpus)
