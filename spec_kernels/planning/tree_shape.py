"""Which draft tree is worth verifying: shapes from acceptance rates, sizes from what they cost.

A node is named by its path of ranks from the root, as in ``tree_from_paths``: ``(1, 0)`` is the
best child of the root's second-best child. ``rates[d][r]`` is the probability that the candidate of
rank r at depth d + 1 is the right one, given that its parent was; at most one candidate of a
parent is right, so a depth's rates sum to at most 1. A path is right with the product of its rates,
and the accept length of a tree, the bonus token included, is 1 plus the sum over its nodes of the
probability that their path is right: each right node adds the one token it holds.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from spec_kernels.ops.tree_build import tree_from_paths
from spec_kernels.planning.checks import fail

Path = tuple[int, ...]
# By depth and rank, or a function of the parent's path that gives its children's rates by rank.
Rates = Sequence[Sequence[float]] | Callable[[Path], Sequence[float]]

_ROUNDING = 1e-9


def _children(function: str, rates: Rates) -> Callable[[Path], Sequence[float]]:
    """The rates as a function of the parent's path, checked as they are asked for."""

    def check(row: Sequence[float], where: str) -> Sequence[float]:
        if any(not 0 <= x <= 1 for x in row):
            raise fail(function, where, "probabilities in [0, 1]", list(row))
        if sum(row) > 1 + _ROUNDING:
            raise fail(
                function, where, "a sum of at most 1, since one candidate is right", sum(row)
            )
        return row

    if callable(rates):
        return lambda path: check(rates(path), f"rates{path}")
    if not len(rates):
        raise fail(function, "rates", "at least one depth", rates)
    rows = [check(row, f"rates[{depth}]") for depth, row in enumerate(rates)]
    return lambda path: rows[len(path)] if len(path) < len(rows) else ()


def accept_length(parents: Sequence[int], ranks: Sequence[int], rates: Rates) -> float:
    """Tokens a cycle of a static tree, the bonus token included.

    Args:
        parents, ranks: of each node, root first, as ``tree_from_paths`` gives them.
        rates: see the module; each node's rank must be among its parent's.

    Raises:
        ValueError: rates that are no probabilities, a parent that does not stand before its child,
            two children of one rank, or a rank without a rate.
    """
    name = "accept_length"
    children = _children(name, rates)
    if len(parents) != len(ranks) or not len(parents):
        raise fail(name, "ranks", f"one for each of {len(parents)} >= 1 parents", len(ranks))
    paths: list[Path] = [()]
    chances = [1.0]
    for node in range(1, len(parents)):
        parent, rank = parents[node], ranks[node]
        if not 0 <= parent < node:
            raise fail(name, f"parents[{node}]", f"an earlier node, 0 to {node - 1}", parent)
        path = (*paths[parent], rank)
        row = children(paths[parent])
        if not 0 <= rank < len(row):
            raise fail(name, f"ranks[{node}]", f"one of the {len(row)} with a rate", rank)
        if path in paths:
            raise fail(name, f"ranks[{node}]", "different ranks for the children of a node", rank)
        paths.append(path)
        chances.append(chances[parent] * row[rank])
    return math.fsum(chances)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static tree.

    Attributes:
        paths: of its nodes without the root, the likeliest first, so that every leading part is a
            tree too.
        accept_length: tokens a cycle by the rates it was made from.
    """

    paths: tuple[Path, ...]
    accept_length: float

    @property
    def num_nodes(self) -> int:
        """Nodes to verify, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def num_children(self) -> int:
        """Candidates that the drafter must put forward at most: one more than the worst rank."""
        return 1 + max((path[-1] for path in self.paths), default=-1)

    @property
    def is_chain(self) -> bool:
        return all(path == (0,) * len(path) for path in self.paths)

    def nodes(self) -> tuple[list[int], list[int]]:
        """``parents, ranks`` as ``StaticDraft`` and ``accept_length`` take them."""
        return tree_from_paths(self.paths)

    def __str__(self) -> str:
        if not self.paths:
            return "no drafts"
        if self.is_chain:
            return f"chain of {self.depth}"
        widths = [sum(len(p) == d for p in self.paths) for d in range(1, self.depth + 1)]
        return f"tree of {self.num_nodes} ({'+'.join(map(str, widths))})"


