"""What only CUDA kernels promise: how many launches a call takes, and where their limits are."""

import itertools

import pytest
import torch
from cuda_on_host import host_build

from spec_kernels import (
    FlatVerified,
    Verified,
    compact,
    draft_sample,
    hidden_capture,
    link_tree,
    tree_build,
    tree_verify,
    tree_verify_choices,
    tree_verify_coins,
    tree_verify_compact,
)
from spec_kernels.testing import calls
from spec_kernels.testing.compare import assert_same_bits

BACKEND = host_build.BACKEND
WRITTEN = "\n".join(path.read_text() for path in host_build.cuda_sources())
OPS = [op for op in calls.CALLS if f'm.impl("{op}"' in WRITTEN]

pytestmark = pytest.mark.skipif(
    host_build.missing() is not None, reason=f"no CUDA sources on the host: {host_build.missing()}"
)


@pytest.fixture
def launches():
    """Launches of a call."""
    machine = host_build.load()

    def count(function, *args, **kwargs):
        before = machine.num_launches()
        function(*args, **kwargs, backend=BACKEND)
        return machine.num_launches() - before

    return count


def compact_problem(num_caches, path, *, cache=(8, 4, 5), num_nodes=200, context=3):
    generator = torch.Generator().manual_seed(0)
    accept_index = torch.tensor([path])
    num_pages, page_size = cache[:2]
    table = torch.randperm(num_pages, generator=generator)[None]
    caches = [torch.randn(cache, generator=generator) for _ in range(num_caches)]
    rows = [
        torch.randint(0, 1000, (1, num_nodes), generator=generator),
        torch.randn(1, num_nodes, 3, 1000, generator=generator).bfloat16(),
    ]
    count = torch.tensor([len(path) - 1])
    return (accept_index, count, torch.tensor([context]), table), caches, rows


