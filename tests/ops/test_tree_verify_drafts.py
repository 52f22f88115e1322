"""``tree_verify`` on drafts that were drawn from q, and its lossy form: typical acceptance.

That the text keeps the target's distribution is shown by enumeration: every draw of the drafts and
every outcome of the walk, each with its exact probability. An oracle stands in for the coins and
takes all sides of each toss in turn; the walk under it is the reference's own, whose bits the
compiled kernels share.
"""

import itertools
import math
import random

import pytest
import torch

from spec_kernels import Purpose, Verified, VerifyStatus, link_tree, tree_verify
from spec_kernels.ops.tree_verify import reference
from spec_kernels.ops.tree_verify.reference import (
    COIN_BITS,
    MAX_REJECTIONS,
    accepting_coins,
    coin,
    draft_weights,
    residual,
    token_weights,
    typical_limit,
)
from spec_kernels.testing.compare import poisoned, raw_op

BACKENDS = ("reference", "cpu", "cuda_on_host")
NUM_COINS = 1 << COIN_BITS
# At position 6 these seeds give the smallest and the greatest coin of the first sibling.
EXTREME_SEEDS = [3373966, 9854617]
INF = math.inf


def links_of(tree):
    return {n: getattr(tree, n) for n in ("tokens", "first_child", "next_sibling")}


def star(tokens):
    """Requests whose drafts ``[B, k]`` all hang under the root, in this order."""
    tokens = torch.as_tensor(tokens)
    tokens = torch.cat((torch.zeros(len(tokens), 1, dtype=torch.int64), tokens), 1)
    return links_of(link_tree(tokens, torch.tensor([-1] + [0] * (tokens.shape[1] - 1))))


def sampling(batch, temperature=1.0, **values):
    kinds = {"top_k": torch.int64}
    arguments = {n: torch.full((batch,), v, dtype=kinds.get(n)) for n, v in values.items()}
    return {
        "temperature": torch.full((batch,), temperature),
        "seeds": torch.arange(batch),
        "context_lens": torch.full((batch,), 5),
        **arguments,
    }


def log(p):
    return torch.tensor(p).log()


def verify_star(p, q, drafts, *, batch=None, backend=None, **kwargs):
    """``p`` at every node and ``q`` at the root, for requests that differ in their seeds alone."""
    drafts = torch.as_tensor(drafts)
    drafts = drafts.expand(batch or len(drafts), -1)
    batch, nodes = len(drafts), drafts.shape[1] + 1
    logits = log(p).expand(batch, nodes, -1)
    q = torch.as_tensor(q).expand(batch, nodes, -1)
    arguments = {**sampling(batch), **star(drafts), **kwargs}
    return tree_verify(logits, draft_probs=q, **arguments, backend=backend)


def assert_equal(a, b):
    for name in ("accept_index", "num_accepted", "tokens", "status"):
        assert getattr(a, name).long().equal(getattr(b, name).long()), name


# ---- Exact enumeration.


class Oracle:
    """Stands for the coins: replays a list of sides, then takes the first side of every toss."""

    def __init__(self, replayed):
        self.sides, self.options = list(replayed), []

    def toss(self, options):
        """One of ``options`` [(value, probability)], the impossible ones left out."""
        options = [o for o in options if o[1] > 0]
        if len(self.options) == len(self.sides):
            self.sides.append(0)
        self.options.append(options)
        return options[self.sides[len(self.options) - 1]][0]

    @property
    def probability(self):
        return math.prod(o[s][1] for o, s in zip(self.options, self.sides, strict=True))

    def following(self):
        """The sides to replay next, or None when all were taken."""
        sides = list(self.sides)
        while sides and sides[-1] + 1 == len(self.options[len(sides) - 1]):
            sides.pop()
        return None if not sides else [*sides[:-1], sides[-1] + 1]


