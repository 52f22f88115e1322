"""``spec-kernels info``: versions, libraries, devices, and which kernel each op will run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import spec_kernels
from spec_kernels import _library
from spec_kernels.comm.communicator import shared_memory_reason

# CPU flags that a kernel may be chosen by.
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "amx_bf16",
)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> dict[str, object]:
    name, flags = platform.machine(), set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        name = found[1] if found else name
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
        flags = set(found[1].split()) if found else flags
    return {
        "name": name,
        "cores": os.cpu_count(),
        "features": [flag for flag in CPU_FLAGS if flag in flags],
        "isa": _library.cpu_isa(),
        "bf16": _library.cpu_bf16(),
    }


def _cuda() -> dict[str, object]:
    if not torch.cuda.is_available():
        reason = "no usable device" if torch.version.cuda else "torch was built without CUDA"
        return {"devices": [], "reason": reason}
    devices = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        devices.append(
            {
                "name": p.name,
                "sm": f"{p.major}{p.minor}",
                "memory_gb": round(p.total_memory / 1e9, 1),
            }
        )
    return {"devices": devices, "reason": ""}


def _host_state() -> str:
    """``loaded``, ``not built``, or why the import failed."""
    if importlib.util.find_spec("spec_kernels._host") is None:
        return "not built"
    try:
        importlib.import_module("spec_kernels._host")
    except ImportError as error:
        return str(error)
    return "loaded"


def _transports() -> dict[str, str]:
    """How ranks can meet here: shared memory on one machine, else what torch brings."""
    distributed = torch.distributed
    in_torch = {
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
    }
    return {"shared memory": shared_memory_reason() or "available"} | {
        name: "available" if there else "absent from this torch" for name, there in in_torch.items()
    }


def _op_backends(name: str) -> dict[str, object]:
    """Which implementations op ``name`` has, and which one each device's tensors are given."""
    has_reference = name in _library.REFERENCES
    row: dict[str, object] = {
        "reference": has_reference,
        "cpu": _library.has_kernel(name, "cpu"),
        "cuda": _library.has_kernel(name, "cuda"),
        "triton": has_reference and _library.why_no_triton(name) is None,
    }
    for device, order in {"cpu": ("cpu",), "cuda": ("cuda", "triton")}.items():
        order += ("reference",)
        row[f"{device}_tensors"] = next((b for b in order if row[b]), "nothing")
    return row


def collect() -> dict[str, object]:
    """Everything that ``spec-kernels info`` prints, as plain data."""
    host = _host_state()
    return {
        "versions": {
            "spec-kernels": spec_kernels.__version__,
            "torch": torch.__version__,
            "cuda of torch": torch.version.cuda,
            "triton": _installed("triton"),
            "numpy": _installed("numpy"),
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "package": str(Path(spec_kernels.__file__).parent),
        "libraries": {state.name: state.reason for state in _library.LIBRARIES.values()}
        | {"_host": host},
        "cpu": _cpu(),
        "cuda": _cuda(),
        "transports": _transports(),
        "ops": {name: _op_backends(name) for name in _library.SCHEMAS},
    }


def _section(title: str, pairs: dict[str, object]) -> list[str]:
    width = max(len(key) for key in pairs)
    return [title, *(f"  {key:<{width}}  {value}" for key, value in pairs.items()), ""]


def render(facts: dict) -> str:
    """The text form of ``collect()``."""
    cpu, cuda = facts["cpu"], facts["cuda"]
    isa = f"kernels use {cpu['isa']}, and {cpu['bf16']} to multiply bf16"
    if cpu["isa"] == "none":
        isa = "no compiled kernels are loaded"
    lines = _section(
        "versions",
        {k: v or "absent" for k, v in facts["versions"].items()} | {"package": facts["package"]},
    )
    lines += _section("libraries", facts["libraries"])
    lines += _section(
        "devices",
        {
            "cpu": f"{cpu['name']}, {cpu['cores']} cores",
            "": f"{' '.join(cpu['features']) or 'no known features'}: {isa}",
        }
        | {
            f"cuda:{i}": f"{d['name']}, sm_{d['sm']}, {d['memory_gb']} GB"
            for i, d in enumerate(cuda["devices"])
        }
        | ({} if cuda["devices"] else {"cuda": f"none ({cuda['reason']})"}),
    )
    lines += _section("transports between ranks", facts["transports"])
    width = max(len(name) for name in facts["ops"])
    backends = ("reference", "cpu", "cuda", "triton")
    lines.append(f"{'ops':<{width + 2}}  {'  '.join(backends)}  cpu tensors use  cuda tensors use")
    for name, row in facts["ops"].items():
        have = "  ".join(f"{'yes' if row[b] else '-':<{len(b)}}" for b in backends)
        lines.append(f"  {name:<{width}}  {have}  {row['cpu_tensors']:<15}  {row['cuda_tensors']}")
    return "\n".join(lines)


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "info", help="versions, libraries, devices, and which kernel each op will run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=main)


def main(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=1) if args.json else render(facts))
    return 0