def best_tree(
    rates: Rates,
    num_nodes: int,
    *,
    max_depth: int | None = None,
    max_children: int | None = None,
    first_draws: bool = False,
) -> Shape:
    """The static tree of ``num_nodes`` nodes, root included, with the greatest accept length.

    Taking the likeliest paths is optimal: no path is likelier than the one it continues, so the
    ``num_nodes - 1`` likeliest, shorter ones first where equal, contain the parents of all their
    nodes and are a tree; and no tree can sum larger probabilities (EAGLE-2 argues so for reranking,
    arXiv 2406.16858, with the drafter's probabilities for rates).

    Args:
        max_depth, max_children: limits; None = as far as there are rates.
        first_draws: the candidates are drawn one after the other from the drafter's distribution,
            so that a node may take rank r only if its siblings take all ranks before. Where a later
            draw has the higher rate, the likeliest paths are then no tree, and the best one is
            found by dynamic programming over depth, rank and number of nodes; ``rates`` must be
            given by depth.

    Raises:
        ValueError: bad rates or limits, or fewer candidates than nodes.
    """
    name = "best_tree"
    if num_nodes < 1:
        raise fail(name, "num_nodes", "at least 1, the root", num_nodes)
    shape = _trees(name, rates, num_nodes, max_depth, max_children, first_draws)(num_nodes)
    if shape is None:
        raise fail(name, "num_nodes", "no more nodes than rates and limits allow", num_nodes)
    return shape


def best_chain(rates: Rates, steps: int) -> Shape:
    """The chain of ``steps`` likeliest candidates."""
    if steps < 0:
        raise fail("best_chain", "steps", "at least 0", steps)
    shape = _trees("best_chain", rates, steps + 1, None, 1, False)(steps + 1)
    if shape is None:
        raise fail("best_chain", "steps", "no more steps than depths with rates", steps)
    return shape


def _trees(
    name: str,
    rates: Rates,
    most_nodes: int,
    max_depth: int | None,
    max_children: int | None,
    first_draws: bool,
) -> Callable[[int], Shape | None]:
    """Best trees of up to ``most_nodes`` nodes by their number; None = there are not so many."""
    for argument, limit in (("max_depth", max_depth), ("max_children", max_children)):
        if limit is not None and limit < 0:
            raise fail(name, argument, "at least 0", limit)
    if first_draws:
        if callable(rates):
            raise fail(name, "rates", "rates by depth and rank for first draws", rates)
        children = _children(name, rates)
        rows = [list(children((0,) * d))[:max_children] for d in range(len(rates))][:max_depth]
        return _first_draw_trees(rows, most_nodes)
    children = _children(name, rates)
    order = _likeliest(children, most_nodes - 1, max_depth, max_children)

    def shape(num_nodes: int) -> Shape | None:
        if num_nodes > len(order) + 1:
            return None
        chosen = order[: num_nodes - 1]
        return Shape(tuple(p for _, p in chosen), math.fsum([1.0, *(c for c, _ in chosen)]))

    return shape


def _likeliest(
    children: Callable[[Path], Sequence[float]],
    count: int,
    max_depth: int | None,
    max_children: int | None,
) -> list[tuple[float, Path]]:
    """The ``count`` likeliest paths, best first; ties to the shorter, then the lower ranks."""
    frontier: list[tuple[float, int, Path]] = []
    chosen: list[tuple[float, Path]] = []

    def open_below(chance: float, path: Path) -> None:
        if max_depth is None or len(path) < max_depth:
            for rank, rate in enumerate(children(path)[:max_children]):
                heapq.heappush(frontier, (-chance * rate, len(path) + 1, (*path, rank)))

    open_below(1.0, ())
    while frontier and len(chosen) < count:
        chance, _, path = heapq.heappop(frontier)
        chosen.append((-chance, path))
        open_below(-chance, path)
    return chosen


def _first_draw_trees(
    rates: list[Sequence[float]], most_nodes: int
) -> Callable[[int], Shape | None]:
    """Best trees whose siblings are first draws, by dynamic programming.

    ``gains[d][r][n]``, in units of the chance that the parent at depth d is right: the most that n
    nodes give when taken from draw r of that parent, the draws after it and all that hangs below
    them. Draw r itself must be among them, with m of the nodes below it.
    """
    count = most_nodes - 1
    nothing = np.full(count + 1, -np.inf)
    nothing[0] = 0.0
    gains: list[list[np.ndarray]] = [[nothing]]
    splits: list[list[np.ndarray]] = []
    for row in reversed(rates):
        below, by_rank, split_by_rank = gains[0][0], [nothing], []
        for rate in reversed(row):
            # What does not exist stays impossible at rate 0 too, where 0 * -inf is no number.
            inside, exists = np.full(count + 1, -np.inf), np.isfinite(below)
            inside[exists] = rate * (1.0 + below[exists])
            best, split = nothing.copy(), np.zeros(count + 1, dtype=np.int64)
            for n in range(1, count + 1):
                totals = inside[:n] + by_rank[0][:n][::-1]
                split[n] = int(totals.argmax())
                best[n] = totals[split[n]]
            by_rank.insert(0, best)
            split_by_rank.insert(0, split)
        gains.insert(0, by_rank)
        splits.insert(0, split_by_rank)

    def paths(depth: int, num_nodes: int, parent: Path, chance: float):
        rank = 0
        while num_nodes:
            path, own = (*parent, rank), chance * rates[depth][rank]
            num_below = int(splits[depth][rank][num_nodes])
            yield own, path
            yield from paths(depth + 1, num_below, path, own)
            num_nodes -= num_below + 1
            rank += 1

    def shape(num_nodes: int) -> Shape | None:
        if num_nodes > most_nodes or not np.isfinite(gains[0][0][num_nodes - 1]):
            return None
        chosen = _by_precedence(list(paths(0, num_nodes - 1, (), 1.0)))
        return Shape(tuple(p for _, p in chosen), math.fsum([1.0, *(c for c, _ in chosen)]))

    return shape


