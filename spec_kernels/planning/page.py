"""The answer of ``spec-kernels viability`` as one page: text, tables and plots, no network."""

from __future__ import annotations

import html
from pathlib import Path

from spec_kernels.planning import plots, report
from spec_kernels.planning.answer import Answer

_TITLE = "Is speculative decoding worth it?"
_STYLE = """
:root { color-scheme: light; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif;
  color: #1a1a1a; background: #fff; }
pre { font: 13px/1.45 ui-monospace, monospace; overflow-x: auto; background: #f6f6f6;
  padding: 1rem; border-radius: 4px; }
figure { margin: 1.5rem 0; }
svg { max-width: 100%; height: auto; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
"""


def render(answer: Answer) -> str:
    """The page's HTML: the answer in words, each plot as inline SVG, then tables and assumptions.

    ValueError where matplotlib is not installed.
    """
    words, _, tables = report.render(answer).partition("\n\n")
    figures = [f"<figure>{svg}</figure>" for svg in plots.svg_pictures(answer)]
    pair, rest = figures[:2], figures[2:]
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_TITLE}</title>",
        f"<style>{_STYLE}</style></head>",
        "<body>",
        f"<h1>{_TITLE}</h1>",
        f"<pre>{html.escape(words, quote=False)}</pre>",
        f'<div class="pair">{"".join(pair)}</div>',
        *rest,
        f"<pre>{html.escape(tables, quote=False)}</pre>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def write(answer: Answer, path: str | Path) -> None:
    """Writes the page. ValueError as from ``render``; OSError if the file cannot be written."""
    Path(path).write_text(render(answer), encoding="utf-8")