def shares(weights):
    """How many coins choose each id, over their number: [(id, probability)]."""
    total, below, found = int(weights.sum()), 0, []
    for token, cumulative in enumerate(weights.cumsum(0).tolist()):
        # The coins with coin * total / 2^24 below the cumulative weight, rounded down as in sample.
        until = min(NUM_COINS, -(-(cumulative << COIN_BITS) // total))
        found.append((token, (until - below) / NUM_COINS))
        below = until
    return found


def outcomes(monkeypatch, run):
    """{what ``run()`` returns: its probability}, over all coins of the reference's walk."""
    found, sides, limit_of = {}, [], reference.accepting_coins
    while sides is not None:
        oracle = Oracle(sides)

        def accept(*args, oracle=oracle):
            limit = limit_of(*args)
            share = limit / NUM_COINS
            return oracle.toss([(NUM_COINS, share), (0, 1 - share)])

        with monkeypatch.context() as patch:
            patch.setattr(reference, "accepting_coins", accept)
            patch.setattr(
                reference, "sample", lambda w, bits, oracle=oracle: oracle.toss(shares(w))
            )
            result = run()
        found[result] = found.get(result, 0.0) + oracle.probability
        sides = oracle.following()
    assert abs(sum(found.values()) - 1) < 1e-12
    return found


def test_the_oracle_counts_coins_as_sample_does():
    weights = torch.tensor([3, 0, 2**40, 12345, 7])
    count = dict(shares(weights))
    assert sum(count.values()) == 1
    below = 0
    for token, share in count.items():
        edges = {below, below + int(share * NUM_COINS) - 1}
        if share:
            assert {reference.sample(weights, bits) for bits in edges} == {token}
        below += int(share * NUM_COINS)


class Model:
    """A target and a drafter over a few tokens: logits that depend on the path alone."""

    def __init__(self, vocab, seed, **parameters):
        self.vocab, self.seed = vocab, seed
        self.parameters = {"temperature": 1.0, **parameters}

    def _rows(self, path, kind):
        key = hash((self.seed, kind, *path)) % 2**31
        return torch.randn(self.vocab, generator=torch.Generator().manual_seed(key))

    def logits(self, path):
        return self._rows(path, 0) * 1.5

    def p(self, path):
        weights = token_weights(self.logits(path), **self.parameters).double()
        return (weights / weights.sum()).tolist()

    def q(self, path):
        """Near the target in part; a token that is never drafted now and then."""
        q = (0.5 * self.logits(path) + self._rows(path, 1)).softmax(0)
        if self.vocab > 3 and sum(path) % 2:
            q[sum(path) % self.vocab] = 0.0
        return q


def draws(q, count):
    """Ordered draws without replacement: [(tokens, probability)]."""
    weights = draft_weights(q)[0].tolist()
    for tokens in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, sum(weights)
        for token in tokens:
            probability *= weights[token] / left if left else 0.0
            left -= weights[token]
        if probability > 0:
            yield tokens, probability


def trees(model, parents):
    """Every tree of this shape that the drafter can draw: (tokens, paths, probability)."""
    children = [[n for n, above in enumerate(parents) if above == node] for node in
                range(len(parents))]  # fmt: skip

    def grow(node, tokens, paths, probability):
        if node == len(parents):
            yield tokens, paths, probability
            return
        if not children[node]:
            yield from grow(node + 1, tokens, paths, probability)
            return
        for drawn, share in draws(model.q(paths[node]), len(children[node])):
            more = dict(zip(children[node], drawn, strict=True))
            longer = {n: (*paths[node], x) for n, x in more.items()}
            yield from grow(node + 1, {**tokens, **more}, {**paths, **longer}, probability * share)

    yield from grow(0, {0: 0}, {0: ()}, 1.0)


def emitted_distribution(monkeypatch, model, parents, length):
    """Distribution of the next ``length`` tokens: a cycle's own, then the target's."""
    joint, num_nodes = {}, len(parents)
    for tokens, paths, share in trees(model, parents):
        tree = link_tree(
            torch.tensor([[tokens[n] for n in range(num_nodes)]]), torch.tensor(parents)
        )
        arguments = {
            "logits": torch.stack([model.logits(paths[n]) for n in range(num_nodes)])[None],
            "draft_probs": torch.stack([model.q(paths[n]) for n in range(num_nodes)])[None],
            "context_lens": torch.tensor([3]),
            "seeds": torch.tensor([1]),
            **{n: torch.tensor([v]) for n, v in model.parameters.items()},
            **links_of(tree),
        }

        def run(arguments=arguments):
            got = tree_verify(**arguments, backend="reference")
            assert got.status.item() == 0
            return tuple(got.tokens[0, : int(got.num_accepted) + 1].tolist())

        for emitted, probability in outcomes(monkeypatch, run).items():
            joint[emitted] = joint.get(emitted, 0.0) + share * probability
    whole = {}
    for emitted, probability in joint.items():
        assert len(emitted) <= length
        for rest in itertools.product(range(model.vocab), repeat=length - len(emitted)):
            text, share = emitted, probability
            for token in rest:
                share *= model.p(text)[token]
                text = (*text, token)
            whole[text] = whole.get(text, 0.0) + share
    return whole


def total_variation(model, found, length):
    difference = 0.0
    for text in itertools.product(range(model.vocab), repeat=length):
        exact = math.prod(model.p(text[:i])[token] for i, token in enumerate(text))
        difference += abs(found.get(text, 0.0) - exact)
    return difference / 2


# name: vocabulary, parents, parameters
EXACT = {
    "chain of 1": (6, [-1, 0], {}),
    "chain of 3": (3, [-1, 0, 1, 2], {}),
    "two siblings": (5, [-1, 0, 0], {}),
    "four siblings": (5, [-1, 0, 0, 0, 0], {}),
    "all tokens are siblings": (4, [-1, 0, 0, 0, 0], {"temperature": 0.7}),
    "two levels": (4, [-1, 0, 0, 1], {"temperature": 1.4}),
    "three levels": (3, [-1, 0, 0, 1, 1, 3], {}),
    "top-k below the siblings": (5, [-1, 0, 0, 0], {"top_k": 2}),
    "top-p and min-p": (5, [-1, 0, 0], {"top_p": 0.8, "min_p": 0.1}),
}


@pytest.mark.parametrize("name", EXACT)
def test_emitted_text_is_distributed_as_the_targets(monkeypatch, name):
    vocab, parents, parameters = EXACT[name]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    length = max(depths) + 1
    model = Model(vocab, 3, **parameters)
    found = emitted_distribution(monkeypatch, model, parents, length)
    assert total_variation(model, found, length) < 1e-6


def without_common_total(p, q, token):
    """q in its own unit instead of p's."""
    p, q = (p - q // 3).clamp(min=0), q.clone()
    p[token] = q[token] = 0
    return p, q


def bonus_from_p(p, q, token):
    q = q.clone()
    q[token] = 0
    return p, q


def with_replacement(p, q, token):
    """q keeps the sibling that has left it."""
    return residual(p, q, token)[0], q


def residual_of_the_first_only(p, q, token):
    """The second sibling's residual is that of q as it was, not of q without the first."""
    if (q == 0).any():
        return bonus_from_p(p, q, token)
    return residual(p, q, token)


@pytest.mark.parametrize(
    "wrong, parents",
    [
        (without_common_total, [-1, 0]),
        (bonus_from_p, [-1, 0]),
        (bonus_from_p, [-1, 0, 0]),
        (residual_of_the_first_only, [-1, 0, 0]),
        (with_replacement, [-1, 0, 0]),
    ],
)
def test_wrong_residuals_fail_the_enumeration(monkeypatch, wrong, parents):
    monkeypatch.setattr(reference, "residual", wrong)
    model = Model(5, 3)
    found = emitted_distribution(monkeypatch, model, parents, 2)
    assert total_variation(model, found, 2) > 1e-3


@pytest.mark.parametrize(
    "wrong",
    [
        # q is not brought to sum 1 after a sibling has left it.
        lambda p, p_total, q, q_total: accepting_coins(p, p_total, q, max(q_total, 1 << 40)),
        lambda p, p_total, q, q_total: (
            NUM_COINS if p * q_total >= q * p_total else NUM_COINS * p // p_total
        ),
        lambda p, p_total, q, q_total: NUM_COINS if p * q_total >= q * p_total else 0,
        lambda p, p_total, q, q_total: NUM_COINS if p > 0 else 0,
    ],
    ids=["no renormalisation", "p for p / q", "no coin", "every possible draft"],
)
def test_wrong_acceptance_fails_the_enumeration(monkeypatch, wrong):
    monkeypatch.setattr(reference, "accepting_coins", wrong)
    model = Model(5, 3)
    found = emitted_distribution(monkeypatch, model, [-1, 0, 0], 2)
    assert total_variation(model, found, 2) > 1e-3


# ---- The rule's parts.


def test_draft_weights():
    q = torch.tensor([0.5, 2.0**-40, 2.0**-41, 1.0000001, 0.0, -0.0])
    weights, sound = draft_weights(q)
    assert sound and weights.tolist() == [1 << 39, 1, 0, 1 << 40, 0, 0]
    for wrong in (math.nan, -1e-30, 2.0, INF, -INF):
        q[1] = wrong
        weights, sound = draft_weights(q)
        assert not sound and weights.tolist() == [1 << 39, 0, 0, 1 << 40, 0, 0]


def test_acceptance_is_rounded_up_to_a_coin_and_never_from_zero():
    assert accepting_coins(0, 9, 1, 1) == 0
    assert accepting_coins(1, 1 << 62, 1 << 40, 1 << 40) == 1
    assert accepting_coins(1, 4, 1, 2) == NUM_COINS // 2
    assert accepting_coins(3, 9, 1, 3) == NUM_COINS
    assert accepting_coins((1 << 40) - 1, 1 << 62, 1 << 40, 1 << 62) == NUM_COINS


def test_residual_against_exact_arithmetic():
    """Of totals of any size: never more is subtracted than is due; at most 2^-30 of it less, or
    2^-15 of q's own unit.
    """
    rng = random.Random(0)
    for _ in range(300):
        size = rng.choice([2, 5, 40])
        p_bits, q_bits = rng.randint(1, 40), rng.randint(1, 40)
        p = torch.tensor([rng.randrange(1 << p_bits) for _ in range(size)])
        q = torch.tensor([rng.randrange(1 << q_bits) for _ in range(size)])
        p[0], q[1] = 1 << p_bits - 1, 1 << q_bits - 1
        total_p, total_q = int(p.sum()), int(q.sum())
        left, without = residual(p, q, 1)
        for i in range(size):
            exact = int(p[i]) - int(q[i]) * total_p / total_q
            if i == 1:
                assert left[i] == without[i] == 0
                continue
            assert without[i] == q[i]
            slack = 1 + (int(q[i]) * 2.0**-30 + 2.0**-15) * total_p / total_q
            assert max(exact, 0) - 1e-3 <= int(left[i]) <= max(exact, 0) + slack


def test_a_rejection_always_leaves_something():
    """p = q but for one unit: whatever can be rejected leaves a residual to draw from."""
    rng = random.Random(1)
    for _ in range(300):
        size = rng.choice([2, 3, 9])
        q = torch.tensor([rng.randrange(1, 1 << rng.randint(1, 40)) for _ in range(size)])
        p = q.clone() * rng.choice([1, 1, 3])
        p[rng.randrange(size)] += rng.choice([-1, 0, 1])
        for x in range(size):
            can_be_rejected = NUM_COINS > accepting_coins(
                int(p[x]), int(p.sum()), int(q[x]), int(q.sum())
            )
            if p.sum() > 0 and can_be_rejected:
                assert residual(p, q, x)[0].sum() > 0


def test_coins_of_siblings_are_independent():
    coins = {coin(3, p, purpose, i) for p in range(9) for purpose in Purpose for i in range(9)}
    assert len(coins) == 9 * len(Purpose) * 9


# ---- Named cases.


def test_case_01_a_draft_of_probability_zero_is_never_accepted(backend):
    p, q = [0.0, 0.5, 0.5, 0.0], [0.5, 0.0, 0.25, 0.25]
    seeds = torch.tensor(EXTREME_SEEDS)
    assert [coin(s, 6, Purpose.ACCEPT) for s in EXTREME_SEEDS] == [0, NUM_COINS - 1]
    got = verify_star(p, q, [[0], [0]], seeds=seeds, backend=backend)
    assert got.num_accepted.tolist() == [0, 0]
    assert set(got.tokens[:, 0].tolist()) <= {1, 2}
    # And one with p >= q always is, be the coin as great as can be.
    got = verify_star(p, q, [[2], [2]], seeds=seeds, backend=backend)
    assert got.num_accepted.tolist() == [1, 1]
    many = verify_star(p, q, [[0, 3]], batch=400, backend=backend)
    # p - q leaves 1 and 2 to the second sibling, and that leaves 1 alone.
    assert not many.num_accepted.any() and set(many.tokens[:, 0].tolist()) == {1}


def test_case_01_residual_is_half_open(backend):
    """The smallest and the greatest coin choose the first and the last id that is left."""
    seeds = torch.tensor([34805634, 68125069])
    assert [coin(s, 6, Purpose.RESIDUAL) for s in seeds.tolist()] == [0, NUM_COINS - 1]
    p, q = [0.0, 0.25, 0.25, 0.25, 0.25, 0.0], [0.2, 0.3, 0.0, 0.0, 0.0, 0.5]
    got = verify_star(p, q, [[5], [5]], seeds=seeds, backend=backend)
    assert got.tokens[:, 0].tolist() == [2, 4]


BROKEN = {
    "sibling cycle": ({"next_sibling": [-1, 2, 1, -1]}, VerifyStatus.SIBLING_CYCLE),
    "child beyond the tree": ({"first_child": [4, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "root as its own child": ({"first_child": [0, -1, -1, -1]}, VerifyStatus.BAD_LINK),
    "sibling beyond the tree": ({"next_sibling": [-1, 2**40, -1, -1]}, VerifyStatus.BAD_LINK),
}


@pytest.mark.parametrize("form", ["draft_probs", "typical"])
@pytest.mark.parametrize("name", BROKEN)
def test_case_02_broken_links_end_the_walk(backend, name, form):
    change, bit = BROKEN[name]
    links = {
        "tokens": torch.tensor([[0, 5, 6, 7]] * 3),
        "first_child": torch.tensor([[1, -1, -1, -1]] * 3),
        "next_sibling": torch.tensor([[-1, 2, 3, -1]] * 3),
    }
    for key, value in change.items():
        links[key][1] = torch.tensor(value)
    logits = torch.full((3, 4, 12), -INF)
    logits[..., 9] = 0.0
    logits[[0, 2], 0, 7] = 20.0
    q = torch.full((3, 4, 12), 1 / 12)
    rule = {"draft_probs": q} if form == "draft_probs" else {"typical": (0.5, 0.5)}
    got = tree_verify(logits, **links, **rule, **sampling(3), backend=backend)
    assert got.status.tolist() == [0, int(bit), 0]
    assert got.num_accepted.tolist() == [1, 0, 1]
    assert got.tokens[:, :2].tolist() == [[7, 9], [9, -1], [7, 9]]


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 8193, 33000])
def test_case_04_ids_stay_within_the_vocabulary(backend, dtype, vocab):
    logits = torch.full((4, 2, vocab), -5.0, dtype=dtype)
    logits[0, :, -1] = 50.0
    logits[1] = math.nan
    logits[2] = -INF
    logits[3, :, :-1] = math.nan
    q = torch.full((4, 2, vocab), 1 / vocab).to(dtype)
    drafts = torch.tensor([[vocab - 1], [0], [vocab], [-1]])  # the last two are no ids
    got = tree_verify(logits, **star(drafts), draft_probs=q, **sampling(4), backend=backend)
    assert got.tokens.tolist() == [[vocab - 1] * 2, [0, -1], [0, -1], [vocab - 1, -1]]
    bad = int(VerifyStatus.NO_TOKEN)
    assert got.status.tolist() == [0, bad, bad, 0]


def random_model(seed, batch, nodes, vocab, noise=1.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, nodes, vocab, generator=generator) * 1.5
    q = (logits + noise * torch.randn(logits.shape, generator=generator)).softmax(-1)
    return logits, q, generator


def drawn_tree(q, parents, generator):
    """Tokens ``[B, N]``: the children of every node drawn from its q without replacement."""
    tokens = torch.zeros(q.shape[:2], dtype=torch.int64)
    for node in range(len(parents)):
        children = [n for n, above in enumerate(parents) if above == node]
        if children:
            drawn = q[:, node].float().multinomial(len(children), generator=generator)
            tokens[:, children] = drawn
    return link_tree(tokens, torch.tensor(parents))


def test_case_09_more_siblings_accept_at_least_as_much(backend):
    """Siblings that are tried after the others do not change what becomes of those."""
    batch, parents = 60, [-1, 0, 1, 2, 0, 0, 1, 2]
    logits, q, generator = random_model(4, batch, len(parents), 6)
    tree = drawn_tree(q, parents, generator)
    large = tree_verify(logits, **links_of(tree), draft_probs=q, **sampling(batch), backend=backend)
    chain = link_tree(tree.tokens[:, :4], torch.tensor(parents[:4]))
    small = tree_verify(
        logits[:, :4], **links_of(chain), draft_probs=q[:, :4], **sampling(batch), backend=backend
    )
    assert (large.num_accepted >= small.num_accepted).all()
    assert (large.num_accepted > small.num_accepted).any()
    for b in range(batch):
        count = int(small.num_accepted[b])
        assert large.tokens[b, :count].equal(small.tokens[b, :count])


def test_case_10_bias_mask_and_min_p_apply_at_every_node(backend):
    """Drafts that q likes: accepted or not by what is left of the target's distribution."""
    tree = link_tree(torch.tensor([[0, 7, 8]]), torch.tensor([-1, 0, 1]))
    logits = torch.zeros(1, 3, 40)
    logits[..., 1] = 30.0  # the target alone would say 1
    q = torch.zeros(1, 3, 40)
    q[0, [0, 1], [7, 8]] = 1.0
    shared = {**links_of(tree), **sampling(1), "draft_probs": q, "backend": backend}

    def verify(**kwargs):
        return tree_verify(logits, **shared, **kwargs).tokens.tolist()[0]

    assert verify() == [1, -1, -1]
    allowed = torch.zeros(1, 3, 2, dtype=torch.int32)
    allowed[0, 0, 0] = 1 << 7
    allowed[0, 1, 0] = 1 << 8
    allowed[0, 2, 1] = 1 << 7
    assert verify(allowed=allowed) == [7, 8, 39]
    allowed[0, 1, 0] = 1 << 9
    assert verify(allowed=allowed) == [7, 9, -1]
    bias = torch.zeros(1, 40)
    bias[0, 7] = 60.0
    assert verify(logit_bias=bias) == [7, 7, -1]
    shared["temperature"] = torch.tensor([30.0])
    assert verify(logit_bias=bias, min_p=torch.tensor([0.9])) == [7, 7, -1]
    assert verify(logit_bias=bias, top_k=torch.tensor([1])) == [7, 7, -1]


def test_case_11_batch_order_does_not_matter(backend):
    batch, parents = 8, [-1, 0, 0, 1, 2, 0]
    logits, q, generator = random_model(1, batch, len(parents), 50)
    arguments = {
        **links_of(drawn_tree(q, parents, generator)),
        **sampling(batch),
        "draft_probs": q,
        "context_lens": torch.arange(batch) * 7,
        "seeds": torch.tensor([1, 2, 3, -4, 2**63 - 1, -(2**63), 5, 6]),
        "top_k": torch.tensor([0, 5, 0, 9, 1, 40, 0, 0]),
    }
    whole = tree_verify(logits, **arguments, backend=backend)
    assert whole.num_accepted.any()
    for b in range(batch):
        alone = {n: t[b : b + 1] for n, t in arguments.items()}
        got = tree_verify(logits[b : b + 1], **alone, backend=backend)
        names = ("accept_index", "num_accepted", "tokens", "status")
        assert_equal(Verified(*(getattr(whole, n)[b : b + 1] for n in names)), got)


def test_case_12_sampling_is_never_silently_greedy(backend):
    p = [0.4, 0.3, 0.2, 0.1]
    got = verify_star(p, [0.25] * 4, [[i % 4] for i in range(300)], backend=backend)
    assert len(got.tokens[:, 0].unique()) == 4
    # At temperature 0 q plays no part: the first child that carries the argmax is taken.
    still = verify_star(
        p, [0.25] * 4, [[3, 0]], batch=9, temperature=torch.zeros(9), backend=backend
    )
    assert still.tokens.tolist() == [[0, 0, -1]] * 9
    assert still.accept_index.tolist() == [[0, 2, -1]] * 9
    lossy = tree_verify(
        log(p).expand(300, 2, -1), **star([[3]] * 300), typical=(0.5, 0.5), **sampling(300),
        backend=backend,
    )  # fmt: skip
    assert len(lossy.tokens[:, 0].unique()) == 4


def test_case_13_drafts_accepted_and_tokens_emitted_are_told_apart(backend):
    p, q = [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]
    got = verify_star(p, q, [[1], [2]], backend=backend)
    assert got.num_accepted.tolist() == [1, 0]
    assert (got.tokens >= 0).sum(1).tolist() == [2, 1]
    assert (got.accept_index >= 0).sum(1).tolist() == [2, 1]


def test_case_14_acceptance_is_p_over_q(monkeypatch):
    p, q = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]
    rate, text = 0.0, [0.0] * 4
    for (draft,), share in draws(torch.tensor(q), 1):

        def run(draft=draft):
            got = verify_star(p, q, [[draft]], backend="reference")
            return int(got.num_accepted), int(got.tokens[0, 0])

        for (accepted, token), probability in outcomes(monkeypatch, run).items():
            rate += share * probability * accepted
            text[token] += share * probability
    assert abs(rate - 0.9) < 1e-6
    assert text == pytest.approx(p, abs=1e-6)


def test_case_14_by_frequency(backend):
    """Drafts and coins as they fall: what is accepted, what is emitted, and by which backend."""
    p, q = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]
    num = 20_000 if backend == "cpu" else 800
    generator = torch.Generator().manual_seed(7)
    drafts = torch.tensor(q).multinomial(num, replacement=True, generator=generator)
    got = verify_star(p, q, drafts[:, None], backend=backend)
    rate = got.num_accepted.double().mean()
    assert abs(rate - 0.9) < 4 * (0.09 / num) ** 0.5
    frequency = got.tokens[:, 0].bincount(minlength=4) / num
    for share, exact in zip(frequency.tolist(), p, strict=True):
        assert abs(share - exact) < 4 * (exact * (1 - exact) / num) ** 0.5


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_first_tokens_by_frequency(backend, num_drafts):
    """A tree two deep: the pair of the first two tokens, whether draft or bonus."""
    vocab = 5
    num = 20_000 if backend == "cpu" else 600
    rows = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3))
    p = (rows[0] * 1.5).softmax(0)
    q = (rows[0] + rows[1]).softmax(0).expand(num, 1 + 2 * num_drafts, -1)
    parents = [-1] + [0] * num_drafts + list(range(1, num_drafts + 1))
    tree = drawn_tree(q, parents, torch.Generator().manual_seed(num_drafts))
    logits = p.log().expand(num, len(parents), -1)
    got = tree_verify(logits, **links_of(tree), draft_probs=q, **sampling(num), backend=backend)
    pairs = got.tokens[got.num_accepted >= 1][:, :2]
    # Whether a draft was accepted may depend on the first token; given it, the second is free.
    for first in range(vocab):
        seconds = pairs[pairs[:, 0] == first][:, 1]
        if len(seconds) > 30:
            sigma = (p * (1 - p) / len(seconds)).sqrt()
            share = seconds.bincount(minlength=vocab) / len(seconds)
            assert ((share - p).abs() < 4.5 * sigma + 1e-9).all()
    share = got.tokens[:, 0].bincount(minlength=vocab) / num
    assert ((share - p).abs() < 4.5 * (p * (1 - p) / num).sqrt()).all()


