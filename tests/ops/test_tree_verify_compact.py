"""``tree_verify_compact``: the two ops one after the other, to the bit."""

import random

import pytest
import torch
from cuda_on_host import host_build
from test_compact import tables
from test_tree_verify import GOLDEN, GOLDEN_CHOICES, fields, one_hot, poisoned_out, random_case

from spec_kernels import compact, tree_verify, tree_verify_compact
from spec_kernels.testing.compare import assert_same_bits, value_checks, value_out_of_range

BACKENDS = ("reference", "cpu", "cuda_on_host")


def random_moves(rng, batch, num_nodes, *, num_caches=None):
    """Lengths, a table, caches and rows of every kind, for paths in trees of ``num_nodes``."""
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    page_size = rng.choice([1, 2, 7, 16])
    columns = (30 + num_nodes + page_size - 1) // page_size
    lens = torch.tensor([rng.choice([-1, 0, 1, 15, 30]) for _ in range(batch)])
    widths = [rng.choice([(), (3,), (2, 8), (5000,), (0,)]) for _ in range(4)]
    dtypes = [rng.choice([torch.float32, torch.bfloat16, torch.uint8]) for _ in range(4)]
    kinds = list(zip(widths, dtypes, strict=True))
    if num_caches is not None:
        kinds = [((4,), torch.float32)] * num_caches

    def tensor(outer, inner, width, dtype):
        return torch.randint(0, 200, (outer, inner, *width), generator=g).to(dtype)

    caches = [tensor(batch * columns, page_size, *kind) for kind in kinds]
    rows = [tensor(batch, num_nodes, *kind) for kind in kinds[:2]]
    return lens, tables(batch, columns, batch * columns, rng.randrange(99)), caches, rows


def one_after_the_other(logits, verify, block_tables, caches, rows, backend):
    """What the two ops leave in copies: outputs, caches, rows."""
    moved = [t.clone() for t in caches], [t.clone() for t in rows]
    out = tree_verify(logits, **verify, backend=backend)
    path = out.accept_index, out.num_accepted
    compact(*path, verify["context_lens"], block_tables, *moved, backend=backend)
    return [*fields(out), *moved[0], *moved[1]]


def together(logits, verify, block_tables, caches, rows, backend):
    moved = [t.clone() for t in caches], [t.clone() for t in rows]
    out = poisoned_out(logits.shape[0], logits.shape[1])
    got = tree_verify_compact(
        logits, **verify, block_tables=block_tables, caches=moved[0], rows=moved[1], out=out,
        backend=backend,
    )  # fmt: skip
    assert got is out
    return [*fields(out), *moved[0], *moved[1]]


@pytest.mark.parametrize("schedule", range(4))
def test_any_call_is_the_two_ops_one_after_the_other(backend, schedule):
    on_host = backend == "cuda_on_host"
    if on_host:
        host_build.load().configure(schedule)
    try:
        for case in range(schedule, 48, 4):
            rng = random.Random(case)
            logits, verify = random_case(rng)
            verify["context_lens"], *moves = random_moves(rng, *logits.shape[:2])
            pairs = zip(
                together(logits, verify, *moves, backend),
                one_after_the_other(logits, verify, *moves, backend),
                strict=True,
            )
            for got, expected in pairs:
                assert_same_bits(got, expected)
    finally:
        if on_host:
            host_build.load().configure(host_build.schedule())


@pytest.mark.parametrize("num_caches", [78, 79, 180])
def test_more_tensors_than_one_launch_holds(backend, num_caches):
    rng = random.Random(num_caches)
    logits, verify = golden()
    _, *moves = random_moves(rng, 2, 6, num_caches=num_caches)
    pairs = zip(
        together(logits, verify, *moves, backend),
        one_after_the_other(logits, verify, *moves, "reference"),
        strict=True,
    )
    for got, expected in pairs:
        assert_same_bits(got, expected)


def golden(**change):
    """The golden walk: paths 0, 3, 4, 5 and 0, 4, 5 after 9 and 0 tokens."""
    return one_hot(GOLDEN_CHOICES, 19), GOLDEN | change


def golden_moves(page_size=5):
    columns = (9 + 6 + page_size - 1) // page_size
    cache = torch.arange(2.0 * columns * page_size * 3).view(2 * columns, page_size, 3)
    return tables(2, columns, 2 * columns), [cache], [torch.arange(12).view(2, 6)]


