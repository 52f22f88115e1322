"""``tree_build`` and the trees of given shape: choice, links, visibility, malformed pools."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_kernels import (
    DraftTree,
    TreeStatus,
    _library,
    chain_tree,
    link_tree,
    num_words,
    tree_build,
    tree_from_paths,
)
from spec_kernels.testing.compare import poisoned, raw_op, value_checks, value_out_of_range

BACKENDS = ("reference", "cpu", "cuda_on_host")
SIZES = [1, 2, 31, 32, 33, 63, 64, 65, 128, 200, 1024]


def poisoned_tree(batch, num_nodes, dtype=torch.int32):
    def nodes(d):
        return poisoned(batch, num_nodes, dtype=d)

    return DraftTree(
        tokens=nodes(torch.int64),
        parents=nodes(dtype),
        depths=nodes(dtype),
        ancestors=poisoned(batch, num_nodes, num_words(num_nodes), dtype=torch.int32),
        first_child=nodes(dtype),
        next_sibling=nodes(dtype),
        pool_index=nodes(dtype),
        status=poisoned(batch, dtype=torch.int32),
    )


def random_pool(generator, batch, size, dtype=torch.int64, absent=0.05):
    """Parents anywhere before, scores never above the parent's; some candidates absent."""
    scores = torch.zeros(batch, size)
    slots = torch.full((batch, size), -1, dtype=dtype)
    steps = torch.rand(batch, size, generator=generator).mul(4).round().div(4)
    for i in range(size):
        parent = torch.randint(-1, max(i, 1), (batch,), generator=generator).clamp(max=i - 1)
        slots[:, i] = parent.to(dtype)
        above = scores.gather(1, parent.clamp(min=0)[:, None])[:, 0] if i else torch.zeros(batch)
        scores[:, i] = torch.where(parent < 0, 0.0, above) - steps[:, i]
    scores[torch.rand(batch, size, generator=generator) < absent] = -math.inf
    candidates = torch.randint(0, 100, (batch, size), generator=generator, dtype=dtype)
    roots = torch.randint(0, 100, (batch,), generator=generator, dtype=dtype)
    return scores, candidates, slots, roots