# ---- Details of the contract.


def test_children_that_q_cannot_have_drawn_are_passed_over(backend):
    """The choice is then that of plain decoding, coin for coin."""
    p, q = [0.3, 0.3, 0.4, 0.0], [0.0, 1.0, 0.0, 0.0]
    batch = 50
    plain = tree_verify(
        log(p).expand(batch, 1, -1), **star(torch.zeros(batch, 0).long()), **sampling(batch),
        backend=backend,
    )  # fmt: skip
    for drafts in ([0, 2], [2, 0, 0]):
        got = verify_star(p, q, [drafts], batch=batch, backend=backend)
        assert not got.num_accepted.any() and not got.status.any()
        assert got.tokens[:, 0].equal(plain.tokens[:, 0])


def test_equal_siblings_count_once(backend):
    p, q = [0.1, 0.6, 0.3], [0.8, 0.1, 0.1]
    batch = 300
    once = verify_star(p, q, [[0]], batch=batch, backend=backend)
    twice = verify_star(p, q, [[0, 0]], batch=batch, backend=backend)
    assert once.tokens.equal(twice.tokens[:, :2])
    assert 0 < once.num_accepted.sum() < batch


def test_scale_of_q_does_not_matter(backend):
    p, q = [0.1, 0.6, 0.3], torch.tensor([0.5, 0.25, 0.25])
    whole = verify_star(p, q, [[0, 1]], batch=200, backend=backend)
    halved = verify_star(p, q / 1024, [[0, 1]], batch=200, backend=backend)
    assert_equal(whole, halved)


