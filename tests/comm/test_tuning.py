"""The tuned table: chosen from a clock, agreed by all ranks, kept on disk."""

import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from spec_kernels.comm import tuning
from spec_kernels.comm.launch import RankError, launch
from spec_kernels.comm.schedules import algorithms_for
from spec_kernels.comm.selection import DEFAULT_MAX_BYTES, Entry, Selection, seed
from spec_kernels.comm.simulator import boxes, predict_us
from spec_kernels.comm.tuning import (
    TUNED_BYTES,
    Key,
    cache_directory,
    cache_path,
    load,
    store,
    tune,
    tune_by_simulation,
    tune_group,
)

KEY = Key(
    ("GPU-a", "GPU-b"), ("0000:00:01.1/0000:01:00.0", "0000:00:02.1/0000:02:00.0"), "580", "1"
)
TABLE = Selection((Entry(4096, "one_shot", 2), Entry(1 << 20, "two_shot", 32)), origin="measured")


class Clock:
    """alpha + beta per KiB for each algorithm; more than 16 blocks cost, fewer help nothing."""

    COSTS = {
        "one_shot": (7.0, 0.3),
        "two_shot": (12.0, 0.08),
        "hierarchical": (17.0, 0.06),
        "hierarchical_pull": (18.0, 0.06),
    }

    def __init__(self, slow: float = 0.0):
        self.calls = []
        self.slow = slow

    def __call__(self, algorithm, num_blocks, num_bytes):
        self.calls.append((algorithm, num_blocks, num_bytes))
        alpha, beta = self.COSTS[algorithm]
        grid = min(num_blocks, -(-num_bytes // 2048))
        us = alpha + beta * num_bytes / 1024 + max(0, grid - 16) + self.slow
        return [us, us + 50.0, us, us - 1.0, us]  # a median, no mean


def test_the_fastest_is_chosen():
    clock = Clock()
    table, timed = tune(clock, 8, island_size=4)
    assert table.origin == "measured" and table.island_size == 4
    assert table.entries[-1].max_bytes == DEFAULT_MAX_BYTES
    for size in TUNED_BYTES:
        mine = [t for t in timed if t.num_bytes == size]
        assert {t.algorithm for t in mine} == set(algorithms_for(8, 4))
        algorithm, num_blocks = table.pick(size)
        chosen = next(t for t in mine if (t.algorithm, t.num_blocks) == (algorithm, num_blocks))
        assert chosen.us <= min(t.us for t in mine) * 1.02
    assert [e.algorithm for e in table.entries if e.max_bytes >= 1 << 19] == ["hierarchical"]
    assert all(table.pick(size)[1] <= 16 for size in TUNED_BYTES if size > 1 << 16)
    again = Clock()
    assert tune(again, 8, island_size=4) == (table, timed) and again.calls == clock.calls


def test_ties_do_not_depend_on_noise():
    """Within two percent the lower number wins, and the usual grid."""
    us = {"one_shot": 10.1, "two_shot": 10.0, "hierarchical": 9.95}
    clock = lambda algorithm, num_blocks, size: [us[algorithm] - 0.001 * num_blocks]  # noqa: E731
    table, _ = tune(clock, 4, sizes=[1 << 20], algorithms=list(us))
    assert table.entries == (Entry(1 << 20, "one_shot", 32),)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_only_what_the_group_can_run(num_ranks):
    table, timed = tune(Clock(), num_ranks, sizes=[16, 1 << 16])
    assert {t.algorithm for t in timed} == {"one_shot", "two_shot"}
    # One tile: no grid differs from the default. 32 tiles: smaller ones do, larger ones do not.
    assert [t.num_blocks for t in timed if t.num_bytes == 16] == [32, 32]
    assert [t.num_blocks for t in timed if t.num_bytes == 1 << 16] == [32, 32, 8, 16]
    assert Selection.from_dict(table.as_dict()) == table


@pytest.mark.parametrize("times", [[], [0.0], [float("nan")], [float("inf")], [-1.0, 2.0]])
def test_impossible_times(times):
    with pytest.raises(ValueError, match="clock: expected positive times"):
        tune(lambda *call: times, 2, sizes=[64])


@pytest.mark.parametrize("sizes", [[], [0, 64], [-1]])
def test_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="sizes: expected at least one"):
        tune(Clock(), 2, sizes=sizes)


@pytest.mark.parametrize("name", boxes())
def test_prediction(name):
    box = boxes()[name]
    sizes = [14336, 1 << 20]
    table, _ = tune_by_simulation(box, 8, 4, sizes=sizes)
    assert table.origin == "predicted"
    for size in sizes:
        algorithm, num_blocks = table.pick(size)
        us = predict_us(box, algorithm, size, 8, island_size=4, num_blocks=num_blocks)
        for other in algorithms_for(8, 4):
            if other != "hierarchical_pull" or box.loads_measured:
                theirs = predict_us(box, other, size, 8, island_size=4, num_blocks=num_blocks)
                assert us <= 1.02 * theirs


# The cache.


@pytest.fixture
def said():
    return []


def test_kept_and_found(tmp_path, said):
    directory = tmp_path / "a" / "b"
    assert load(KEY, directory, said.append) is None
    path = store(KEY, TABLE, directory, said.append)
    assert path == cache_path(KEY, directory) and path.stat().st_mode & 0o077 == 0
    assert load(KEY, directory, said.append) == TABLE
    assert os.listdir(directory) == [path.name] and said == []


@pytest.mark.parametrize(
    "change",
    [
        dict(uuids=("GPU-b", "GPU-a")),
        dict(pci_paths=("0000:00:01.1/0000:01:00.0", "0000:00:03.1/0000:02:00.0")),
        dict(driver="581"),
        dict(version="2"),
        dict(island_size=2),
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_finds_nothing(change, tmp_path, said):
    store(KEY, TABLE, tmp_path, said.append)
    other = replace(KEY, **change)
    assert load(other, tmp_path, said.append) is None and said == []
    # Nor if the file lies where its own should be.
    cache_path(KEY, tmp_path).rename(cache_path(other, tmp_path))
    assert load(other, tmp_path, said.append) is None
    assert "made for other devices" in said[0]


def edited(**changes):
    def edit(text):
        return json.dumps(json.loads(text) | changes).encode()

    return edit


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda text: b"", "Expecting value"),
        (lambda text: text[: len(text) // 2], ""),
        (lambda text: b"\xff\xfe" + text, "decode"),
        (lambda text: b"[" * 30000, ""),
        (lambda text: b" " * (1 << 17), "longer than"),
        (lambda text: b"[]", "format"),
        (edited(format=0), "format 1"),
        (edited(format=2), "format 1"),
        (edited(key=None), "made for other devices"),
        (edited(selection={"entries": [[64, "two_shot", 1]]}), "checksum"),
        (lambda text: text.replace(b'"two_shot"', b'"one_shot"'), "checksum"),
        (edited(checksum="0"), "checksum"),
    ],
)
def test_damaged_files_are_ignored(damage, reason, tmp_path, said):
    path = store(KEY, TABLE, tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert load(KEY, tmp_path, said.append) is None
    assert len(said) == 1 and str(path) in said[0] and reason in said[0]
    store(KEY, TABLE, tmp_path)
    assert load(KEY, tmp_path, said.append) == TABLE


def test_every_cut_is_seen(tmp_path, said):
    path = store(KEY, TABLE, tmp_path)
    text = path.read_bytes()
    for length in range(len(text)):
        path.write_bytes(text[:length])
        assert load(KEY, tmp_path, said.append) is None
    assert len(said) == len(text)


@pytest.mark.parametrize(
    "table, reason",
    [
        (Selection((Entry(64, "hierarchical", 1),), 2), "has no hierarchical"),
        (replace(TABLE, island_size=4), "such islands"),
    ],
)
def test_a_table_of_another_group(table, reason, tmp_path, said):
    store(KEY, table, tmp_path)
    assert load(KEY, tmp_path, said.append) is None and reason in said[0]


def test_what_cannot_be_read_or_written(tmp_path, said):
    (tmp_path / "file").write_text("in the way")
    assert store(KEY, TABLE, tmp_path / "file", said.append) is None
    assert load(KEY, tmp_path / "file", said.append) is None
    cache_path(KEY, tmp_path).mkdir()
    assert load(KEY, tmp_path, said.append) is None
    assert store(KEY, TABLE, tmp_path, said.append) is None
    assert len(said) == 4 and all("all-reduce table" in text for text in said)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["file", cache_path(KEY, tmp_path).name]
    )


def test_a_pipe_in_its_place(tmp_path, said):
    os.mkfifo(cache_path(KEY, tmp_path))
    assert load(KEY, tmp_path, said.append) is None and "no regular file" in said[0]
    store(KEY, TABLE, tmp_path, said.append)
    assert load(KEY, tmp_path, said.append) == TABLE and len(said) == 1


def test_someone_elses_file_is_ignored(tmp_path, said, monkeypatch):
    store(KEY, TABLE, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert load(KEY, tmp_path, said.append) is None and "another user" in said[0]


def test_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "spec-kernels" / "allreduce"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_directory() == tmp_path / "home/.cache/spec-kernels/allreduce"


def test_concurrent_writers(tmp_path, said):
    """Readers see whole tables only, and nothing is left over."""
    tables = [Selection((Entry(64 * (k + 1), "one_shot", 1),)) for k in range(4)]
    store(KEY, tables[0], tmp_path)
    done = threading.Event()
    seen = set()

    def write(k):
        for _ in range(25):
            store(KEY, tables[k], tmp_path, said.append)

    def read():
        while not done.is_set():
            seen.add(load(KEY, tmp_path, said.append))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    reader = threading.Thread(target=read)
    for thread in [reader, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert said == [] and seen <= set(tables)
    assert os.listdir(tmp_path) == [cache_path(KEY, tmp_path).name]


# Ranks.


def tuned_rank(comm, directory, slow, refresh=False, key=KEY, sizes=(2048, 1 << 20)):
    clock, said = Clock(slow[comm.rank]), []
    table = tune_group(
        comm, key, clock, refresh=refresh, directory=directory, warn=said.append, sizes=sizes
    )
    return table.as_dict(), len(clock.calls), said


def test_ranks_agree_and_keep(tmp_path):
    """Each rank's clock differs; the slowest counts for all. The second time nothing is timed."""
    first = launch(tuned_rank, 2, tmp_path, [0.0, 40.0])
    assert first[0] == first[1] and first[0][1] > 0 and first[0][2] == []
    expected, _ = tune(Clock(40.0), 2, sizes=(2048, 1 << 20))
    assert first[0][0] == expected.as_dict()
    assert launch(tuned_rank, 2, tmp_path, [0.0, 0.0]) == [(first[0][0], 0, [])] * 2
    again = launch(tuned_rank, 2, tmp_path, [0.0, 0.0], True)
    assert again[0][1] == again[1][1] > 0
    assert load(KEY, tmp_path).as_dict() == again[0][0]


def test_ranks_with_other_keys_all_raise(tmp_path):
    def rank(comm):
        key = replace(KEY, driver=f"58{comm.rank}")
        try:
            tuned_rank(comm, tmp_path, [0.0, 0.0], key=key)
        except RuntimeError as error:
            return str(error)

    texts = launch(rank, 2)
    assert texts[0] == texts[1]
    assert "driver: rank 0 has 580, rank 1 has 581" in texts[0]
    assert os.listdir(tmp_path) == []


def test_ranks_with_other_tables_all_raise(tmp_path, monkeypatch):
    """As when one rank runs other code: the digest is what sees it."""

    def rank(comm):
        if comm.rank == 1:
            monkeypatch.setattr(tuning, "TIE", 10.0)
        try:
            tuned_rank(comm, tmp_path, [0.0, 0.0])
        except RuntimeError as error:
            return str(error)

    texts = launch(rank, 2)
    assert texts[0] == texts[1] and "disagree" in texts[0] and "all-reduce table" in texts[0]
    assert os.listdir(tmp_path) == []


def test_a_rank_that_fails_fails_all(tmp_path):
    def rank(comm):
        def clock(*call):
            raise RuntimeError("no clock here")

        tune_group(comm, KEY, clock if comm.rank else Clock(), directory=tmp_path, sizes=[64])

    with pytest.raises(RankError, match="no clock here"):
        launch(rank, 2, timeout=60)
    assert os.listdir(tmp_path) == []


def test_the_seed_covers_what_is_tuned():
    assert seed(8).entries[-1].max_bytes == max(TUNED_BYTES)
    assert asdict(KEY)["driver"] == "580" and Path(cache_path(KEY, Path("x"))).parent == Path("x")