@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_case_07_rows_0_3_4_5_come_to_the_front(backend, page_size):
    logits, verify = golden()
    block_tables, (cache,), (rows,) = golden_moves(page_size)
    old = [cache[table].flatten(0, 1) for table in block_tables]
    out = tree_verify_compact(
        logits, **verify, block_tables=block_tables, caches=[cache], rows=[rows], backend=backend
    )
    assert out.num_accepted.tolist() == [3, 2]
    assert out.tokens[:, :4].tolist() == [[3, 4, 5, 18], [11, 12, 18, -1]]
    for b, (length, path) in enumerate([(9, [0, 3, 4, 5]), (0, [0, 4, 5])]):
        new = cache[block_tables[b]].flatten(0, 1)
        end = length + len(path)
        assert new[length:end].equal(old[b][[length + node for node in path]])
        assert new[:length].equal(old[b][:length]) and new[end:].equal(old[b][end:])
        assert rows[b].tolist() == [6 * b + n for n in (*path, *range(len(path), 6))]


def test_case_05_padding_moves_nothing(backend):
    logits, verify = golden(context_lens=torch.tensor([-1, 0]))
    block_tables, caches, rows = golden_moves()
    block_tables[0] = 10**9
    before = caches[0].clone(), rows[0].clone()
    out = tree_verify_compact(
        logits, **verify, block_tables=block_tables, caches=caches, rows=rows, backend=backend
    )
    assert out.accept_index[0].tolist() == [-1] * 6 and out.num_accepted.tolist() == [0, 2]
    assert rows[0][0].equal(before[1][0]) and rows[0][1].tolist() == [6, 10, 11, 9, 10, 11]
    pages = block_tables[1]
    others = [p for p in range(len(caches[0])) if p not in pages]
    assert caches[0][others].equal(before[0][others])
    assert not caches[0].equal(before[0])


@pytest.mark.parametrize(
    "match, change",
    [
        ("block_tables", {"page": 6}),
        ("block_tables", {"page": -1}),
        (r"caches\[0\]", {"length": 14}),
        (r"caches\[0\]", {"length": 2**62}),
        (r"accept_index\[0\]", {"num_nodes": 5}),
    ],
)
def test_a_request_that_may_not_move_is_judged_all_the_same(backend, match, change):
    """Its tokens are written, its rows stay; the other request moves."""
    lens = torch.tensor([change.get("length", 9), 0])
    logits, verify = golden(context_lens=lens)
    for raises in value_checks(backend):
        block_tables, (cache,), (rows,) = golden_moves()
        block_tables[0] = change.get("page", block_tables[0])
        rows = rows[:, : change.get("num_nodes", 6)].contiguous()
        small = rows.shape[1] < 6
        verify["context_lens"][1] = -1 if small else 0  # it, too, would be refused
        expected = cache.clone(), rows.clone()
        out = poisoned_out(2, 6)
        with value_out_of_range(f"spec_kernels::tree_verify_compact: {match}: expected", raises):
            tree_verify_compact(
                logits, **verify, block_tables=block_tables, caches=[cache], rows=[rows], out=out,
                backend=backend,
            )  # fmt: skip
        assert out.tokens[0, :4].tolist() == [3, 4, 5, 18]
        if not small and backend not in ("reference", "cpu"):
            path = torch.tensor([[0, 0, 0], [0, 4, 5]]), torch.tensor([0, 2])
            compact(*path, torch.tensor([-1, 0]), block_tables, *([t] for t in expected))
        assert cache.equal(expected[0]) and rows.equal(expected[1])


def test_a_bad_parameter_moves_nothing_of_its_request(backend):
    hot = {"temperature": torch.tensor([float("nan"), 0.0]), "seeds": torch.tensor([1, 2])}
    logits, verify = golden(**hot)
    for raises in value_checks(backend):
        block_tables, caches, rows = golden_moves()
        before = caches[0].clone(), rows[0].clone()
        out = poisoned_out(2, 6)
        with value_out_of_range("spec_kernels::tree_verify_compact: temperature: exp", raises):
            tree_verify_compact(
                logits, **verify, block_tables=block_tables, caches=caches, rows=rows, out=out,
                backend=backend,
            )  # fmt: skip
        assert rows[0][0].equal(before[1][0])
        if backend in ("reference", "cpu"):
            assert caches[0].equal(before[0]) and rows[0].equal(before[1])
            assert out.accept_index.equal(poisoned_out(2, 6).accept_index)
        else:
            assert out.accept_index[0].tolist() == [-1] * 6
            assert rows[0][1].tolist() == [6, 10, 11, 9, 10, 11]