@pytest.mark.parametrize("value", [math.nan, -0.25, INF, 2.0])
def test_unsound_entries_of_q_count_as_zero_and_are_reported(backend, value):
    p, q = [0.1, 0.6, 0.2, 0.1], [0.5, 0.25, 0.0, 0.25]
    clean = verify_star(p, q, [[0, 1]], batch=100, backend=backend)
    got = verify_star(p, [*q[:2], value, q[3]], [[0, 1]], batch=100, backend=backend)
    assert got.tokens.equal(clean.tokens)
    assert got.status.tolist() == [int(VerifyStatus.BAD_DRAFT)] * 100
    # A row without children is not read, nor is one where room ends.
    tail = torch.tensor([q, [math.nan] * 4, [math.nan] * 4])
    assert not verify_star(p, tail, [[0, 1]], batch=100, backend=backend).status.any()
    none = verify_star(p, [*q[:2], value, q[3]], [[0, 1]], batch=9, max_accepted=0, backend=backend)
    assert not none.status.any()


def test_rows_off_the_path_are_not_read(backend):
    parents = [-1, 0, 1, 0, 3]
    p = torch.tensor([0.5, 0.5, 0.0])
    q = torch.full((1, 5, 3), math.nan)
    q[0, [0, 1]] = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    logits = torch.full((1, 5, 3), math.nan)
    logits[0, [0, 1, 2]] = p.log()
    tree = link_tree(torch.tensor([[0, 0, 1, 1, 0]]), torch.tensor(parents))
    got = tree_verify(logits, **links_of(tree), draft_probs=q, **sampling(1), backend=backend)
    assert got.status.item() == 0 and got.accept_index[0, :2].tolist() == [0, 1]