def visible(tree):
    """Bits as bool ``[B, N, N]``."""
    node = torch.arange(tree.num_nodes)
    return (tree.ancestors[:, :, node // 32] >> (node % 32).to(torch.int32)) & 1 == 1


def assert_consistent(tree):
    """Links, depths and visibility all follow from ``parents``; absent nodes are inert."""
    present, sees = tree.present(), visible(tree)
    for b in range(tree.batch):
        children = {}
        for i in range(tree.num_nodes):
            parent = int(tree.parents[b, i])
            if not present[b, i]:
                assert int(tree.tokens[b, i]) == 0 and int(tree.depths[b, i]) == 0
                assert parent == -1 and int(tree.pool_index[b, i]) == -1
                assert not sees[b, i].any()
                assert int(tree.first_child[b, i]) == int(tree.next_sibling[b, i]) == -1
                continue
            expected = sees[b, max(parent, 0)].clone() if i else torch.zeros_like(sees[b, i])
            expected[i] = True
            assert sees[b, i].equal(expected), (b, i)
            assert int(tree.depths[b, i]) == int(sees[b, i].sum()) - 1
            if i:
                assert parent < i
            if parent >= 0:
                children.setdefault(parent, []).append(i)
        for i in range(tree.num_nodes):
            found, child = [], int(tree.first_child[b, i])
            while child >= 0:
                found.append(child)
                child = int(tree.next_sibling[b, child])
            assert found == children.get(i, [])


def assert_equal(a, b):
    for name, x, y in zip(a.__dataclass_fields__, a.tensors(), b.tensors(), strict=True):
        assert x.long().equal(y.long()), name


@pytest.mark.parametrize("num_nodes", SIZES)
def test_case_03_visibility_is_right_beyond_one_word(backend, num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    batch = 1 if num_nodes == 1024 else 2
    pool = random_pool(generator, batch, num_nodes + 10)
    out = poisoned_tree(batch, num_nodes)
    tree = tree_build(*pool, out=out, backend=backend)
    assert tree is out
    assert tree.ancestors.shape[2] == num_words(num_nodes) == math.ceil(num_nodes / 32)
    assert_consistent(tree)
    assert tree.tokens[:, 0].equal(pool[3])


def test_ranks_by_score_then_lower_index(backend):
    scores = torch.tensor([[-1.0, -2.0, -2.0, -1.5, -2.0, -9.0]])
    slots = torch.tensor([[-1, -1, 0, 0, 3, 1]])
    tree = tree_build(
        scores, torch.arange(10, 16)[None], slots, torch.tensor([7]), 5, backend=backend
    )
    assert tree.pool_index.tolist() == [[-1, 0, 1, 2, 3]]  # slot 4 ties with 1 and 2, and is later
    assert tree.tokens.tolist() == [[7, 10, 11, 12, 13]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.first_child.tolist() == [[1, 3, -1, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 2, -1, 4, -1]]
    assert tree.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011]
    assert tree.status.tolist() == [0]


def test_keeps_exactly_the_best(backend):
    generator = torch.Generator().manual_seed(5)
    pool = random_pool(generator, 4, 60, absent=0.0)
    tree = tree_build(*pool, 20, backend=backend)
    assert tree.status.tolist() == [0] * 4
    for b in range(4):
        kept = {i for i in tree.pool_index[b].tolist() if i >= 0}
        scores = pool[0][b].tolist()
        worst = max((-scores[i], i) for i in kept)
        assert len(kept) == 19
        assert all((-scores[i], i) > worst for i in set(range(60)) - kept)


def test_a_pool_smaller_than_the_tree_leaves_absent_nodes(backend):
    scores = torch.tensor([[-1.0, math.nan, -math.inf, -0.5]])
    candidates = torch.tensor([[3, 4, 5, -1]])
    slots = torch.full((1, 4), -1)
    out = poisoned_tree(1, 6)
    tree = tree_build(scores, candidates, slots, torch.tensor([9]), out=out, backend=backend)
    assert tree.present().tolist() == [[True, True, False, False, False, False]]
    assert tree.tokens.tolist() == [[9, 3, 0, 0, 0, 0]]
    assert_consistent(tree)


def test_empty_pool_and_empty_batch(backend):
    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int64)

    tree = tree_build(torch.zeros(2, 0), ints(2, 0), ints(2, 0), ints(2), 3, backend=backend)
    assert tree.present().tolist() == [[True, False, False]] * 2
    empty = tree_build(torch.zeros(0, 4), ints(0, 4), ints(0, 4), ints(0), 3, backend=backend)
    assert empty.tokens.shape == (0, 3)


@pytest.mark.parametrize(
    "slot, bit",
    [
        (-2, TreeStatus.BAD_PARENT),
        (2, TreeStatus.BAD_PARENT),
        (3, TreeStatus.BAD_PARENT),
        (2**31 - 1, TreeStatus.BAD_PARENT),
        (-(2**63), TreeStatus.BAD_PARENT),
        (1, TreeStatus.MISSING_PARENT),
    ],
)
def test_case_02_malformed_parent_is_unlinked_and_harms_nobody_else(backend, slot, bit):
    scores = torch.full((3, 4), -1.0)
    scores[1, 1] = -math.inf
    candidates = torch.arange(12).view(3, 4)
    slots = torch.tensor([[-1, -1, 0, 2]]).repeat(3, 1)
    roots = torch.tensor([50, 51, 52])
    sound = tree_build(scores, candidates, slots, roots, 5, backend=backend)
    slots[1, 2] = slot
    tree = tree_build(scores, candidates, slots, roots, 5, backend=backend)
    assert tree.status.tolist() == [0, int(bit), 0]
    for b in (0, 2):
        for x, y in zip(tree.tensors(), sound.tensors(), strict=True):
            assert x[b].equal(y[b])
    # Slot 2 is node 2 of request 1, where slot 1 is absent; its own child stays under it.
    assert tree.parents[1].tolist() == [-1, 0, -1, 2, -1]
    assert tree.depths[1].tolist() == [0, 1, 1, 2, 0]
    assert tree.ancestors[1, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1101, 0]
    assert tree.first_child[1].tolist() == [1, -1, 3, -1, -1]
    assert tree.next_sibling[1].tolist() == [-1] * 5


def test_a_parent_that_was_not_kept_is_missing(backend):
    tree = tree_build(
        torch.tensor([[-5.0, -1.0, -1.0]]),
        torch.tensor([[1, 2, 3]]),
        torch.tensor([[-1, 0, -1]]),
        torch.tensor([0]),
        3,
        backend=backend,
    )
    assert tree.pool_index.tolist() == [[-1, 1, 2]]
    assert tree.parents.tolist() == [[-1, -1, 0]]
    assert tree.status.tolist() == [int(TreeStatus.MISSING_PARENT)]


def test_case_05_padded_and_shrunk_batches_leave_nothing_behind(backend):
    generator = torch.Generator().manual_seed(2)
    scores, candidates, slots, roots = random_pool(generator, 4, 50)
    out = poisoned_tree(4, 33)
    tree_build(scores, candidates, slots, roots, out=out, backend=backend)
    roots[2:] = -1
    tree_build(scores, candidates, slots, roots, out=out, backend=backend)
    fresh = poisoned_tree(2, 33)
    tree_build(scores[:2], candidates[:2], slots[:2], roots[:2], out=fresh, backend=backend)
    for x, y in zip(out.tensors(), fresh.tensors(), strict=True):
        assert x[:2].equal(y)
    assert not out.present()[2:].any() and not out.ancestors[2:].any()
    assert_consistent(out)


def test_case_11_batch_order_does_not_matter(backend):
    generator = torch.Generator().manual_seed(3)
    pool = random_pool(generator, 5, 40)
    order = torch.tensor([3, 0, 4, 1, 2])
    a = tree_build(*pool, 17, backend=backend)
    b = tree_build(*(t[order] for t in pool), 17, backend=backend)
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        assert x[order].equal(y)


def test_integer_widths_and_strides(backend, int_dtype):
    generator = torch.Generator().manual_seed(4)
    pool = random_pool(generator, 3, 40)
    expected = tree_build(*pool, 12, backend="reference")
    scores, candidates, slots, roots = pool
    wide = torch.full((3, 80), math.nan)
    wide[:, ::2] = scores
    strided = (wide[:, ::2], candidates.t().contiguous().t().to(int_dtype), slots.to(int_dtype))
    out = poisoned_tree(3, 12, int_dtype)
    tree_build(*strided, roots.to(int_dtype), out=out, backend=backend)
    assert_equal(out, expected)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), num_nodes=st.integers(1, 70), size=st.integers(0, 90))
