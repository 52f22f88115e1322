"""What ``spec-kernels decode`` prints: text as it comes, and the table at the end."""

from __future__ import annotations

import os
import sys


class TextStream:
    """Prints text as it comes; on a terminal accepted drafts are green and bonus tokens plain."""

    def __init__(self, tokenizer, out=None):
        self.tokenizer, self.out = tokenizer, out or sys.stdout
        self.colour = self.out.isatty() and "NO_COLOR" not in os.environ
        self._ids: list[int] = []
        self._from = self._shown = 0

    def header(self, comm, job, seconds: float) -> None:
        draft = f"{job.plan.kind} of {job.plan.steps} drafts"
        if job.plan.kind != "chain":
            draft += f", top-{job.plan.topk}, {job.plan.num_nodes} nodes"
        self._write(
            f"{job.tp} rank{'s' * (job.tp > 1)} ({comm.transport}), {job.dtype} on {job.device}, "
            f"{draft}; decoding {seconds:.1f} s after the start of the command\n"
        )
        if self.colour:
            self._write(f"{self._style('accepted drafts', '32')}, bonus tokens\n")

    def prompt(self, prompt, one) -> None:
        self._write(f"\n{self._style(f'== {prompt.name}, {one.name}', '1')}\n")
        tail = prompt.text if len(prompt.text) < 400 else "..." + prompt.text[-397:]
        self._write(self._style(tail, "2"))
        self._ids, self._from, self._shown = list(prompt.ids[-8:]), 0, min(8, len(prompt.ids))

    def tokens(self, tokens: list[int], num_accepted: int) -> None:
        if num_accepted:
            self._feed(tokens[:num_accepted], "32")
        if len(tokens) > num_accepted:
            self._feed(tokens[num_accepted:], None)

    def end(self) -> None:
        self._write("\n")

    def _feed(self, tokens: list[int], style: str | None) -> None:
        """Writes what these tokens add to the text; half a character waits for its other half."""
        self._ids += tokens
        before = self.tokenizer.decode(self._ids[self._from : self._shown])
        after = self.tokenizer.decode(self._ids[self._from :])
        if len(after) > len(before) and not after.endswith("\ufffd"):
            text = after[len(before) :]
            self._write(self._style(text, style) if style else text)
            self._from, self._shown = self._shown, len(self._ids)

    def _style(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def _write(self, text: str) -> None:
        encoding = getattr(self.out, "encoding", None) or "utf-8"
        try:
            self.out.write(text.encode(encoding, "replace").decode(encoding))
            self.out.flush()
        except BrokenPipeError:
            # Nobody reads on; the figures are wanted all the same (--json, the exit code).
            self.out = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _verdict(outcome: bool | None) -> str:
    return {True: "yes", False: "NO", None: "-"}[outcome]


def render(report: dict) -> str:
    """The table at the end of a run."""
    passes = report["passes"]
    width = max(16, *(len(p["name"]) + 2 for p in passes))

    def line(label: str, cell) -> str:
        return f"{label:<26}" + "".join(f"{cell(p):>{width}}" for p in passes)

    def histogram(p: dict) -> str:
        # A cycle counts once for each request in it.
        total = max(1, sum(p["accept_histogram"].values()))
        return " ".join(f"{100 * n / total:.0f}" for n in p["accept_histogram"].values())

    def nodes(p: dict) -> str:
        counts = p["cycles_by_nodes"]
        total = max(1, sum(counts.values()))
        return " ".join(f"{100 * counts.get(n, 0) / total:.0f}" for n in sizes.split(", "))

    sizes = ", ".join(sorted({n for p in passes for n in p["cycles_by_nodes"]}, key=int))
    lengths = ", ".join(passes[0]["accept_histogram"])
    rows = [
        "",
        line("", lambda p: p["name"]),
        line("plain tok/s", lambda p: f"{p['plain_tok_s']:.1f}"),
        line("speculative tok/s", lambda p: f"{p['speculative_tok_s']:.1f}"),
        line("speedup", lambda p: f"{p['speedup']:.2f}x"),
        line("accept length", lambda p: f"{p['accept_length']:.2f}"),
        line("% of cycles by length", histogram) + f"   (lengths {lengths})",
        line("tokens / cycles", lambda p: f"{p['num_tokens']} / {p['num_cycles']}"),
        line("plain step, ms", lambda p: f"{p['plain_step_ms']:.2f}"),
        line("speculative cycle, ms", lambda p: f"{sum(p['phases_ms'].values()):.2f}"),
        *(
            line(f"  {phase}", lambda p, phase=phase: f"{p['phases_ms'][phase]:.3f}")
            for phase in passes[0]["phases_ms"]
        ),
        line("drafts", lambda p: p["drafts"]),
        line("identical to plain", lambda p: _verdict(p["identical"])),
    ]
    if report["repeatable"] is not None:
        rows.append(line("the same again", lambda p: _verdict(p["repeatable"])))
    if report["batch"] > 1:
        rows.append(line("the same alone", lambda p: _verdict(p["alone"])))
    if report["adaptive"]:
        rows.append(line("% of cycles by nodes", nodes) + f"   (nodes {sizes})")
    rows.append("")
    if report["identical"] is not None:
        rows.append(f"identical to plain decoding: {'yes' if report['identical'] else 'no'}")
    if report["repeatable"] is not None:
        verdict = "yes" if report["repeatable"] else "no"
        rows.append(
            "drafts drawn: plain decoding's distribution, not its text; the same text when decoded "
            f"again: {verdict}"
        )
    if not report["ranks_agree"]:
        rows.append("ranks decoded different texts")
    for p in passes:
        for prompt in p["prompts"]:
            d = prompt["first_difference"]
            if d is None:
                continue
            gap = (
                "one text ends there"
                if d["logit_gap"] is None
                else (
                    f"{'speculative before' if p['drafts'] == 'drawn' else 'plain'} chose "
                    f"{d['expected']}, speculative {d['speculative']}, logit gap "
                    f"{d['logit_gap']:.3g}"
                )
            )
            rows.append(
                f"  {prompt['name']}, {p['name']}: differs at new token {d['index']}: {gap}"
            )
    return "\n".join(rows)