def test_padded_requests(backend):
    p, q = [0.5, 0.5, 0.0], torch.tensor([[0.5, 0.5, 0.0], [math.nan] * 3])[:, None]
    got = verify_star(p, q, [[1], [2**60]], context_lens=torch.tensor([5, -1]), backend=backend)
    assert got.num_accepted.tolist() == [1, 0] and got.status.tolist() == [0, 0]
    assert got.tokens[1].tolist() == [-1, -1]


def test_the_last_column_takes_no_draft(backend):
    """Where room ends the token is the target's own, by the coin of plain decoding."""
    p, q = [0.2, 0.8], [0.9, 0.1]
    full = verify_star(p, q, [[0]], batch=100, max_accepted=0, backend=backend)
    plain = tree_verify(
        log(p).expand(100, 1, -1), **star(torch.zeros(100, 0).long()), **sampling(100),
        backend=backend,
    )  # fmt: skip
    assert full.tokens.equal(plain.tokens) and not full.num_accepted.any()


def test_rejections_at_a_node_are_bounded(backend):
    """The children after the last rejection are not tried; what is emitted stays possible."""
    count = MAX_REJECTIONS + 20
    vocab = count + 2
    p = torch.zeros(vocab)
    p[count - 1], p[-1] = 0.9, 0.1  # the last draft would be accepted if it were tried
    q = torch.full((vocab,), 1.0 / count)
    q[-2:] = 0.0
    drafts = [list(range(count))]
    got = verify_star(p.tolist(), q, drafts, batch=60, backend=backend)
    assert not got.num_accepted.any() and not got.status.any()
    assert set(got.tokens[:, 0].tolist()) == {count - 1, vocab - 1}
    few = verify_star(p.tolist(), q, [drafts[0][-20:]], batch=60, backend=backend)
    assert few.num_accepted.all()


