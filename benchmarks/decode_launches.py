"""Where the launches of a cycle go: dispatcher calls that run a kernel, by phase and layer.

    python benchmarks/decode_launches.py [--json FILE]

Counted by ``spec_kernels.testing.graph_safe`` on the bundled model, every kind of draft and plain
decoding. A call is a lower bound on a GPU's kernels: some of torch's ops launch several, and an
attention call is two or three (docs/kernels.md). The cycle is checked to be fit for capture first.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from bundled import held_out

from spec_kernels.comm import Communicator
from spec_kernels.comm.launch import launch
from spec_kernels.decode.batch import Batch, Request
from spec_kernels.decode.drafting import DraftPlan
from spec_kernels.decode.sampling import SamplingParams
from spec_kernels.models.layers import MoE
from spec_kernels.models.pair import load_pair
from spec_kernels.testing import graph_safe
from spec_kernels.testing.timing import write_json

KINDS = {
    "plain": None,
    "chain of 3": DraftPlan("chain", 3),
    "chain of 3, drawn": DraftPlan("chain", 3, sampled=True),
    "static, 16 nodes": DraftPlan("static", 4, 4, 16),
    "dynamic, 16 nodes": DraftPlan("dynamic", 4, 4, 16),
}
PARTS = {
    "draft": ("StaticDraft.draft", "DynamicDraft.draft"),
    "build": ("StaticDraft.build", "DynamicDraft.build"),
    "target forward": ("Target.forward",),
    "extend": ("Cycle._extend",),
    "advance": ("BatchState.advance",),
}


@dataclasses.dataclass(frozen=True)
class Count:
    """Launches of one cycle: in all, by part (the rest is the walk with its compaction), and of one
    MoE layer: norms, attention, experts."""

    total: int
    parts: dict[str, int]
    norms: int
    attention: int
    experts: int

    @property
    def layer(self) -> int:
        return self.norms + self.attention + self.experts


def count(comm, kind: str) -> Count:
    plan = KINDS[kind]
    torch.set_num_threads(1)
    with torch.inference_mode():
        target, drafter = load_pair(comm=comm)
        batch = Batch(target, drafter, plan, max_tokens=400, max_requests=2)
        sampling = SamplingParams(0.8, seed=1) if plan and plan.sampled else SamplingParams()
        for prompt in held_out(2):
            batch.join(Request(prompt, 200, sampling, speculative=plan is not None))
        batch.step()
        cycle = batch.cycle(2, plan is not None, bool(plan and plan.sampled))
        buffers = (batch.state.tensors(), batch.cache.target, batch.cache.draft)
        report = graph_safe.check(cycle.run, buffers, num_runs=2)
    num_layers = len(target.layers)
    num_moe = sum(isinstance(layer.mlp, MoE) for layer in target.layers)
    parts = {part: sum(len(report.within(name)) for name in names) for part, names in PARTS.items()}
    # The norm before the first layer and the one after the last make one layer's two and one more.
    return Count(
        len(report.launches),
        parts,
        (len(report.within("Target._add_norm")) - 1) // num_layers,
        len(report.within("MLA.forward")) // num_layers,
        len(report.within("MoE.forward")) // num_moe,
    )


def table(num_ranks: int, counts: dict[str, Count]) -> str:
    columns = (*PARTS, "walk, compaction")
    lines = [
        f"{num_ranks} rank{'s' * (num_ranks > 1)}",
        f"{'':20}{'cycle':>7}" + "".join(f"{c:>18}" for c in columns) + "   MoE layer",
    ]
    for kind, c in counts.items():
        rest = c.total - sum(c.parts.values())
        cells = "".join(f"{n:>18}" for n in (*c.parts.values(), rest))
        layer = f"{c.layer} = {c.attention} attention + {c.norms} norms + {c.experts} experts"
        lines.append(f"{kind:20}{c.total:>7}{cells}   {layer}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for num_ranks in (1, 2):
        counts = {}
        for kind in KINDS:
            if num_ranks == 1:
                counts[kind] = count(Communicator.single(), kind)
            else:
                counts[kind] = launch(count, num_ranks, kind)[0]
            row = dataclasses.asdict(counts[kind]) | {"layer": counts[kind].layer}
            rows.append({"ranks": num_ranks, "kind": kind, **row})
        print(table(num_ranks, counts), "\n", flush=True)
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