def assert_like_the_reference(indices, caches, rows):
    results = []
    for backend in ("reference", BACKEND):
        moved = [t.clone() for t in caches], [t.clone() for t in rows]
        compact(*indices, *moved, backend=backend)
        results.append([*moved[0], *moved[1]])
    for a, b in zip(*results, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("num_caches, expected", [(0, 1), (61, 1), (86, 1), (87, 2), (180, 3)])
def test_compact_moves_all_layers_in_one_launch(launches, num_caches, expected):
    """Kimi-K2.5 has 61 caches; with the tokens and the hidden rows that is one launch."""
    indices, caches, rows = compact_problem(num_caches, [0, 2, 5, 9])
    assert_like_the_reference(indices, caches, rows)
    assert launches(compact, *indices, caches, rows) == expected


@pytest.mark.parametrize("width", [1, 2, 4, 12, 16, 1152, 5000, 14336])
def test_compact_moves_rows_of_any_width_and_long_paths(launches, width):
    """Beyond one tile of moves, one chunk of bytes, and the widest aligned word."""
    path = [0, 1, 2, *range(5, 195)]
    indices, _, _ = compact_problem(0, path)
    indices = (*indices[:3], torch.randperm(210)[None])
    generator = torch.Generator().manual_seed(width)
    cache = torch.randint(0, 256, (210, 1, width), generator=generator, dtype=torch.uint8)
    rows = torch.randint(0, 256, (1, 200, width), generator=generator, dtype=torch.uint8)
    assert_like_the_reference(indices, [cache], [rows])
    odd = torch.empty(rows.numel() + 1, dtype=torch.uint8)[1:].view(rows.shape)
    odd.copy_(rows)
    expected = rows.clone()
    compact(*indices, [], [expected], backend="reference")
    compact(*indices, [], [odd], backend=BACKEND)
    assert odd.equal(expected)


def test_compact_takes_any_number_of_requests():
    """More than a grid is high; padded ones but for the last."""
    batch = 65535 + 3
    accept_index = torch.tensor([[0, 2]]).expand(batch, 2)
    lengths = torch.full((batch,), -1)
    lengths[-1] = 0
    rows = torch.arange(3 * batch).view(batch, 3)
    expected = rows.clone()
    expected[-1, 1] = rows[-1, 2]
    compact(
        accept_index,
        torch.ones(batch, dtype=torch.int64),
        lengths,
        torch.zeros(batch, 1, dtype=torch.int64),
        [],
        [rows],
        backend=BACKEND,
    )
    assert rows.equal(expected)


def test_compact_checks_every_page_size_before_it_moves():
    """A position beyond one cache's pages keeps the request's rows in place in all of them."""
    indices, caches, rows = compact_problem(1, [0, 2, 5, 9])
    small = torch.randn(8, 1, 4)
    before = [t.clone() for t in (*caches, small, *rows)]
    compact(*indices, [*caches, small], rows, backend=BACKEND)  # position 12 is in the first alone
    for t, old in zip((*caches, small, *rows), before, strict=True):
        assert t.equal(old)
    sizes = [torch.zeros(30, size, 1) for size in range(1, 10)]
    with pytest.raises(ValueError, match="caches: expected at most 8 different page sizes"):
        compact(*indices, sizes, backend=BACKEND)


def test_the_others_are_one_launch_too(launches):
    pool = torch.zeros(3, 40), torch.zeros(3, 40).long(), torch.full((3, 40), -1), torch.zeros(3)
    assert launches(tree_build, *pool[:3], pool[3].long(), 16) == 1
    x = torch.randn(2, 5, 64)
    assert launches(hidden_capture, x[0], x[1], torch.ones(64), 1e-5) == 1
    drawn = {"temperature": torch.ones(2), "seeds": torch.zeros(2).long()}
    for options in ({}, drawn | {"probs": torch.zeros(2, 5, 64)}):
        assert launches(draft_sample, x, None, torch.tensor([3, 4]), 1, 4, **options) == 1


@pytest.mark.parametrize("form", ["greedy", "filtered", "row", "draft", "typical"])
def test_tree_verify_is_one_launch_whatever_it_does(launches, form):
    """Walk, filters, acceptance and bonus; the path has four nodes."""
    tree = link_tree(torch.arange(4)[None], torch.arange(-1, 3))
    logits = torch.nn.functional.one_hot(torch.arange(1, 5)[None], 3000) * 60.0
    arguments = {
        "tokens": tree.tokens,
        "first_child": tree.first_child,
        "next_sibling": tree.next_sibling,
        "context_lens": torch.tensor([3]),
    }
    if form != "greedy":
        arguments |= {"temperature": torch.ones(1), "seeds": torch.tensor([1])}
    if form == "filtered":
        arguments |= {"top_k": torch.tensor([50]), "top_p": torch.tensor([0.9])}
    if form == "draft":
        arguments["draft_probs"] = logits.softmax(-1)
    if form == "typical":
        arguments["typical"] = (0.1, 0.3)
    out = Verified.allocate(1, 3)
    assert launches(tree_verify, logits, **arguments, out=out) == 1
    assert out.num_accepted.tolist() == [3]


@pytest.mark.parametrize(
    "num_caches, expected", [(0, 1), (61, 1), (78, 1), (79, 2), (166, 2), (167, 3)]
)
def test_acceptance_and_compaction_are_one_launch(launches, num_caches, expected):
    """80 tensors in the first launch, 88 in each that follows, as in those of ``compact``."""
    (_, _, lens, table), caches, rows = compact_problem(num_caches, [0, 2, 5, 9], num_nodes=10)
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 2, 3, 3, 5])
    tree = link_tree(torch.arange(10)[None], parents)
    logits = torch.zeros(1, 10, 300)
    for node, child in ((0, 2), (2, 5), (5, 9)):
        logits[0, node, child] = 1.0
    links = tree.tokens, tree.first_child, tree.next_sibling, lens
    before = [t.clone() for t in caches], [t.clone() for t in rows]
    out = Verified.allocate(1, 9)
    assert launches(tree_verify_compact, logits, *links, table, caches, rows, out=out) == expected
    assert out.accept_index[0, :4].tolist() == [0, 2, 5, 9]
    path = out.accept_index, out.num_accepted
    assert launches(compact, *path, lens, table, *before) == max(1, -(-(num_caches + 2) // 88))
    for a, b in zip([*caches, *rows], [*before[0], *before[1]], strict=True):
        assert a.equal(b)


def test_the_walks_on_given_choices_are_one_launch(launches):
    tree = link_tree(torch.arange(4)[None], torch.arange(-1, 3))
    links = tree.tokens, tree.first_child, tree.next_sibling, torch.arange(4)[None]
    out = FlatVerified.allocate(1, 4, 3)
    assert launches(tree_verify_choices, *links, torch.arange(1, 5), out) == 1
    assert out.num_accepted.tolist() == [3]
    probs = torch.nn.functional.one_hot(torch.arange(1, 5)[None], 3000).float()
    coins = torch.full((1, 4), 0.5), torch.full((1,), 0.5)
    assert launches(tree_verify_coins, *links, probs, *coins, out) == 1
    assert out.num_accepted.tolist() == [3] and out.predictions.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("checks", ["0", "1"], ids=["unasked", "SPEC_KERNELS_CHECK=1"])
@pytest.mark.parametrize("op", OPS)
def test_calls_are_captured_and_replayed_on_other_values(op, checks, monkeypatch):
    """A call that waits, copies, allocates or frees would break the capture."""
    machine = host_build.load()
    monkeypatch.setenv("SPEC_KERNELS_CHECK", checks)
    pairs = zip(calls.CALLS[op](False, 0), calls.CALLS[op](False, 1), strict=True)
    for first, second in itertools.islice(pairs, 2):
        static = first.map(torch.clone)
        with machine.record() as graph:
            static.run(BACKEND)
        for call in (second, first):
            want = call.result(BACKEND)
            for written in (False, True):
                places = (static.tensors(written=written), call.tensors(written=written))
                for (_, target), (_, source) in zip(*places, strict=True):
                    target.copy_(source)
            machine.replay(graph)
            machine.synchronize()
            results = zip(static.tensors(written=True), want.tensors(written=True), strict=True)
            for (_, got), (_, wanted) in results:
                assert_same_bits(got, wanted)


def test_hidden_capture_keeps_a_row_in_registers():
    x = torch.randn(2, 1, 16385)
    before = x.clone()
    with pytest.raises(ValueError, match="residual: expected at most 16384 columns, got 16385"):
        hidden_capture(x[0], x[1], torch.ones(16385), 1e-5, backend=BACKEND)
    assert x.equal(before)
