"""``compact``: the accepted rows stand in front, everything else is untouched."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import compact
from spec_kernels.testing.compare import assert_same_bits, value_checks, value_out_of_range

BACKENDS = ("reference", "cpu", "cuda_on_host")


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def tables(batch, num_columns, num_pages, seed=0):
    """Pages of different requests are disjoint and in no order."""
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    return order[: batch * num_columns].view(batch, num_columns)


def logical(cache, table):
    """``[M * page, ...]`` in logical order."""
    return cache[table.long()].flatten(0, 1)


def random_bytes(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("context", [0, 1, 7, 16])
def test_case_07_rows_0_3_4_5_come_to_the_front_in_every_layer(backend, page_size, context):
    num_columns = (context + 6 + page_size - 1) // page_size
    block_tables = tables(2, num_columns, 2 * num_columns + 3)
    pages = 2 * num_columns + 3
    kinds = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int64]
    caches = [
        random_bytes(pages, page_size, 2, 3 + i, dtype=d, seed=i) for i, d in enumerate(kinds)
    ]
    rows = [random_bytes(2, 6, 5, dtype=torch.bfloat16), torch.arange(12).view(2, 6)]
    before = [t.clone() for t in (*caches, *rows)]
    compact(
        ints([0, 3, 4, 5], [0, 1, 5, -1]),
        ints(3, 2),
        ints(context, context),
        block_tables,
        caches,
        rows,
        backend=backend,
    )
    paths = [[0, 3, 4, 5], [0, 1, 5]]
    for cache, old in zip(caches, before, strict=False):
        expected = old.view(torch.uint8).clone()
        for table, path in zip(block_tables.tolist(), paths, strict=True):
            for i, node in enumerate(path):
                source, target = context + node, context + i
                expected[table[target // page_size], target % page_size] = old.view(torch.uint8)[
                    table[source // page_size], source % page_size
                ]
        assert cache.view(torch.uint8).equal(expected)
    for t, old in zip(rows, before[len(caches) :], strict=True):
        for b, path in enumerate(paths):
            assert_same_bits(t[b, : len(path)], old[b, path])
            assert_same_bits(t[b, len(path) :], old[b, len(path) :])


def test_case_05_padding_moves_nothing(backend):
    cache = torch.arange(24.0).view(6, 2, 2)
    rows = torch.arange(16).view(4, 4)
    before = cache.clone(), rows.clone()
    # A padded request's numbers and pages would be refused if they were read; those of the last
    # one would pass.
    compact(
        ints([0, -1, -1], [0, 2, 7], [0, -1, -1], [0, 2, 3]),
        ints(0, 99, 0, 2),
        ints(1, -1, 0, -1),
        ints([0, 1], [10**9, -5], [-1, -1], [2, 3]),
        [cache],
        [rows],
        backend=backend,
    )
    assert cache.equal(before[0]) and rows.equal(before[1])


def test_case_06_zero_accepted_moves_nothing(backend):
    cache = torch.arange(24.0).view(6, 2, 2)
    before = cache.clone()
    compact(ints([0, -1]), ints(0), ints(3), ints([5, 4]), [cache], backend=backend)
    assert cache.equal(before)


def test_case_08_offsets_beyond_32_bits(backend):
    # Untouched pages of this storage are never mapped.
    stride = 2**31 + 64
    cache = torch.empty(stride + 16, dtype=torch.uint8).as_strided((2, 2, 8), (stride, 8, 1))
    cache[1, 1] = 7
    cache[1, 0] = 1
    compact(ints([1, 2]), ints(1), ints(1), ints([0, 1]), [cache], backend=backend)
    assert cache[0, 1].tolist() == [1] * 8 and cache[1, 0].tolist() == [7] * 8


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_any_path_any_overlap(backend, seed):
    rng = random.Random(seed)
    batch, num_nodes, page_size = rng.randint(1, 3), rng.randint(1, 40), rng.choice([1, 2, 7, 16])
    columns = rng.randint(1, num_nodes)
    lengths = [rng.choice([-1, 0, 1, 15, 30]) for _ in range(batch)]
    num_columns = (30 + num_nodes + page_size - 1) // page_size
    block_tables = tables(batch, num_columns, batch * num_columns, seed)
    paths = [sorted(rng.sample(range(num_nodes), rng.randint(1, columns))) for _ in range(batch)]
    accept_index = torch.full((batch, columns), -1)
    for b, path in enumerate(paths):
        accept_index[b, : len(path)] = torch.tensor(path)
    shape = (batch * num_columns, page_size, 3)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    hidden = torch.randn(batch, num_nodes, 2, generator=torch.Generator().manual_seed(seed + 1))
    counts = torch.tensor([len(p) - 1 for p in paths])
    results = []
    for name in ("reference", backend):
        cache, rows = start.clone(), hidden.clone()
        compact(
            accept_index, counts, torch.tensor(lengths), block_tables, [cache], [rows],
            backend=name,
        )  # fmt: skip
        results.append((cache, rows))
    for b, (path, length) in enumerate(zip(paths, lengths, strict=True)):
        for cache, rows in results:
            new, old = logical(cache, block_tables[b]), logical(start, block_tables[b])
            if length < 0:
                assert new.equal(old) and rows[b].equal(hidden[b])
                continue
            end = length + len(path)
            assert new[:length].equal(old[:length]) and new[end:].equal(old[end:])
            assert new[length:end].equal(old[[length + node for node in path]])
            assert rows[b, : len(path)].equal(hidden[b, path])
            assert rows[b, len(path) :].equal(hidden[b, len(path) :])


def test_strides_and_integer_widths(backend, int_dtype):
    wide = torch.arange(3 * 8 * 10 * 4).view(3, 8, 10, 4)
    got = wide.clone()
    view = got[:, ::2, 3]  # [P, page, 4], both leading dimensions strided
    compact(
        ints([0, 2], dtype=int_dtype),
        ints(1, dtype=int_dtype),
        ints(3, dtype=int_dtype),
        ints([0, 1, 2], dtype=int_dtype)[:, ::2],
        [view],
        backend=backend,
    )
    # Positions 5 and 4 are slots 1 and 0 of the second entry of the table, page 2.
    expected = wide.clone()
    expected[2, 0, 3] = wide[2, 2, 3]
    assert got.equal(expected)


def test_requests_do_not_depend_on_batch_order(backend):
    start = torch.randn(12, 4, 2, generator=torch.Generator().manual_seed(0))
    block_tables = tables(3, 4, 12)
    accept_index, counts = ints([0, 3, 5], [0, 2, -1], [0, 1, 4]), ints(2, 1, 2)
    lengths, order = ints(0, 5, 9), torch.tensor([2, 0, 1])
    a, b = start.clone(), start.clone()
    compact(accept_index, counts, lengths, block_tables, [a], backend=backend)
    moved = (t[order] for t in (accept_index, counts, lengths, block_tables))
    compact(*moved, [b], backend=backend)
    assert a.equal(b)


def test_nothing_to_move(backend):
    none = torch.zeros(0, 3, dtype=torch.int64)
    empty = torch.zeros(0, dtype=torch.int64)
    compact(none, empty, empty, none, [torch.zeros(2, 2, 2)], backend=backend)
    compact(ints([0, 2]), ints(1), ints(3), ints([0]), backend=backend)
    compact(ints([0, 2]), ints(1), ints(3), ints([0]), [], [torch.zeros(1, 3, 0)], backend=backend)


SOUND = {
    "accept_index": ints([0, 2, 3], [0, 1, 3]),
    "num_accepted": ints(2, 2),
    "context_lens": ints(2, 4),
    "block_tables": ints([0, 1, 2, 3], [4, 5, 6, 7]),
}


def refuse(match, backend, **change):
    cache, rows = torch.arange(32.0).view(8, 2, 2), torch.arange(8).view(2, 4)
    before = cache.clone(), rows.clone()
    arguments = {**SOUND, "caches": [cache], "rows": [rows], **change}
    with pytest.raises(ValueError, match=f"spec_kernels::compact: {match}: expected .*, got"):
        compact(**arguments, backend=backend)
    # Whatever is wrong is found before the first row moves.
    assert cache.equal(before[0]) and rows.equal(before[1])


@pytest.mark.parametrize(
    "match, change",
    [
        (r"num_accepted\[1\]", {"num_accepted": ints(2, 3)}),
        (r"num_accepted\[1\]", {"num_accepted": ints(2, -1)}),
        (r"accept_index\[1\]", {"accept_index": ints([0, 2, 3], [0, 3, 3])}),
        (r"accept_index\[1\]", {"accept_index": ints([0, 2, 3], [0, 3, 1])}),
        (r"accept_index\[1\]", {"accept_index": ints([0, 2, 3], [-1, 0, 1])}),
        (
            r"accept_index\[1\]",
            {"accept_index": ints([0, 2, 3], [0, 1, 4]), "context_lens": ints(2, 3)},
        ),
        (r"caches\[0\]", {"context_lens": ints(2, 5)}),
        (r"caches\[0\]", {"context_lens": ints(2, 2**63 - 1)}),
        ("block_tables", {"block_tables": ints([0, 1, 2, 3], [4, 5, 6, 8])}),
        ("block_tables", {"block_tables": ints([0, 1, 2, 3], [4, 5, 6, -1])}),
        ("block_tables", {"block_tables": ints([0, 1, 2, 3], [4, 5, 6, 2**40])}),
    ],
)
def test_a_request_with_bad_values_moves_nowhere(backend, match, change):
    arguments = {**SOUND, **change}
    alone = arguments["context_lens"].clone()
    alone[1] = -1
    for raises in value_checks(backend):
        cache, rows = torch.arange(32.0).view(8, 2, 2), torch.arange(8).view(2, 4)
        expected = cache.clone(), rows.clone()
        if backend not in ("reference", "cpu"):  # the other request moves as if it were alone
            moved = {**arguments, "context_lens": alone}
            compact(**moved, caches=[expected[0]], rows=[expected[1]], backend="reference")
        with value_out_of_range(f"spec_kernels::compact: {match}: expected .*, got", raises):
            compact(**arguments, caches=[cache], rows=[rows], backend=backend)
        assert cache.equal(expected[0]) and rows.equal(expected[1])


@pytest.mark.parametrize(
    "match, change",
    [
        ("accept_index", {"accept_index": torch.zeros(2, 3)}),
        ("accept_index", {"accept_index": ints(0, 2)}),
        ("num_accepted", {"num_accepted": ints(2)}),
        ("context_lens", {"context_lens": torch.zeros(2)}),
        ("block_tables", {"block_tables": ints([0, 1, 2, 3])}),
        (r"caches\[1\]", {"caches": [torch.zeros(8, 2), torch.zeros(4)]}),
        (r"caches\[0\]", {"caches": [torch.zeros(8, 0, 2)]}),
        (r"caches\[0\]", {"caches": [torch.zeros(8, 2, 2, 4).transpose(2, 3)]}),
        (r"caches\[0\]", {"caches": [None]}),
        (r"rows\[0\]", {"rows": [torch.zeros(3, 4)]}),
        (r"rows\[0\]", {"rows": [torch.zeros(2)]}),
    ],
)
def test_bad_arguments(backend, match, change):
    refuse(match, backend, **change)


def test_opcheck():
    cache, rows = torch.randn(8, 2, 2), torch.arange(8).view(2, 4)
    arguments = (*SOUND.values(), [cache, cache.double()], [rows])
    torch.library.opcheck(torch.ops.spec_kernels.compact.default, arguments)


def test_compiles_without_graph_breaks():
    def step(*arguments):
        *indices, cache, rows = arguments
        compact(*indices, [cache], [rows])
        return cache * 2, rows

    start = torch.randn(8, 2, 2), torch.arange(8).view(2, 4)
    expected = step(*SOUND.values(), *(t.clone() for t in start))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(*SOUND.values(), *(t.clone() for t in start))
    for x, y in zip(got, expected, strict=True):
        assert x.equal(y)


def test_what_moves_stands_apart(backend):
    call = [ints([0, 2, 3]), ints(2), ints(1), ints([0, 1])]
    cache = torch.arange(2 * 4 * 3.0).view(2, 4, 3)
    before = cache.clone()
    with pytest.raises(ValueError, match=r"caches\[0\]: expected memory apart from caches\[1\]"):
        compact(*call, caches=[cache, cache], backend=backend)
    with pytest.raises(ValueError, match=r"caches\[0\]: expected rows that do not overlap"):
        compact(*call, caches=[cache[:, :1].expand(2, 4, 3)], backend=backend)
    assert torch.equal(cache, before)


def test_interleaved_k_and_v(backend):
    call = [ints([0, 2, 3]), ints(2), ints(1), ints([0, 1])]
    both = torch.randn(2, 4, 2, 3)
    k, v = both[:, :, 0].clone(), both[:, :, 1].clone()
    compact(*call, caches=[k, v], backend=backend)
    compact(*call, caches=[both[:, :, 0], both[:, :, 1]], backend=backend)
    assert torch.equal(both, torch.stack((k, v), 2))


def test_rows_without_bytes(backend):
    call = [ints([0, 2, 3]), ints(2), ints(1), ints([0, 1])]
    compact(*call, caches=[torch.zeros(2, 4, 0)], rows=[torch.zeros(1, 4, 0)], backend=backend)
