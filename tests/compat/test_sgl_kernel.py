"""``compat.sgl_kernel``: SGLang's speculative ops, against oracles written from their contract."""

import importlib.util
import inspect
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_kernels.compat import sgl_kernel
from spec_kernels.compat.sgl_kernel import (
    ArgumentError,
    build_tree_kernel_efficient,
    reconstruct_indices_from_tree_mask,
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from spec_kernels.testing.compare import poisoned

PACKED_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


# ---- Building: an oracle that follows the pool's own definition.


def random_pool(rng, topk, depth, num_nodes, closed=True):
    """Entries of ``parent_list`` and the ascending slots of ``num_nodes - 1`` candidates.

    With ``closed`` every selected candidate's parent is selected too, as a reranked pool has it.
    """
    parent_list = [-1]
    slots = list(range(topk))
    previous = slots
    for step in range(1, depth):
        parents = rng.sample(previous, topk)
        parent_list += parents
        first = topk + (step - 1) * topk * topk
        previous = list(range(first, first + topk * topk))
        slots += previous
    selected = set()
    while len(selected) < num_nodes - 1:
        open_slots = [
            s
            for s in slots
            if s not in selected and (not closed or s < topk or parent_list[s // topk] in selected)
        ]
        selected.add(rng.choice(open_slots))
    return parent_list, sorted(selected)


def tree_of(parent_list, selected, topk):
    """(parents, ancestor sets): a node without its parent has None, and sees root and itself."""
    parents, sees = [None], [{0}]
    for i, slot in enumerate(selected, start=1):
        entry = slot // topk
        parent = 0
        if entry:
            wanted = parent_list[entry] if entry < len(parent_list) else -1
            parent = selected.index(wanted) + 1 if wanted in selected[: i - 1] else None
        parents.append(parent)
        sees.append({*sees[parent or 0], i})
    return parents, sees


def links_of(parents):
    first, following, last = [-1] * len(parents), [-1] * len(parents), {}
    for i, parent in enumerate(parents):
        if parent is None:
            continue
        if parent in last:
            following[last[parent]] = i
        else:
            first[parent] = i
        last[parent] = i
    return first, following


def link_outputs(batch, num_nodes):
    return [
        poisoned(batch * num_nodes, dtype=torch.int64),
        *(poisoned(batch, num_nodes, dtype=torch.int64) for _ in range(3)),
    ]


def packed_width(num_nodes):
    return 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4


def mask_for(mode, lens, num_nodes):
    """A mask as an engine prepares it, but poisoned wherever its content must not matter."""
    batch = len(lens)
    if mode == 0:
        size = num_nodes * (sum(lens) + batch * num_nodes)
        return torch.tensor([True, False]).repeat(size // 2 + 1)[:size].clone()
    if mode == 1:
        return torch.ones(batch * num_nodes * num_nodes, dtype=torch.bool)
    width = packed_width(num_nodes)
    words = (num_nodes + 31) // 32
    return torch.full((batch * num_nodes * words,), 0xA5, dtype=PACKED_TYPES[width])


def expected_mask(mode, before, lens, all_sees):
    """What ``before`` must have become."""
    num_nodes = len(all_sees[0])
    if mode == 2:
        width = packed_width(num_nodes)
        row_bytes = width * ((num_nodes + 31) // 32)
        rows = b"".join(
            sum(1 << j for j in row).to_bytes(row_bytes, "little") for s in all_sees for row in s
        )
        return torch.frombuffer(bytearray(rows), dtype=PACKED_TYPES[width])
    after, place = before.clone(), 0
    for length, sees in zip(lens, all_sees, strict=True):
        for row in sees:
            place += length if mode == 0 else 0
            for j in range(num_nodes):
                after[place] = j in row
                place += 1
    assert place == after.numel()
    return after


def check_build(rng, topk, depth, num_nodes, lens, mode, closed=True):
    batch = len(lens)
    pools = [random_pool(rng, topk, depth, num_nodes, closed) for _ in range(batch)]
    trees = [tree_of(*pool, topk) for pool in pools]
    outs = link_outputs(batch, num_nodes)
    mask = mask_for(mode, lens, num_nodes)
    wanted = expected_mask(mode, mask, lens, [sees for _, sees in trees])
    faulty = any(parents.count(None) > 1 for parents, _ in trees)
    arguments = (
        torch.tensor([p for p, _ in pools]).view(batch, -1),
        torch.tensor([s for _, s in pools], dtype=torch.int64).view(batch, -1),
        torch.tensor(lens),
        mask,
        *outs,
        topk,
        depth,
        num_nodes,
        mode,
    )
    if faulty:
        with pytest.warns(RuntimeWarning, match="nodes without their parent are left out"):
            build_tree_kernel_efficient(*arguments)
    else:
        build_tree_kernel_efficient(*arguments)
    assert mask.view(torch.uint8).equal(wanted.view(torch.uint8))
    positions, index, next_token, next_sibling = outs
    flat = list(range(batch * num_nodes))
    assert index.flatten().tolist() == flat
    depths = [[len(row) - 1 for row in sees] for _, sees in trees]
    assert positions.tolist() == [n + d for n, row in zip(lens, depths, strict=True) for d in row]
    links = [links_of(parents) for parents, _ in trees]
    assert next_token.tolist() == [first for first, _ in links]
    assert next_sibling.tolist() == [following for _, following in links]


def test_golden_build():
    """Worked by hand: two steps of two; children 4 of 0, and 5 of 1; then one of 4."""
    lens = torch.tensor([5, 0])
    # Slots 0, 1 | 2, 3 of slot 0, 4, 5 of slot 1 | 6, 7 of slot 3, 8, 9 of slot 4.
    parent_list = torch.tensor([[-1, 0, 1, 3, 4]] * 2)
    selected = torch.tensor([[0, 1, 3, 4, 7], [0, 2, 3, 6, 7]])
    mask = torch.ones(6 * (5 + 6) + 6 * 6, dtype=torch.bool)
    mask[0] = False  # a prefix cell that the caller filled so
    positions, index, first, following = link_outputs(2, 6)
    build_tree_kernel_efficient(
        parent_list, selected, lens, mask, positions, index, first, following, 2, 3, 6, 0
    )
    assert positions.tolist() == [5, 6, 6, 7, 7, 8, 0, 1, 2, 2, 3, 3]
    assert index.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert first.tolist() == [[1, 3, 4, 5, -1, -1], [1, 2, -1, 4, -1, -1]]
    assert following.tolist() == [[-1, 2, -1, -1, -1, -1], [-1, -1, 3, -1, 5, -1]]
    rows = mask[:66].view(6, 11)
    assert not rows[0, 0] and rows[0, 1:5].all() and rows[1:, :5].all()
    assert rows[:, 5:].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    assert mask[66:].view(6, 6).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 128, 200])
def test_case_03_masks_of_every_mode_and_size(num_nodes, mode):
    rng = random.Random(num_nodes)
    topk = 2 if num_nodes <= 32 else 10
    depth = 1 if num_nodes <= 3 else 9 if num_nodes <= 32 else 4
    check_build(rng, topk, depth, num_nodes, [3, 0, 12], mode)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_pools(seed):
    rng = random.Random(seed)
    topk, depth = rng.randint(1, 5), rng.randint(1, 5)
    size = topk + (depth - 1) * topk * topk
    num_nodes = rng.randint(1, min(size, 40) + 1)
    lens = [rng.randint(0, 9) for _ in range(rng.randint(0, 3))] or [4]
    check_build(rng, topk, depth, num_nodes, lens, rng.randrange(3), closed=rng.random() < 0.7)


def test_case_02_a_missing_parent_leaves_other_requests_alone():
    """Node 2 of request 0 hangs on slot 1, which was not selected."""
    parent_list, lens = torch.tensor([[-1, 0, 1]] * 2), torch.tensor([2, 2])
    selected = torch.tensor([[0, 4], [1, 4]])
    positions, index, first, following = link_outputs(2, 3)
    mask = torch.zeros(2 * 9, dtype=torch.bool)
    with pytest.warns(RuntimeWarning, match=r"requests \[0\]"):
        build_tree_kernel_efficient(
            parent_list, selected, lens, mask, positions, index, first, following, 2, 2, 3, 1
        )
    assert first.tolist() == [[1, -1, -1], [1, 2, -1]]
    assert following.eq(-1).all()
    assert mask.view(2, 3, 3)[:, 2].int().tolist() == [[1, 0, 1], [1, 1, 1]]
    assert positions.tolist() == [2, 3, 3, 2, 3, 4]


@pytest.mark.parametrize("slot", [-1, -7, 6, 10**12])
def test_case_02_slots_outside_the_pool(slot):
    parent_list, lens = torch.tensor([[-1, 0, 1]]), torch.tensor([2])
    positions, index, first, following = link_outputs(1, 3)
    mask = torch.zeros(9, dtype=torch.bool)
    with pytest.warns(RuntimeWarning):
        build_tree_kernel_efficient(
            parent_list, torch.tensor([[0, slot]]), lens, mask, positions, index, first, following,
            2, 2, 3, 1,
        )  # fmt: skip
    assert first.tolist() == [[1, -1, -1]] and following.eq(-1).all()


def test_case_02_a_parent_outside_the_pool_is_no_slot_outside_the_pool():
    """Node 1 stands at slot -1; node 2 hangs on an entry that the list does not have."""
    positions, index, first, following = link_outputs(1, 3)
    mask = torch.zeros(9, dtype=torch.bool)
    with pytest.warns(RuntimeWarning):
        build_tree_kernel_efficient(
            torch.tensor([[-1, 0, 1]]), torch.tensor([[-1, 6]]), torch.tensor([2]), mask, positions,
            index, first, following, 2, 2, 3, 1,
        )  # fmt: skip
    assert first.eq(-1).all() and following.eq(-1).all()
    assert mask.view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def build_arguments(mode=0, num_nodes=3, size=None, dtype=torch.bool):
    outs = link_outputs(1, num_nodes)
    sizes = {0: num_nodes * (4 + num_nodes), 1: num_nodes**2, 2: num_nodes}
    names = list(inspect.signature(build_tree_kernel_efficient).parameters)
    values = [
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2]]), torch.tensor([4]),
        torch.zeros(sizes[mode] if size is None else size, dtype=dtype), *outs, 2, 2, num_nodes,
        mode,
    ]  # fmt: skip
    return dict(zip(names, values, strict=True))