def _by_precedence(nodes: list[tuple[float, Path]]) -> list[tuple[float, Path]]:
    """Likeliest first, but no node before its parent or the sibling of the rank before."""
    chance_of = {path: chance for chance, path in nodes}
    ready, order = [], []

    def offer(path: Path) -> None:
        if path in chance_of:
            heapq.heappush(ready, (-chance_of[path], len(path), path))

    offer((0,))
    while ready:
        chance, _, path = heapq.heappop(ready)
        order.append((-chance, path))
        offer((*path, 0))
        offer((*path[:-1], path[-1] + 1))
    return order


@dataclasses.dataclass(frozen=True)
class Choice:
    """A shape and what it is expected to give.

    Attributes:
        shape: the tree.
        cycle_ms: milliseconds of its cycle.
        tok_s: tokens a second of one request, ``1000 * shape.accept_length / cycle_ms``.
    """

    shape: Shape
    cycle_ms: float

    @property
    def tok_s(self) -> float:
        return 1e3 * self.shape.accept_length / self.cycle_ms


def check_costs(function: str, cost_ms: Mapping[int, float], draft_ms: float) -> None:
    """ValueError unless ``cost_ms`` and ``draft_ms`` are as ``best_shape`` wants them."""
    if not cost_ms:
        raise fail(function, "cost_ms", "at least one number of nodes", dict(cost_ms))
    for num_nodes, ms in cost_ms.items():
        if num_nodes < 1 or not (ms > 0 and math.isfinite(ms)):
            raise fail(
                function, "cost_ms", "nodes >= 1 and finite milliseconds > 0", {num_nodes: ms}
            )
    if not (draft_ms >= 0 and math.isfinite(draft_ms)):
        raise fail(function, "draft_ms", "finite milliseconds >= 0", draft_ms)


def choices(
    rates: Rates,
    cost_ms: Mapping[int, float],
    draft_ms: float = 0.0,
    *,
    max_depth: int | None = None,
    max_children: int | None = None,
    first_draws: bool = False,
) -> list[Choice]:
    """The fastest tree of each number of nodes in ``cost_ms``, in ascending order of it.

    A cycle of N nodes and depth D takes ``cost_ms[N] + D * draft_ms``: the drafter runs once for
    the rows that the last cycle accepted and once for every level but the deepest. What the first
    of these takes beyond a level's step belongs to ``cost_ms`` of 2 and more nodes.

    The accept length depends on the shape alone and the cost on N and D alone, so for each pair of
    them the tree of greatest accept length is the fastest; all depths are tried. Numbers of nodes
    that rates and limits do not allow are left out.

    Args:
        rates: see the module.
        cost_ms: milliseconds of everything in a cycle but the drafter's steps, by nodes verified; 1
            node = plain decoding.
        draft_ms: milliseconds of one drafter step.
        max_depth, max_children, first_draws: see ``best_tree``.
    """
    name = "choices"
    check_costs(name, cost_ms, draft_ms)
    most = max(cost_ms)
    deepest = most - 1 if max_depth is None else min(max_depth, most - 1)
    if callable(rates):
        # Every depth asks for the same parents again.
        rates = functools.cache(rates)
    else:
        deepest = min(deepest, len(rates))
    best: dict[int, Choice] = {}
    for depth in range(deepest + 1):
        tree = _trees(name, rates, most, depth, max_children, first_draws)
        for num_nodes in sorted(cost_ms):
            shape = tree(num_nodes)
            if shape is None:
                break
            choice = Choice(shape, cost_ms[num_nodes] + shape.depth * draft_ms)
            if num_nodes not in best or choice.tok_s > best[num_nodes].tok_s:
                best[num_nodes] = choice
    return [best[n] for n in sorted(best)]


def fastest(candidates: Iterable[Choice]) -> Choice:
    """The choice of most tokens a second; fewest nodes where equal."""
    return max(candidates, key=lambda c: (c.tok_s, -c.shape.num_nodes))


def best_shape(
    rates: Rates, cost_ms: Mapping[int, float], draft_ms: float = 0.0, **limits
) -> Choice:
    """The fastest of ``choices``: a tree, a chain, or no drafts at all."""
    return fastest(choices(rates, cost_ms, draft_ms, **limits))


def best_chain_length(rates: Rates, cost_ms: Mapping[int, float], draft_ms: float = 0.0) -> Choice:
    """The fastest chain whose number of nodes, steps + 1, is in ``cost_ms``."""
    return best_shape(rates, cost_ms, draft_ms, max_children=1)