def test_backends_agree_on_any_pool(backend, seed, num_nodes, size):
    rng = random.Random(seed)
    batch = rng.randint(1, 3)
    grid = [-math.inf, math.nan, math.inf, -0.0, 0.0, -1.0, -1.5, -2.0, -3.0]
    scores = torch.tensor([[rng.choice(grid) for _ in range(size)] for _ in range(batch)])
    slots = torch.tensor([[rng.randint(-3, size) for _ in range(size)] for _ in range(batch)])
    tokens = torch.tensor([[rng.randint(-1, 9) for _ in range(size)] for _ in range(batch)])
    roots = torch.tensor([rng.randint(-1, 9) for _ in range(batch)])
    pool = (scores.view(batch, size), tokens.view(batch, size).long())
    pool = (*pool, slots.view(batch, size).long(), roots)
    a = tree_build(*pool, num_nodes, backend="reference")
    assert_consistent(a)
    assert_equal(a, tree_build(*pool, out=poisoned_tree(batch, num_nodes), backend=backend))


@pytest.mark.parametrize("size, num_nodes", [(255, 64), (1024, 1024), (9000, 200), (20000, 1024)])
def test_large_pools_with_many_ties(backend, size, num_nodes):
    """Beyond what fits on chip; scores differ in few of their bits, or not at all."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(0, 3, (3, size), generator=generator).float()
    scores[1] = -1e-3 - 1e-9 * torch.randint(0, 500, (size,), generator=generator)
    scores[2] = torch.randn(size, generator=generator)
    candidates = torch.randint(-1, 1000, (3, size), generator=generator)
    slots = torch.randint(-1, size, (3, size), generator=generator)
    slots = torch.minimum(slots, torch.arange(size) - 1)
    pool = (scores, candidates, slots, torch.arange(3))
    expected = tree_build(*pool, num_nodes, backend="reference")
    assert_equal(expected, tree_build(*pool, num_nodes, backend=backend))


@pytest.mark.parametrize("num_nodes", [1, 4, 33, 256])
def test_chain(backend, num_nodes):
    tokens = torch.arange(2 * num_nodes).view(2, -1)
    tree = chain_tree(tokens, backend=backend)
    assert tree.tokens.equal(tokens)
    assert tree.parents.tolist() == [list(range(-1, num_nodes - 1))] * 2
    assert tree.depths.tolist() == [list(range(num_nodes))] * 2
    assert visible(tree)[0].equal(torch.ones(num_nodes, num_nodes).tril().bool())
    assert_consistent(tree)


def test_chain_padded_at_its_end(backend):
    tree = chain_tree(torch.tensor([[5, 6, -1, -1], [-1, 3, 4, 5]]), backend=backend)
    assert tree.present().tolist() == [[True, True, False, False], [False] * 4]
    assert tree.status.tolist() == [0, 0]
    assert_consistent(tree)


def test_static_tree_from_paths(backend):
    parents, ranks = tree_from_paths([(1,), (0,), (0, 0), (1, 2), (0, 1), (0, 0, 0)])
    assert parents == [-1, 0, 0, 1, 1, 2, 3]
    assert ranks == [0, 0, 1, 0, 1, 2, 0]
    tokens = torch.arange(7)[None]
    tree = link_tree(tokens, torch.tensor(parents), backend=backend)
    assert tree.tokens.equal(tokens) and tree.parents.tolist() == [parents]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert tree.status.tolist() == [0]
    assert_consistent(tree)


@pytest.mark.parametrize("paths", [[()], [(0,), (0,)], [(0, 0)], [(-1,)]])
def test_bad_paths(paths):
    with pytest.raises(ValueError, match="spec_kernels::tree_build: paths"):
        tree_from_paths(paths)


def test_link_tree_marks_malformed_parents(backend):
    parents = torch.tensor([[-1, 0, 2, 1], [-1, -1, 0, 7]])
    tree = link_tree(torch.arange(8).view(2, 4), parents, backend=backend)
    assert tree.status.tolist() == [1, 1]
    assert tree.parents.tolist() == [[-1, 0, -1, 1], [-1, -1, 0, -1]]
    assert_consistent(tree)


def sound_arguments():
    return {
        "scores": torch.zeros(2, 5),
        "candidates": torch.zeros(2, 5, dtype=torch.int64),
        "parent_slots": torch.full((2, 5), -1),
        "root_tokens": torch.zeros(2, dtype=torch.int64),
    }


BAD = {
    "scores": [torch.zeros(2, 5, dtype=torch.float64), torch.zeros(5), None],
    "candidates": [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 5)],
    "parent_slots": [torch.zeros(3, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int16)],
    "root_tokens": [torch.zeros(3, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(backend, name):
    for value in BAD[name]:
        with pytest.raises(ValueError, match=f"spec_kernels::tree_build: {name}: expected .*, got"):
            tree_build(**{**sound_arguments(), name: value}, num_nodes=4, backend=backend)


@pytest.mark.parametrize("num_nodes", [0, 1025, None])
def test_bad_sizes(backend, num_nodes):
    with pytest.raises(ValueError, match="num_nodes"):
        tree_build(**sound_arguments(), num_nodes=num_nodes, backend=backend)


@pytest.mark.parametrize("field", DraftTree.__dataclass_fields__)
def test_bad_outputs(backend, field):
    out = DraftTree.allocate(2, 4)
    setattr(out, field, getattr(out, field).float())
    with pytest.raises(ValueError, match=f"out.{field}"):
        tree_build(**sound_arguments(), num_nodes=4, out=out, backend=backend)


def test_raw_op_refuses_what_the_api_would(backend):
    if backend == "reference":
        pytest.skip("the reference leaves shapes to the API")
    op = raw_op("tree_build", backend)
    named = sound_arguments() | vars(DraftTree.allocate(2, 4))
    op(*named.values())
    for name, t in named.items():
        # Another batch; the shapes of all others follow from scores and tokens.
        blamed = {"scores": "candidates"}.get(name, name)
        wrong = torch.zeros(3, *t.shape[1:], dtype=t.dtype)
        with pytest.raises(
            RuntimeError, match=f"spec_kernels::tree_build: {blamed}: expected shape"
        ):
            op(*(named | {name: wrong}).values())


def test_opcheck():
    pool = random_pool(torch.Generator().manual_seed(1), 2, 20)
    out = DraftTree.allocate(2, 9)
    tree_build(*pool, out=out)
    torch.library.opcheck(torch.ops.spec_kernels.tree_build.default, (*pool, *out.tensors()))


def test_compiles_without_graph_breaks():
    pool = random_pool(torch.Generator().manual_seed(1), 2, 20)

    def step(*pool):
        tree = tree_build(*pool, 9)
        return tree.tokens + 1, tree.ancestors, tree.first_child

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*pool)
    for x, y in zip(got, step(*pool), strict=True):
        assert x.equal(y)


def test_outputs_stand_apart(backend):
    scores, ids = torch.zeros(1, 4), torch.arange(4, dtype=torch.int32)[None]
    slots, root = torch.full((1, 4), -1), torch.tensor([7])
    tree = DraftTree.allocate(1, 5)
    tree.parents = tree.depths
    with pytest.raises(ValueError, match="parents: expected memory apart from depths"):
        tree_build(scores, ids, slots, root, out=tree, backend=backend)
    tree = DraftTree.allocate(1, 4)
    tree.parents = scores.view(torch.int32)
    with pytest.raises(ValueError, match="parents: expected memory apart from scores"):
        tree_build(scores, ids, slots, root, out=tree, backend=backend)


@pytest.mark.parametrize("name", ["candidates", "root_tokens"])
def test_ids_are_not_cut(backend, name):
    arguments = {"candidates": torch.tensor([[3]]), "root_tokens": torch.tensor([7])}
    arguments[name].fill_(2**31)
    scores, slots = torch.zeros(1, 1), torch.tensor([[-1]])
    for raises in value_checks(backend):
        tree = poisoned_tree(1, 2)
        tree.tokens = tree.tokens.int()
        with value_out_of_range(f"{name}: expected ids that fit the int32", raises):
            tree_build(
                scores, arguments["candidates"], slots, arguments["root_tokens"],
                out=tree, backend=backend,
            )  # fmt: skip
        if backend not in ("reference", "cpu"):  # there the error came before anything was written
            assert tree.status.tolist() == [int(TreeStatus.BAD_TOKEN)]
            assert tree.present().tolist() == [[name == "candidates", False]]
            assert_consistent(tree)


@pytest.mark.skipif(not _library.LIBRARIES["cpu"].loaded, reason="the compiled kernel is meant")
def test_endless_pool_is_refused():
    pool = [
        torch.zeros((1, 1), dtype=t).expand(1, 2**40) for t in (torch.float32, *[torch.int32] * 2)
    ]
    with pytest.raises(ValueError, match="scores: expected at most"):
        tree_build(*pool, torch.tensor([7]), 4)