def test_masks_may_be_kept_larger_and_as_bytes():
    """Engines keep one mask for the largest batch, as uint8."""
    for mode in (0, 1, 2):
        exact = build_arguments(mode, dtype=torch.uint8)
        large = build_arguments(mode, size=100, dtype=torch.uint8)
        large["tree_mask"].fill_(7)
        build_tree_kernel_efficient(**exact)
        build_tree_kernel_efficient(**large)
        size = exact["tree_mask"].numel()
        head = large["tree_mask"][:size].clone()
        if mode == 0:
            assert head.view(3, 7)[:, :4].eq(7).all()
            head.view(3, 7)[:, :4] = 0
        assert head.equal(exact["tree_mask"])
        assert large["tree_mask"][size:].eq(7).all()


ABSURD = [2**31, 2**61, 2**61 - 3, 2**62, 2**63 - 1, 2**63 - 3]  # n (seq + n) passes 64 bits


@pytest.mark.parametrize("length", ABSURD)
def test_lengths_beyond_the_mask_are_refused(length):
    arguments = build_arguments(0) | {"verified_seq_len": torch.tensor([length])}
    with pytest.raises(RuntimeError, match="tree_mask: expected at least"):
        build_tree_kernel_efficient(**arguments)
    assert not arguments["tree_mask"].any()


