"""``tree_verify_compact`` is what the references of its two halves say, one after the other."""

from __future__ import annotations

from spec_kernels._library import register_reference
from spec_kernels.ops.compact.reference import compact_reference
from spec_kernels.ops.tree_verify.reference import tree_verify_reference

_OP = "tree_verify_compact"


def tree_verify_compact_reference(*args) -> None:
    *verify, block_tables, accept_index, num_accepted, out_tokens, status, caches, rows = args
    outputs = accept_index, num_accepted, out_tokens, status
    tree_verify_reference(*verify, *outputs, op=_OP)
    context_lens = verify[4]
    compact_reference(accept_index, num_accepted, context_lens, block_tables, caches, rows, op=_OP)


register_reference("tree_verify_compact", tree_verify_compact_reference)
