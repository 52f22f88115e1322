"""Records acceptance traces: target and drafter run over texts that the target wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from spec_kernels.decode.kv_cache import KVCache
from spec_kernels.models.drafter import Drafter
from spec_kernels.models.layers import Step
from spec_kernels.models.target import Target
from spec_kernels.ops.tree_build import num_words, tree_from_paths
from spec_kernels.planning.tree_shape import Path

# Places whose drafts are run together: their rows must fit the words of one attention.
_PLACES = 16
_MAX_ROWS = 1024


class Recorder:
    """Runs target and drafter over finished texts and notes what drafts would have been.

    Args:
        target, drafter: the models, whole on this rank; the target captures the drafter's layers.
        paths: of the drafts whose confidences are noted, likeliest first.
        depth: depths whose right rank is noted, at least that of the deepest path.
        num_ranks: ranks told apart.
        max_tokens: of the longest text.

    Raises:
        ValueError: paths that are no tree, a depth below theirs, or too many drafts.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        paths: Sequence[Path],
        *,
        depth: int,
        num_ranks: int,
        max_tokens: int,
    ):
        self.target, self.drafter = target, drafter
        self.paths, self.depth, self.num_ranks = tuple(map(tuple, paths)), depth, num_ranks
        tree_from_paths(self.paths)
        deepest = max(map(len, self.paths), default=0)
        if depth < max(1, deepest):
            raise ValueError(f"recorder: depth: expected at least {max(1, deepest)}, got {depth}")
        parents = {path[:-1] for path in self.paths}
        # Drafts that are run, by depth, because others follow them; and below each depth the
        # text's own token, whose successors' ranks are wanted.
        self.live = [
            sorted(p for p in self.paths if p in parents and len(p) == d) for d in range(1, depth)
        ]
        self.width = 1 + max((path[-1] for path in self.paths), default=0)
        self.num_rows = sum(len(level) + 1 for level in self.live)
        if _PLACES * (1 + self.num_rows) > _MAX_ROWS:
            raise ValueError(
                f"recorder: paths: expected at most {_MAX_ROWS // _PLACES - 1} rows to run, got "
                f"{self.num_rows}"
            )
        self.max_tokens = max_tokens
        self.cache = KVCache(target, drafter, 1, max_tokens + _PLACES * self.num_rows)

    def record(self, ids: Sequence[int], first: int) -> tuple[np.ndarray, np.ndarray]:
        """``ranks [T, D]`` and ``confidence [T, M]`` of the places of one text.

        Args:
            ids: prompt and continuation; the last D tokens are what drafts are compared with only.
            first: index of the first new token, the first root. T = len(ids) - D - first.
        """
        depth, num_ids = self.depth, len(ids)
        if not 1 <= first < num_ids - depth or num_ids > self.max_tokens:
            raise ValueError(
                f"recorder: ids: expected 1 <= first < number of ids - {depth}, at most "
                f"{self.max_tokens} of them, got first = {first} and {num_ids} ids"
            )
        text = torch.tensor(list(ids), device=self.target.device)
        self.cache.reserve(0, self.cache.capacity)
        try:
            with torch.inference_mode():
                features, logits = self._commit(text[:-depth])
                blocks = []
                # From the end: a block's drafts overwrite rows that only later blocks see.
                for start in reversed(range(first, num_ids - depth, _PLACES)):
                    count = min(_PLACES, num_ids - depth - start)
                    rows = slice(start - 1, start - 1 + count)
                    blocks.append(self._block(text, start, features[rows], logits[rows]))
        finally:
            self.cache.release(0)
        ranks, confidence = zip(*reversed(blocks), strict=True)
        return np.concatenate(ranks), np.concatenate(confidence)

    def _commit(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the text through both models: features and logits of the rows before its roots."""
        cache, count = self.cache, len(ids)
        features, normed = [], []
        for start in range(0, count, _MAX_ROWS // 2):
            part = ids[start : start + _MAX_ROWS // 2]
            size = len(part)
            step = self._step(
                part, start + torch.arange(size), list(range(size)), _causal(size), start
            )
            capture = self.target.new_capture(size)
            last = torch.tensor([size - 1], device=ids.device)
            self.target.forward(step, cache.target, capture, last)
            # The drafter's row t takes the token after t, so the last token has no row yet.
            following = torch.cat((part[1:], ids[start + size : start + size + 1], part[:1]))[:size]
            step = dataclasses.replace(step, tokens=following.unsqueeze(0))
            feature, final = self.drafter.forward(step, self.drafter.fuse(capture), cache.draft)
            features.append(feature.clone())
            normed.append(final.clone())
        return torch.cat(features), self.drafter.logits(torch.cat(normed))

    def _step(self, tokens, positions, slots, words, context: int) -> Step:
        device = self.target.device
        return Step(
            tokens.view(1, -1),
            positions.view(1, -1).to(device),
            words.to(device),
            torch.tensor([slots], dtype=torch.int64, device=device),
            self.cache.block_tables,
            torch.tensor([context], dtype=torch.int64, device=device),
        )

    def _block(self, text, start: int, feature, logits) -> tuple[np.ndarray, np.ndarray]:
        """Records of the roots ``text[start], ...``, whose rows' outputs are given.

        The drafts of all roots run depth by depth. ``above`` names what each root's rows of the
        last depth were: drafts that others follow, by path, and last the text's own token (None).
        """
        count, target_ids = len(feature), self.drafter.target_ids
        confidence = np.zeros((count, len(self.paths)))
        ranks = np.zeros((count, self.depth), np.int8)
        above: list[Path | None] = [(), None]
        feature, logits = (x.repeat_interleave(2, 0) for x in (feature, logits))
        # All see rows 0 .. start - 1, the context; root i also the rows of the i roots before it.
        seen = [[(1 << i) - 1] * 2 for i in range(count)]
        slot = count - 1
        for depth in range(1, self.depth + 1):
            chances = logits.float().softmax(-1).view(count, len(above), -1)
            best = chances.topk(self.width, -1)
            following = text[start + depth : start + depth + count]
            ranks[:, depth - 1] = self._rank(chances[:, -1], following)
            for column, path in enumerate(self.paths):
                if len(path) == depth:
                    values = best.values[:, above.index(path[:-1]), path[-1]]
                    confidence[:, column] = values.double().cpu().numpy()
            if depth == self.depth:
                break
            below = self.live[depth - 1]
            parents = [*(above.index(path[:-1]) for path in below), len(above) - 1]
            drafts = zip(parents, below, strict=False)
            drafted = [target_ids.take(best.indices[:, at, path[-1]]) for at, path in drafts]
            each = len(parents)
            seen = [
                [row[at] | 1 << slot + i * each + j for j, at in enumerate(parents)]
                for i, row in enumerate(seen)
            ]
            slots = list(range(slot, slot + count * each))
            slot += count * each
            step = self._step(
                torch.stack([*drafted, following], 1),
                start + depth - 1 + torch.arange(count).repeat_interleave(each),
                slots,
                _words([bits for row in seen for bits in row], slot),
                start,
            )
            rows = [i * len(above) + at for i in range(count) for at in parents]
            feature = feature.index_select(0, torch.tensor(rows, device=feature.device))
            feature, normed = self.drafter.forward(step, feature, self.cache.draft)
            logits = self.drafter.logits(normed)
            above = [*below, None]
        return ranks, confidence

    def _rank(self, chances: torch.Tensor, tokens: torch.Tensor) -> np.ndarray:
        """Rank of each row's token among its candidates; -1 where it is none of the first."""
        best = self.drafter.target_ids.take(chances.topk(self.num_ranks, -1).indices)
        hit = best == tokens.unsqueeze(1)
        return torch.where(hit.any(1), hit.long().argmax(1), -1).to(torch.int8).cpu().numpy()


def _causal(size: int) -> torch.Tensor:
    return _words([(2 << row) - 1 for row in range(size)], size)


def _words(bits: Sequence[int], num_rows: int) -> torch.Tensor:
    """``[1, rows, W]`` int32 words of sets given as integers."""
    num = num_words(num_rows)
    raw = b"".join(x.to_bytes(4 * num, "little") for x in bits)
    return torch.from_numpy(np.frombuffer(raw, "<i4").copy()).view(1, len(bits), num)