@pytest.mark.parametrize("length", [-1, -9, -(2**63), *ABSURD])
@pytest.mark.parametrize("first", [0, 1])
def test_a_request_beyond_the_mask_writes_nothing_where_lengths_are_not_read(
    length, first, monkeypatch
):
    """As on a device, where reading them would wait: the other requests' rows stay right."""
    monkeypatch.setattr(sgl_kernel, "_readable", lambda t: False)
    alone = build_arguments(0, size=27, dtype=torch.uint8)
    alone["verified_seq_len"] = torch.tensor([first])
    both = build_arguments(0, size=27, dtype=torch.uint8)
    for arguments in (alone, both):
        arguments["tree_mask"].fill_(7)
    for name in ("parent_list", "selected_index"):
        both[name] = both[name].repeat(2, 1)
    both["verified_seq_len"] = torch.tensor([first, length])
    outs = [name for name in both if name.startswith(("positions", "retr"))]
    both |= dict(zip(outs, link_outputs(2, 3), strict=True))
    build_tree_kernel_efficient(**alone)
    build_tree_kernel_efficient(**both)
    assert both["tree_mask"].equal(alone["tree_mask"])


def test_an_engine_without_deeper_steps_gives_no_parent_list():
    arguments = build_arguments(1) | {"depth": 1, "selected_index": torch.tensor([[0, 1]])}
    for dtype in (torch.int64, torch.float32):
        arguments["parent_list"] = torch.empty(1, 0, dtype=dtype)
        build_tree_kernel_efficient(**arguments)
        assert arguments["retrive_next_token"].tolist() == [[1, -1, -1]]
        assert arguments["retrive_next_sibling"].tolist() == [[-1, 2, -1]]


BAD_BUILD = {
    "parent_list": [torch.zeros(1, 2).long(), torch.zeros(1, 3).int(), torch.zeros(3).long()],
    "selected_index": [torch.zeros(1, 3).long(), torch.zeros(1, 2).int()],
    "verified_seq_len": [torch.tensor([4]).int(), torch.tensor([-1]), torch.tensor(4), 4],
    "tree_mask": [
        torch.zeros(20).bool(), torch.zeros(21), torch.zeros(21).int(),
        torch.zeros(42).bool()[::2], None,
    ],
    "positions": [torch.zeros(2).long(), torch.zeros(3).int(), torch.zeros(6).long()[::2]],
    "retrive_index": [torch.zeros(1, 3).int(), torch.zeros(3).long()],
    "retrive_next_token": [torch.zeros(1, 3).int(), torch.zeros(1, 6).long()[:, ::2]],
    "retrive_next_sibling": [torch.zeros(1, 3), torch.zeros(1, 4).long()],
    "topk": [0],
    "depth": [0, 3],
    "draft_token_num": [0, 2, 1025],
    "tree_mask_mode": [3, -1],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BUILD)