def test_strided_probabilities(backend, dtype):
    batch, parents = 20, [-1, 0, 0, 1]
    logits, q, generator = random_model(2, batch, len(parents), 19)
    q = q.to(dtype)
    arguments = {**links_of(drawn_tree(q, parents, generator)), **sampling(batch)}
    wide = torch.full((batch, 2 * len(parents), 30), math.nan, dtype=dtype)
    wide[:, ::2, 3:22] = q
    got = tree_verify(logits, draft_probs=wide[:, ::2, 3:22], **arguments, backend=backend)
    assert_equal(got, tree_verify(logits, draft_probs=q, **arguments, backend="reference"))
    assert got.num_accepted.any()


def test_compiled_kernels_take_the_references_path(backend):
    """Drafts near the target, so that walks are long, at sizes around blocks and vectors."""
    rng = random.Random(5)
    for case in range(15 if backend == "cuda_on_host" else 60):
        vocab = rng.choice([2, 15, 16, 17, 127, 128, 129, 1000, 8193])
        batch, parents = rng.choice([1, 9]), [-1] + [rng.randrange(i) for i in range(1, 9)]
        wide = max(parents.count(n) for n in range(9))
        vocab = max(vocab, wide)
        logits, q, generator = random_model(case, batch, 9, vocab, rng.choice([0.0, 0.3, 2.0]))
        tree = drawn_tree(q, parents, generator)
        arguments = {
            **links_of(tree),
            **sampling(batch, rng.choice([0.5, 1.0, 3.0]), top_k=rng.choice([0, 3, 50])),
            "draft_probs": q.to(rng.choice([torch.float32, torch.bfloat16])),
            "top_p": torch.full((batch,), rng.choice([1.0, 0.9])),
        }
        expected = tree_verify(logits, **arguments, backend="reference")
        out = Verified(
            poisoned(batch, 9, dtype=torch.int32),
            poisoned(batch, dtype=torch.int32),
            poisoned(batch, 9, dtype=torch.int64),
            poisoned(batch, dtype=torch.int32),
        )
        assert_equal(tree_verify(logits, **arguments, out=out, backend=backend), expected)
        assert not expected.status.any()