def test_nothing_to_move_and_nobody_to_move_it(backend):
    logits, verify = golden()
    block_tables = golden_moves()[0]
    out = tree_verify_compact(logits, **verify, block_tables=block_tables, backend=backend)
    assert out.num_accepted.tolist() == [3, 2]
    nobody = {name: t[:0] for name, t in verify.items()}
    moved = [torch.zeros(2, 2, 2)], [torch.zeros(0, 6)]
    out = tree_verify_compact(logits[:0], **nobody, block_tables=block_tables[:0], caches=moved[0],
                              rows=moved[1], backend=backend)  # fmt: skip
    assert out.tokens.shape == (0, 6)


@pytest.mark.parametrize(
    "match, change",
    [
        ("block_tables", {"block_tables": torch.zeros(3, 3, dtype=torch.int64)}),
        (r"caches\[0\]", {"caches": [torch.zeros(8, 0, 2)]}),
        (r"rows\[0\]", {"rows": [torch.zeros(3, 6)]}),
        (r"rows\[0\]", {"rows": [torch.zeros(2)]}),
        ("tokens", {"tokens": torch.zeros(2, 5, dtype=torch.int64)}),
        ("draft_probs", {"draft_probs": torch.zeros(2, 6, 18)}),
    ],
)
def test_bad_arguments(backend, match, change):
    logits, verify = golden()
    block_tables, caches, rows = golden_moves()
    before = caches[0].clone(), rows[0].clone()
    call = {**verify, "block_tables": block_tables, "caches": caches, "rows": rows, **change}
    with pytest.raises(ValueError, match=f"spec_kernels::tree_verify_compact: {match}: expected"):
        tree_verify_compact(logits, **call, backend=backend)
    assert caches[0].equal(before[0]) and rows[0].equal(before[1])


def test_what_moves_stands_apart_from_what_is_read_and_written(backend):
    logits, verify = golden()
    block_tables, caches, rows = golden_moves()
    call = {**verify, "block_tables": block_tables}
    out = poisoned_out(2, 6)
    wrong = [
        ({"rows": [verify["tokens"]]}, r"rows\[0\]: expected memory apart from tokens"),
        ({"caches": [logits]}, r"caches\[0\]: expected memory apart from logits"),
        ({"rows": [out.tokens]}, "memory apart from"),
        ({"block_tables": out.tokens}, "memory apart from"),
        ({"caches": [*caches, *caches]}, "memory apart from"),
    ]
    for change, match in wrong:
        with pytest.raises(ValueError, match=f"spec_kernels::tree_verify_compact: .*{match}"):
            tree_verify_compact(logits, **{**call, **change}, out=out, backend=backend)
    assert out.tokens.equal(poisoned_out(2, 6).tokens)


def test_int_widths(backend, int_dtype):
    logits, verify = golden()
    verify = {name: t.to(int_dtype) for name, t in verify.items()}
    results = []
    for together_on in ("reference", backend):
        block_tables, (cache,), (rows,) = golden_moves()
        out = poisoned_out(2, 6, dtype=int_dtype)
        tree_verify_compact(
            logits, **verify, block_tables=block_tables.to(int_dtype), caches=[cache],
            rows=[rows], out=out, backend=together_on,
        )  # fmt: skip
        results.append((*fields(out), cache, rows))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


def raw_arguments():
    logits, verify = golden()
    block_tables, caches, rows = golden_moves()
    return (
        logits, *verify.values(), *[None] * 8, 0.0, 0.0, block_tables,
        *fields(poisoned_out(2, 6)), caches, rows,
    )  # fmt: skip


def test_opcheck():
    torch.library.opcheck(torch.ops.spec_kernels.tree_verify_compact.default, raw_arguments())


def test_compiles_without_graph_breaks():
    def step(logits, block_tables, cache, rows):
        out = tree_verify_compact(
            logits, **golden()[1], block_tables=block_tables, caches=[cache], rows=[rows]
        )
        return out.tokens + 1, cache * 2, rows

    def arguments():
        block_tables, (cache,), (rows,) = golden_moves()
        return golden()[0], block_tables, cache, rows

    expected = step(*arguments())
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments()), expected, strict=True):
        assert got.equal(want)