def test_build_refuses_bad_arguments(name):
    for value in BAD_BUILD[name]:
        arguments = build_arguments() | {name: value}
        with pytest.raises(RuntimeError, match="spec_kernels::build_tree_kernel_efficient: "):
            build_tree_kernel_efficient(**arguments)
        poison = torch.iinfo(torch.int64).max // 2
        for output in ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling"):
            if output != name:
                assert arguments[output].eq(poison).all(), (value, output)
    short = build_arguments(2, size=2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="tree_mask: expected at least 3 bytes, got 2"):
        build_tree_kernel_efficient(**short)


# ---- From a mask.


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_reconstruct_is_the_inverse_of_build(seed):
    rng = random.Random(seed)
    batch, num_nodes = rng.randint(1, 3), rng.choice([1, 2, 5, 31, 33, 70])
    lens = [rng.randint(0, 9) for _ in range(batch)]
    rows, all_parents = [], []
    for _ in range(batch):
        parents, sees = [None], [{0}]
        for i in range(1, num_nodes):
            alone = rng.random() < 0.05
            parents.append(None if alone else rng.randrange(i))
            sees.append({i} if alone else {*sees[parents[i]], i})
        all_parents.append(parents)
        rows.append([[j in row for j in range(num_nodes)] for row in sees])
    mask = torch.tensor(rows).flatten()
    outs = link_outputs(batch, num_nodes)
    reconstruct_indices_from_tree_mask(mask, torch.tensor(lens), *outs, batch, num_nodes)
    positions, index, first, following = outs
    assert index.flatten().tolist() == list(range(batch * num_nodes))
    depth = [n + sum(row) - 1 for n, request in zip(lens, rows, strict=True) for row in request]
    assert positions.tolist() == depth
    links = [links_of(parents) for parents in all_parents]
    assert first.tolist() == [a for a, _ in links]
    assert following.tolist() == [b for _, b in links]


def test_reconstruct_reads_nothing_above_the_diagonal():
    rows = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    for mask in (rows, rows | torch.ones(4, 4).triu(1).bool(), rows.byte()):
        positions, index, first, following = link_outputs(1, 4)
        reconstruct_indices_from_tree_mask(
            mask.flatten(), torch.tensor([12]), positions, index, first, following, 1, 4
        )
        assert positions.tolist() == [12, 13, 13, 14]
        assert first.tolist() == [[1, -1, 3, -1]]
        assert following.tolist() == [[-1, 2, -1, -1]]


def test_reconstruct_refuses_bad_arguments():
    outs = link_outputs(1, 4)
    mask, lens = torch.zeros(16).bool(), torch.tensor([3])
    for arguments, name in (
        ((mask[:15], lens, *outs, 1, 4), "tree_mask"),
        ((mask.float(), lens, *outs, 1, 4), "tree_mask"),
        ((mask, lens.int(), *outs, 1, 4), "verified_seq_len"),
        ((mask, lens, *outs, 2, 4), "batch_size"),
        ((mask, lens, *outs, 1, 5), "retrive_index"),
    ):
        with pytest.raises(RuntimeError, match=f": {name}: expected .*, got"):
            reconstruct_indices_from_tree_mask(*arguments)


# ---- Verifying.

GOLDEN = {
    "candidates": torch.tensor([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]]),
    "retrive_index": torch.arange(12).view(2, 6),
    "retrive_next_token": torch.tensor([[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]]),
    "retrive_next_sibling": torch.tensor([[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]]),
}
GOLDEN_PREDICT = torch.tensor([[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]])


def verify_outputs(poison=-1):
    return {
        "predicts": torch.full((12,), poison, dtype=torch.int32),
        "accept_index": torch.full((2, 4), poison, dtype=torch.int32),
        "accept_token_num": torch.full((2,), poison, dtype=torch.int32),
    }