def test_large_vocabulary_whatever_the_thread_count(backend):
    vocab, parents = 70_003, [-1, 0, 0, 1, 3]
    logits, q, generator = random_model(0, 3, len(parents), vocab, 0.5)
    arguments = {
        **links_of(drawn_tree(q, parents, generator)),
        **sampling(3),
        "draft_probs": q.bfloat16(),
    }
    expected = tree_verify(logits, **arguments, backend="reference")
    assert_equal(tree_verify(logits, **arguments, backend=backend), expected)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for b in range(3):
            alone = {n: t[b : b + 1] for n, t in arguments.items()}
            got = tree_verify(logits[b : b + 1], **alone, backend=backend)
            assert got.tokens.equal(expected.tokens[b : b + 1])
    finally:
        torch.set_num_threads(threads)


def test_opcheck_and_compile():
    p, q = [0.1, 0.6, 0.3], [0.5, 0.25, 0.25]

    def step(logits, q, links, seeds, lens):
        return tree_verify(
            logits, **links, temperature=torch.ones(4), seeds=seeds, context_lens=lens,
            draft_probs=q,
        ).tokens  # fmt: skip

    logits, q = log(p).expand(4, 3, -1).contiguous(), torch.tensor(q).expand(4, 3, -1)
    arguments = (logits, q, star([[0, 1]] * 4), torch.arange(4), torch.full((4,), 5))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(*arguments).equal(step(*arguments))
    out = Verified.allocate(4, 2)
    links = star([[0, 1]] * 4)
    raw = (
        logits, *links.values(), torch.full((4,), 5), torch.ones(4), None, None, None,
        torch.arange(4), None, None, q, 0.0, 0.0, out.accept_index, out.num_accepted, out.tokens,
        out.status,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.spec_kernels.tree_verify.default, raw)


