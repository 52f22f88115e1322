"""The op namespace ``spec_kernels``: every schema, and the compiled libraries that fill them.

Schemas, fakes and references are Python, so every op exists with no compiled library at all;
``_C_cpu.so`` and ``_C_cuda.so`` add kernels for their dispatch key. Ops write into tensors the
caller owns and return ``()``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

NAMESPACE = "spec_kernels"

SCHEMAS = {
    "tree_build": "(Tensor scores, Tensor candidates, Tensor parent_slots, Tensor root_tokens, "
    "Tensor(a!) tokens, Tensor(b!) parents, Tensor(c!) depths, Tensor(d!) ancestors, "
    "Tensor(e!) first_child, Tensor(f!) next_sibling, Tensor(g!) pool_index, "
    "Tensor(h!) status) -> ()",
    "draft_sample": "(Tensor logits, Tensor? target_ids, Tensor context_lens, int depth, "
    "Tensor? temperature, Tensor? seeds, Tensor(a!) tokens, Tensor(b!) confidence, "
    "Tensor(c!)? probs) -> ()",
    "tree_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, "
    "Tensor context_lens, Tensor ancestors, Tensor? k_scale, Tensor? v_scale, Tensor? sinks, "
    "float scale, float logit_cap, int window, int shard_index, int num_shards, int shard_run, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    "tree_attention_mla": "(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor block_tables, "
    "Tensor context_lens, Tensor ancestors, Tensor? cache_scale, Tensor? sinks, "
    "float scale, float logit_cap, int window, int shard_index, int num_shards, int shard_run, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    "merge_states": "(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "tree_verify": "(Tensor logits, Tensor tokens, Tensor first_child, Tensor next_sibling, "
    "Tensor context_lens, Tensor? temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? seeds, Tensor? logit_bias, Tensor? allowed, Tensor? draft_probs, "
    "float typical_epsilon, float typical_delta, Tensor(a!) accept_index, "
    "Tensor(b!) num_accepted, Tensor(c!) out_tokens, Tensor(d!) status) -> ()",
    "tree_verify_compact": "(Tensor logits, Tensor tokens, Tensor first_child, "
    "Tensor next_sibling, Tensor context_lens, Tensor? temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, Tensor? seeds, Tensor? logit_bias, Tensor? allowed, "
    "Tensor? draft_probs, float typical_epsilon, float typical_delta, Tensor block_tables, "
    "Tensor(a!) accept_index, Tensor(b!) num_accepted, Tensor(c!) out_tokens, "
    "Tensor(d!) status, Tensor(e!)[] caches, Tensor(f!)[] rows) -> ()",
    "tree_verify_choices": "(Tensor tokens, Tensor first_child, Tensor next_sibling, "
    "Tensor slots, Tensor choices, Tensor(a!) predictions, Tensor(b!) accept_index, "
    "Tensor(c!) num_accepted, Tensor(d!) status) -> ()",
    "tree_verify_coins": "(Tensor tokens, Tensor first_child, Tensor next_sibling, "
    "Tensor slots, Tensor target_probs, Tensor? draft_probs, Tensor coins, Tensor final_coins, "
    "float threshold_single, float threshold_acc, Tensor(a!) predictions, "
    "Tensor(b!) accept_index, Tensor(c!) num_accepted, Tensor(d!) status) -> ()",
    "compact": "(Tensor accept_index, Tensor num_accepted, Tensor context_lens, "
    "Tensor block_tables, Tensor(a!)[] caches, Tensor(b!)[] rows) -> ()",
    "hidden_capture": "(Tensor? x, Tensor(a!) residual, Tensor weight, float eps, "
    "Tensor(b!) out, Tensor(c!)? capture, int slot) -> ()",
    "rope_append": "(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor depths, Tensor? slots, "
    "Tensor context_lens, Tensor? cache_lens, Tensor block_tables, Tensor? k_scale, "
    "Tensor? v_scale, bool interleaved, Tensor(a!) q_out, Tensor(b!) k_cache, "
    "Tensor(c!) v_cache) -> ()",
    "rope_append_mla": "(Tensor q_rope, Tensor latent, Tensor k_rope, Tensor? norm_weight, "
    "float eps, Tensor cos_sin, Tensor depths, Tensor? slots, Tensor context_lens, "
    "Tensor? cache_lens, Tensor block_tables, Tensor? cache_scale, bool interleaved, "
    "Tensor(a!) q_out, Tensor(b!) cache) -> ()",
    "pcie_allreduce": "(Tensor input, Tensor(a!) out, Tensor(b!) workspace, int rank, "
    "int world_size, int timeout_ms, int algorithm) -> ()",
    "pcie_allreduce_norm": "(Tensor input, Tensor(a!) residual, Tensor weight, float eps, "
    "Tensor(b!) out, Tensor(c!)? capture, int slot, Tensor(d!) workspace, int rank, "
    "int world_size, int timeout_ms, int algorithm) -> ()",
    "pcie_all_gather": "(Tensor input, Tensor(a!) out, Tensor(b!) workspace, int rank, "
    "int world_size, int timeout_ms) -> ()",
    "pcie_broadcast": "(Tensor(a!) tensor, int src, Tensor(b!) workspace, int rank, "
    "int world_size, int timeout_ms) -> ()",
    "pcie_barrier": "(Tensor(a!) workspace, int rank, int world_size, int timeout_ms) -> ()",
    "moe_experts": "(Tensor x, Tensor router_weight, Tensor? correction_bias, Tensor w_gate_up, "
    "Tensor w_down, Tensor? w_gate_up_scale, Tensor? w_down_scale, Tensor? shared_gate_up, "
    "Tensor? shared_down, int top_k, int n_group, int topk_group, float routed_scaling, "
    "bool normalize, Tensor(a!) out) -> ()",
}


def define_schemas(namespace: str) -> torch.library.Library:
    """Defines every op in ``namespace``, for as long as the caller keeps what is returned."""
    lib = torch.library.Library(namespace, "DEF")
    for name, schema in SCHEMAS.items():
        lib.define(name + schema)
        torch.library.register_fake(f"{namespace}::{name}", _fake(name), lib=lib)
    return lib


def _fake(name: str) -> Callable[..., None]:
    def fake(*args) -> None:
        """Every op only writes into its arguments, so there is nothing to make.

        One meta tensor among real ones leads here, too: their results would never be written.
        """
        given = [t for x in args for t in (x if isinstance(x, list | tuple) else (x,))]
        kinds = {t.device.type for t in given if isinstance(t, torch.Tensor)}
        if "meta" in kinds and len(kinds) > 1:
            expected = "all on meta or none"
            got = ", ".join(sorted(kinds))
            raise ValueError(f"{NAMESPACE}::{name}: tensors: expected {expected}, got {got}")

    return fake


_lib = define_schemas(NAMESPACE)


REFERENCES: dict[str, Callable[..., None]] = {}


def register_reference(name: str, function: Callable[..., None]) -> None:
    """Makes ``function`` what op ``name`` runs wherever no compiled kernel is loaded."""
    # Like the compiled kernels: an output must not hold the graph of what it came from.
    REFERENCES[name] = torch.no_grad()(function)
    _lib.impl(name, REFERENCES[name], "CompositeExplicitAutograd")


@dataclass(frozen=True)
class LibraryState:
    """One compiled library: where it was looked for and why it is not loaded, if it is not."""

    name: str
    path: Path
    loaded: bool
    reason: str


def _load(name: str) -> LibraryState:
    path = Path(__file__).with_name(f"{name}.so")
    if not path.exists():
        return LibraryState(name, path, False, "not built")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return LibraryState(name, path, False, str(error))
    return LibraryState(name, path, True, "loaded")


CPU_ISAS = ("plain", "avx2", "avx512", "avx512_bf16")
_wanted_isa = os.environ.get("SPEC_KERNELS_CPU_ISA")
if _wanted_isa not in (None, "", *CPU_ISAS):
    raise ValueError(
        f"SPEC_KERNELS_CPU_ISA: expected one of {', '.join(CPU_ISAS)}, got {_wanted_isa!r}"
    )

LIBRARIES = {"cpu": _load("_C_cpu"), "cuda": _load("_C_cuda")}


def cpu_isa() -> str:
    """What the CPU kernels use: ``avx512``, ``avx2``, ``plain``; ``none`` if not loaded."""
    return _ask_cpu("spec_kernels_cpu_isa")


def cpu_bf16() -> str:
    """What multiplies bf16 on the CPU: ``amx_bf16``, ``avx512_bf16``, ``fp32``; or ``none``."""
    return _ask_cpu("spec_kernels_cpu_bf16")


def _ask_cpu(question: str) -> str:
    state = LIBRARIES["cpu"]
    if not state.loaded:
        return "none"
    function = getattr(ctypes.CDLL(str(state.path)), question)
    function.restype = ctypes.c_char_p
    return function().decode()


def arguments(name: str) -> list:
    """The arguments of op ``name`` as its schema declares them."""
    return getattr(torch.ops.spec_kernels, name).default._schema.arguments


# Ops whose CUDA tensors the dispatcher gives to the Triton kernel.
_given_to_triton: set[str] = set()


def has_kernel(name: str, device_type: str) -> bool:
    """Whether a compiled kernel of op ``name`` is loaded for ``"cpu"`` or ``"cuda"``."""
    if device_type == "cuda" and name in _given_to_triton:
        return False
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)


def why_no_triton(name: str) -> str | None:
    """Why op ``name`` cannot run on Triton: it has no kernel there, or the package is missing."""
    if importlib.util.find_spec(f"{_folder(name)}.triton") is None:
        return "none for this op"
    return None if importlib.util.find_spec("triton") else "the triton package is not installed"


@functools.cache
def triton_kernel(name: str) -> Callable[..., None]:
    """``<name>_triton`` of the op's folder, imported when it is first asked for."""
    return getattr(importlib.import_module(f"{_folder(name)}.triton"), f"{name}_triton")


def register_triton(name: str) -> None:
    """Lets Triton take CUDA tensors of op ``name`` where no compiled kernel does.

    Only a wrapper is registered: neither Triton nor the kernel is imported before a call.
    """
    if torch.version.cuda is None or why_no_triton(name) or has_kernel(name, "cuda"):
        return
    _given_to_triton.add(name)
    _lib.impl(name, lambda *args: triton_kernel(name)(*args), "CUDA")


def _folder(name: str) -> str:
    return REFERENCES[name].__module__.rpartition(".")[0]