def sampling_arguments(**changes):
    logits = torch.where(torch.nn.functional.one_hot(GOLDEN_PREDICT, 20) == 1, 10.0, 1.0)
    target = torch.softmax(logits / 0.01, -1)
    generator = torch.Generator().manual_seed(5)
    return {
        "uniform_samples": torch.rand(2, 6, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(2, generator=generator),
        "target_probs": target,
        "draft_probs": torch.zeros_like(target),
        **changes,
    }


def walks():
    """The two ops, on arguments that settle the same walk."""
    return (
        (verify_tree_greedy, {"target_predict": GOLDEN_PREDICT}),
        (tree_speculative_sampling_target_only, sampling_arguments()),
        (
            tree_speculative_sampling_target_only,
            sampling_arguments(threshold_single=0.0, threshold_acc=0.0, deterministic=True),
        ),
    )


@pytest.mark.parametrize("poison", [-1, 77])
def test_golden_walk(poison):
    """With thresholds 0 too: a draft of probability zero is never taken."""
    for function, what in walks():
        outs = verify_outputs(poison)
        assert function(**outs, **GOLDEN, **what) is None
        predicts = [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]
        assert outs["predicts"].tolist() == [poison if p == -1 else p for p in predicts]
        assert outs["accept_index"].tolist() == [[0, 3, 4, 5], [6, 10, 11, poison]]
        assert outs["accept_token_num"].tolist() == [3, 2]


def test_both_spellings_and_positions():
    for function, what in walks()[:2]:
        new = {name.replace("retrive", "retrieve"): t for name, t in GOLDEN.items()}
        outs = verify_outputs()
        function(**outs, **new, **what)
        by_place = verify_outputs()
        function(*by_place.values(), *GOLDEN.values(), *what.values())
        assert outs["predicts"].equal(by_place["predicts"])
        with pytest.raises(TypeError, match="both 'retrieve_index' and 'retrive_index'"):
            function(**outs, **new, retrive_index=GOLDEN["retrive_index"], **what)
    arguments = build_arguments()
    other = {name.replace("retrive", "retrieve"): v for name, v in build_arguments().items()}
    build_tree_kernel_efficient(**arguments)
    build_tree_kernel_efficient(**other)
    assert other["retrieve_next_token"].equal(arguments["retrive_next_token"])


SIGNATURES = {
    "build_tree_kernel_efficient": "parent_list selected_index verified_seq_len tree_mask "
    "positions retrive_index retrive_next_token retrive_next_sibling topk depth draft_token_num "
    "tree_mask_mode",
    "verify_tree_greedy": "predicts accept_index accept_token_num candidates retrive_index "
    "retrive_next_token retrive_next_sibling target_predict",
    "tree_speculative_sampling_target_only": "predicts accept_index accept_token_num candidates "
    "retrive_index retrive_next_token retrive_next_sibling uniform_samples "
    "uniform_samples_for_final_sampling target_probs draft_probs threshold_single threshold_acc "
    "deterministic",
    "reconstruct_indices_from_tree_mask": "tree_mask verified_seq_len positions retrive_index "
    "retrive_next_token retrive_next_sibling batch_size draft_token_num",
    "top_k_renorm_prob": "probs top_k",
    "top_k_renorm_probs": "probs top_k",
    "top_p_renorm_prob": "probs top_p",
    "top_p_renorm_probs": "probs top_p",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_argument_orders(name):
    parameters = inspect.signature(getattr(sgl_kernel, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    if name == "tree_speculative_sampling_target_only":
        assert [p.default for p in parameters.values()][-3:] == [1.0, 1.0, True]


@pytest.mark.parametrize("which", [0, 1])
def test_wrong_dtypes_are_runtime_errors(which):
    function, what = walks()[which]
    arguments = {**verify_outputs(), **GOLDEN, **what}
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        others = {torch.int32: torch.int64, torch.int64: torch.int32}
        wrong = value.to(others.get(value.dtype, torch.float64))
        place = f"spec_kernels::{function.__name__}: "
        fewer = value[:1] if value.dim() > 1 else value[None]
        for bad, message in ((wrong, f"{name}: "), (None, f"{name}: "), (fewer, "")):
            with pytest.raises(RuntimeError, match=place + message) as error:
                function(**{**arguments, name: bad})
            assert isinstance(error.value, ValueError) and error.type is ArgumentError
    assert arguments["predicts"].eq(-1).all() and arguments["accept_token_num"].eq(-1).all()


def test_thresholds_outside_0_to_1_are_refused():
    for name in ("threshold_single", "threshold_acc"):
        for value in (-0.5, 1.5):
            with pytest.raises(RuntimeError, match=f"{name}: expected 0 to 1"):
                tree_speculative_sampling_target_only(
                    **verify_outputs(), **GOLDEN, **sampling_arguments(**{name: value})
                )


def test_faults_of_values_raise_here():
    """The rest of the batch is settled all the same."""
    for function, what in walks()[:2]:
        outs = verify_outputs()
        links = GOLDEN["retrive_next_token"].clone()
        links[0, 3] = 40
        with pytest.raises(RuntimeError, match=r"requests \[0\]: .*BAD_LINK"):
            function(**outs, **{**GOLDEN, "retrive_next_token": links}, **what)
        assert outs["accept_token_num"].tolist() == [1, 2]
        assert outs["predicts"].tolist()[6:] == [11, -1, -1, -1, 12, 18]
    target = torch.zeros(2, 6, 20)
    with pytest.raises(RuntimeError, match=r"requests \[0, 1\]: .*NO_TOKEN"):
        tree_speculative_sampling_target_only(
            **verify_outputs(), **GOLDEN, **sampling_arguments(target_probs=target)
        )


def test_case_01_probability_zero_is_never_accepted():
    target = torch.zeros(2, 6, 20)
    target[..., 18] = 1.0
    coins = torch.zeros(2, 6)
    for options in ({}, {"threshold_single": 0.0, "threshold_acc": 0.0}):
        outs = verify_outputs()
        tree_speculative_sampling_target_only(
            **outs, **GOLDEN,
            **sampling_arguments(
                target_probs=target, uniform_samples=coins,
                uniform_samples_for_final_sampling=coins[:, 0], **options,
            ),
        )  # fmt: skip
        assert outs["accept_token_num"].tolist() == [0, 0]
        assert outs["predicts"].tolist() == [18, *[-1] * 5] * 2


def test_case_06_zero_drafts_accepted_still_emit_the_bonus():
    outs = verify_outputs()
    verify_tree_greedy(**outs, **GOLDEN, target_predict=torch.full((2, 6), 17))
    assert outs["accept_index"].tolist() == [[0, -1, -1, -1], [6, -1, -1, -1]]
    assert outs["accept_token_num"].tolist() == [0, 0]
    assert outs["predicts"].tolist() == [17, *[-1] * 5] * 2


def test_draft_probs_are_subtracted_and_left_as_found():
    target = torch.full((2, 6, 20), 0.05)
    draft = target.clone()
    draft[:, 0, 7] = 0.0  # all that is left of the root's row
    found = draft.clone()
    outs = verify_outputs()
    what = sampling_arguments(
        target_probs=target, draft_probs=draft, uniform_samples=torch.full((2, 6), 0.99)
    )
    tree_speculative_sampling_target_only(**outs, **GOLDEN, **what)
    assert outs["accept_token_num"].tolist() == [0, 0]
    assert outs["predicts"][[0, 6]].tolist() == [7, 7]
    assert draft.equal(found)


def oracle_sampling(b, arguments, columns):
    """One request, by the rule as its users know it: (path, tokens), in float64."""
    target, coins = arguments["target_probs"][b].double(), arguments["uniform_samples"][b]
    path, tokens = [0], []
    while True:
        node, taken, rejected = path[-1], None, []
        child = int(arguments["retrive_next_token"][b, node]) if len(path) < columns else -1
        total = 0.0
        while child != -1 and taken is None:
            token = int(arguments["candidates"][b, child])
            total += float(target[node, token])
            if float(coins[node]) < total:
                taken = child
            else:
                rejected.append(token)
                child = int(arguments["retrive_next_sibling"][b, child])
        if taken is None:
            left = target[node].clone()
            left[rejected] = 0.0
            final = float(arguments["uniform_samples_for_final_sampling"][b])
            cumulative = left.cumsum(0)
            tokens.append(int((cumulative <= final * float(cumulative[-1])).sum()))
            return path, tokens
        path.append(taken)
        tokens.append(int(arguments["candidates"][b, taken]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_sampling_against_the_oracle(seed):
    """From build to verify, on trees whose siblings carry distinct tokens."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    batch, vocab, topk, depth = 3, 11, rng.randint(1, 3), rng.randint(1, 4)
    size = topk + (depth - 1) * topk * topk
    num_nodes = rng.randint(1, min(size, 12) + 1)
    pools = [random_pool(rng, topk, depth, num_nodes) for _ in range(batch)]
    positions, index, first, following = link_outputs(batch, num_nodes)
    build_tree_kernel_efficient(
        torch.tensor([p for p, _ in pools]).view(batch, -1),
        torch.tensor([s for _, s in pools], dtype=torch.int64).view(batch, -1),
        torch.tensor([4] * batch), torch.zeros(batch * num_nodes**2, dtype=torch.bool),
        positions, index, first, following, topk, depth, num_nodes, 1,
    )  # fmt: skip
    # Ranks differ among siblings, so do tokens.
    ranks = torch.tensor([[0, *(s % topk for s in slots)] for _, slots in pools])
    logits = torch.randn(batch, num_nodes, vocab, generator=generator) * 2
    arguments = {
        "candidates": ranks + 3,
        "retrive_index": index,
        "retrive_next_token": first,
        "retrive_next_sibling": following,
        "uniform_samples": torch.rand(batch, num_nodes, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": torch.softmax(logits, -1),
        "draft_probs": torch.zeros_like(logits),
    }
    columns = depth + 1
    predicts = torch.full((batch * num_nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((batch, columns), -1, dtype=torch.int32)
    count = torch.full((batch,), -1, dtype=torch.int32)
    tree_speculative_sampling_target_only(predicts, accept_index, count, **arguments)
    for b in range(batch):
        path, tokens = oracle_sampling(b, arguments, columns)
        flat = [b * num_nodes + node for node in path]
        assert accept_index[b].tolist() == flat + [-1] * (columns - len(flat))
        assert int(count[b]) == len(path) - 1
        assert predicts[flat].tolist() == tokens
        rest = [i for i in range(b * num_nodes, (b + 1) * num_nodes) if i not in flat]
        assert predicts[rest].eq(-1).all()


# ---- Renormalising.


def test_top_k_keeps_ties_and_renormalises():
    probs = torch.tensor([[0.1, 0.3, 0.2, 0.2, 0.2], [0.5, 0.25, 0.25, 0.0, 0.0]])
    third = [0.0, 3 / 9, 2 / 9, 2 / 9, 2 / 9]
    for k in (2, torch.tensor([2, 2]), torch.tensor([2, 2], dtype=torch.int32)):
        got = top_k_renorm_prob(probs, k)
        torch.testing.assert_close(got, torch.tensor([third, [0.5, 0.25, 0.25, 0.0, 0.0]]))
    got = top_k_renorm_prob(probs, torch.tensor([1, 1 << 30]))
    torch.testing.assert_close(got, torch.stack((torch.tensor([0, 1.0, 0, 0, 0]), probs[1])))
    assert top_k_renorm_prob(probs * 2, 5).equal(probs * 2)  # k = V: as it is
    assert sgl_kernel.top_k_renorm_probs(probs, 1).equal(top_k_renorm_prob(probs, 1))


def test_top_p_keeps_ties_and_renormalises():
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125], [0.25, 0.25, 0.25, 0.25]])
    for p, first in (
        (0.0, [0, 1.0, 0, 0]),
        (0.5, [0, 1.0, 0, 0]),
        (0.51, [0, 2 / 3, 1 / 3, 0]),
        (0.75, [0, 2 / 3, 1 / 3, 0]),
        (0.76, [0.125, 0.5, 0.25, 0.125]),  # both eighths: they are equal
        (1.0, [0.125, 0.5, 0.25, 0.125]),
    ):
        for limit in (p, torch.full((2,), p)):
            got = top_p_renorm_prob(probs, limit)
            torch.testing.assert_close(got, torch.stack((torch.tensor(first), probs[1])))
    above = torch.tensor([[0.75, 0.5, 0.75]])  # reaches 1 before its end
    torch.testing.assert_close(top_p_renorm_prob(above, 1.0), above / 2)
    got = top_p_renorm_prob(probs * 0.5, torch.tensor([0.9, 1.0]))
    torch.testing.assert_close(got, probs)  # the mass never reaches top_p: everything stays
    assert sgl_kernel.top_p_renorm_probs(probs, 0.3).equal(top_p_renorm_prob(probs, 0.3))


@pytest.mark.parametrize("seed", range(10))
def test_renormalising_against_definitions(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(4, 300, generator=generator) * 3, -1)
    probs[1] = (probs[1] * 64).round() / 64  # many ties, many zeros
    k = torch.tensor([1, 7, 299, 300])
    p = torch.tensor([0.1, 0.5, 0.9, 0.999])
    by_k, by_p = top_k_renorm_prob(probs, k), top_p_renorm_prob(probs, p)
    for row in range(4):
        values = sorted(probs[row].tolist(), reverse=True)
        least = values[int(k[row]) - 1]
        kept = [v if v >= least else 0.0 for v in probs[row].tolist()]
        total = math.fsum(kept)
        exact = [v / total for v in kept] if k[row] < 300 else kept
        torch.testing.assert_close(by_k[row], torch.tensor(exact), rtol=1e-6, atol=0)
        distinct = sorted(set(values), reverse=True)
        mass = {v: math.fsum(x for x in values if x >= v) for v in distinct}
        least = next((v for v in distinct if mass[v] >= float(p[row])), 0.0)
        kept = [v if v >= least else 0.0 for v in probs[row].tolist()]
        exact = [v / math.fsum(kept) for v in kept]
        torch.testing.assert_close(by_p[row], torch.tensor(exact), rtol=1e-6, atol=0)


def test_renormalising_other_types_and_refusals():
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    for dtype in (torch.bfloat16, torch.float16):
        assert top_k_renorm_prob(probs.to(dtype), 1).dtype == torch.float32
        assert top_p_renorm_prob(probs.to(dtype), 0.2).tolist() == [[1.0, 0.0, 0.0]]
    assert top_k_renorm_prob(torch.zeros(2, 3), 2).eq(0).all()
    for function, limits in (
        (top_k_renorm_prob, (0, -3, torch.tensor([0]), torch.tensor([1.0]), torch.tensor([1, 2]))),
        (top_k_renorm_prob, (1 << 63, -(1 << 63) - 1, 10**30, 2.5, math.inf, math.nan, True)),
        (top_k_renorm_prob, ("3", None, torch.tensor([-(1 << 63)]))),
        (top_p_renorm_prob, (torch.tensor([0.5]).double(), torch.tensor([1]))),
        (top_p_renorm_prob, (math.nan, 10**400, "0.5", None, True)),
    ):
        for limit in limits:
            with pytest.raises(RuntimeError, match=f"{function.__name__}: top_[kp]: expected"):
                function(probs, limit)
        for bad in (probs[0], probs.double(), probs.int(), None, probs[:, :0]):
            with pytest.raises(RuntimeError, match=f"{function.__name__}: probs: expected"):
                function(bad, 1)


# ---- The whole path.


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_graph_breaks(mode, dynamic):
    def step(mask, parent_list, selected, lens, target):
        outs = [torch.empty(6, dtype=torch.int64), *torch.empty(3, 2, 3, dtype=torch.int64)]
        mask = mask.clone()
        build_tree_kernel_efficient(parent_list, selected, lens, mask, *outs, 2, 2, 3, mode)
        predicts = torch.full((6,), -1, dtype=torch.int32)
        accept = torch.full((2, 3), -1, dtype=torch.int32)
        count = torch.zeros(2, dtype=torch.int32)
        verify_tree_greedy(predicts, accept, count, selected.new_ones(2, 3), *outs[1:], target)
        return mask, predicts, accept, count

    arguments = (
        torch.zeros(50, dtype=torch.uint8),
        torch.tensor([[-1, 0, 1]] * 2),
        torch.tensor([[0, 2], [0, 1]]),
        torch.tensor([4, 5]),
        torch.ones(2, 3, dtype=torch.int64),
    )
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*arguments)
    for x, y in zip(compiled, step(*arguments), strict=True):
        assert x.equal(y)


def on(device, arguments):
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}


@pytest.mark.gpu
def test_cuda_tensors_give_what_cpu_tensors_give():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    calls = [(build_tree_kernel_efficient, build_arguments(mode)) for mode in (0, 1)]
    calls.append((build_tree_kernel_efficient, build_arguments(2, dtype=torch.uint8)))
    calls += [(function, {**verify_outputs(), **GOLDEN, **what}) for function, what in walks()]
    for function, arguments in calls:
        here, there = on("cpu", arguments), on("cuda", arguments)
        function(**here)
        function(**there)
        for name, t in here.items():
            if isinstance(t, torch.Tensor):
                assert t.equal(there[name].cpu()), (function.__name__, name)
    probs = torch.softmax(torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 3, -1)
    for function, limit in (
        (top_k_renorm_prob, 7),
        (top_k_renorm_prob, torch.tensor([1, 7, 500])),
        (top_p_renorm_prob, 0.8),
        (top_p_renorm_prob, torch.tensor([0.1, 0.9, 1.0])),
    ):
        there = limit.cuda() if isinstance(limit, torch.Tensor) else limit
        torch.testing.assert_close(function(probs.cuda(), there).cpu(), function(probs, limit))


@pytest.mark.gpu
def test_against_sgl_kernel():
    """The original on the same inputs, where it is installed and there is a GPU to run it."""
    if importlib.util.find_spec("sgl_kernel") is None:
        pytest.skip("sgl_kernel is not installed")
    if not torch.cuda.is_available():
        pytest.skip("sgl_kernel needs a GPU")
    original = importlib.import_module("sgl_kernel")
    for ours, theirs, what in (
        (verify_tree_greedy, original.verify_tree_greedy, walks()[0][1]),
        (
            tree_speculative_sampling_target_only,
            original.tree_speculative_sampling_target_only,
            walks()[1][1],
        ),
    ):
        results = []
        for function in (ours, theirs):
            outs = {name: t.cuda() for name, t in verify_outputs().items()}
            inputs = {name: t.cuda() for name, t in {**GOLDEN, **what}.items()}
            spelt = inspect.signature(function).parameters
            if "retrieve_index" in spelt:
                inputs = {n.replace("retrive", "retrieve"): t for n, t in inputs.items()}
            function(**outs, **inputs)
            results.append(outs)
        for name in results[0]:
            assert results[0][name].equal(results[1][name]), name