def test_bad_arguments(backend):
    p, q = [0.5, 0.5], torch.full((2, 2, 2), 0.5)
    shared = {"drafts": [[0], [1]], "backend": backend}
    wrong = [torch.zeros(2, 3, 2), q.double(), torch.zeros(2, 2, 4)[..., ::2]]
    for value in wrong:
        with pytest.raises(ValueError, match="spec_kernels::tree_verify: draft_probs: expected"):
            arguments = {**sampling(2), **star([[0], [1]])}
            tree_verify(log(p).expand(2, 2, -1), draft_probs=value, **arguments, backend=backend)
    with pytest.raises(ValueError, match="draft_probs: expected none beside typical"):
        verify_star(p, q, **shared, typical=(0.1, 0.3))
    bad = {"typical_epsilon": [0.0, -1.0, 1.5, math.nan], "typical_delta": [0.0, INF, math.nan]}
    for name, values in bad.items():
        for value in values:
            pair = (value, 0.3) if name == "typical_epsilon" else (0.3, value)
            with pytest.raises(ValueError, match=f"spec_kernels::tree_verify: {name}: expected"):
                tree_verify(
                    log(p).expand(2, 2, -1), **star([[0], [1]]), **sampling(2), typical=pair,
                    backend=backend,
                )  # fmt: skip
            if backend != "reference":  # which leaves it to the API
                out = Verified.allocate(2, 1)
                raw = (
                    log(p).expand(2, 2, -1), *star([[0], [1]]).values(), torch.full((2,), 5),
                    torch.ones(2), None, None, None, torch.arange(2), None, None, None, *pair,
                    out.accept_index, out.num_accepted, out.tokens, out.status,
                )  # fmt: skip
                with pytest.raises(RuntimeError, match=f"tree_verify: {name}: expected"):
                    raw_op("tree_verify", backend)(*raw)


# ---- Typical acceptance.


def typical_star(p, drafts, typical, batch=1, backend=None, **kwargs):
    drafts = torch.as_tensor([drafts]).expand(batch, -1)
    arguments = {**sampling(batch), **star(drafts), "typical": typical, **kwargs}
    nodes = drafts.shape[1] + 1
    return tree_verify(log(p).expand(batch, nodes, -1), **arguments, backend=backend)


def test_typical_threshold_is_the_papers():
    """min(epsilon, delta exp(-H)) against float64, for peaked and flat rows and every filter."""
    for seed in range(40):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(rng.choice([2, 9, 300]), generator=generator) * rng.choice([0.1, 2, 9])
        temperature, epsilon, delta = rng.choice([0.3, 1.0, 2.0]), rng.random(), rng.random() + 0.01
        weights = token_weights(values, temperature, top_k=rng.choice([0, 5]))
        p = weights.double() / weights.sum()
        entropy = -torch.special.xlogy(p, p).sum()
        exact = min(epsilon, delta * math.exp(-entropy))
        limit = typical_limit(values, weights, temperature, epsilon, delta)
        assert limit / float(weights.sum()) == pytest.approx(exact, rel=2e-6)


def test_typical_acceptance(backend):
    p = [0.5, 0.3, 0.15, 0.05]
    threshold = 0.3 * math.exp(sum(x * math.log(x) for x in p))
    assert 0.05 < threshold < 0.15
    # Of those above the threshold the likeliest; siblings below it never.
    for drafts, expected in (([2, 1], [1]), ([1, 2], [1]), ([2, 3], [2]), ([1, 1], [1])):
        got = typical_star(p, drafts, (0.5, 0.3), batch=40, backend=backend)
        assert got.num_accepted.tolist() == [1] * 40
        assert got.tokens[:, 0].tolist() == expected * 40
        first = drafts.index(expected[0]) + 1
        assert got.accept_index[:, 1].tolist() == [first] * 40
    # None is: the bonus is plain decoding's choice, and the walk ends there.
    plain = tree_verify(
        log(p).expand(200, 1, -1), **star(torch.zeros(200, 0).long()), **sampling(200),
        backend=backend,
    )  # fmt: skip
    got = typical_star(p, [3], (0.5, 0.3), batch=200, backend=backend)
    assert not got.num_accepted.any() and got.tokens[:, 0].equal(plain.tokens[:, 0])
    # epsilon caps the threshold, so that a low one lets the draft pass.
    assert typical_star(p, [3], (0.01, 0.3), backend=backend).num_accepted.item() == 1


def test_typical_is_greedy_at_temperature_0_and_never_takes_the_impossible(backend):
    p = [0.5, 0.3, 0.2, 0.0]
    got = typical_star(p, [1, 0], (0.09, 0.3), batch=5, temperature=torch.zeros(5), backend=backend)
    assert got.tokens[:, 0].tolist() == [0] * 5
    assert got.accept_index[:, 1].tolist() == [2] * 5
    got = typical_star(p, [3, 2**40, -1], (1e-300, 1e-300), batch=50, backend=backend)
    assert not got.num_accepted.any()


def test_typical_is_lossy_and_off_by_default():
    """A likely draft is always taken: that is no sample of the target's distribution."""
    p = [0.5, 0.5]
    taken = typical_star(p, [1], (0.09, 0.3), batch=200)
    assert (taken.tokens[:, 0] == 1).all()
    plain = typical_star(p, [1], None, batch=200)
    assert 60 < (plain.tokens[:, 0] == 1).sum() < 140
