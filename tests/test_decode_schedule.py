"""How decode deals out tiles of keys to groups of blocks, by the kernels' own code."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from attention_problems import ints
from variants_here import needs_host

from sandbox.kernels import OPS, conformance
from sandbox.kernels.attention.launch import key_arguments
from sandbox.kernels.cuda import CudaKernel, host_options

KERNEL = CudaKernel(Path(__file__).parent / "cuda_kernels" / "decode_schedule.cu", "decode_items")
OP = OPS["decode_attention"]
TOKENS, BLOCK_SIZE, THREADS = 16, 4, 64


class Item(NamedTuple):
    group: int
    sequence: int
    first: int
    end: int
    index: int
    parts: int
    slot: int


@pytest.fixture(
    params=[
        pytest.param("host", marks=needs_host),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def xp(request):
    if request.param == "host":
        return np
    import cupy

    return cupy


def problem_of(requests, tokens, **options):
    queries = np.zeros((requests, tokens, 1, 8), np.float32)
    cache = np.zeros((3, BLOCK_SIZE, 8), np.float32)
    return {"q": queries, "cache": cache, "softmax_scale": 1.0, "kv_lora_rank": 8} | options


def paged_lens(lens, *, tokens=1, columns=None, **options):
    """Arguments of requests so long, whose table has room for the longest or `columns` blocks."""
    needed = -(-max(lens, default=0) // BLOCK_SIZE)
    table = np.zeros((len(lens), needed if columns is None else columns), np.int32)
    return problem_of(len(lens), tokens, seq_lens=ints(*lens), block_table=table, **options)


def named_keys(requests, tokens, count):
    chosen = np.zeros((requests, tokens, count), np.int32)
    return problem_of(requests, tokens, seq_lens=None, block_table=None, indices=chosen)


def expected_ranges(problem):
    """Tiles from the first that some query sees to the last, of each sequence."""
    if problem.get("indices") is not None:
        requests, tokens, count = problem["indices"].shape
        return [(0, -(-count // TOKENS))] * (requests * tokens)
    tokens, room = problem["q"].shape[1], problem["block_table"].shape[1] * BLOCK_SIZE
    found = []
    for length in problem["seq_lens"].tolist():
        first = max(0, length - tokens - problem.get("window", 10**9) + 1)
        end = min(length, room)
        found.append((first // TOKENS, -(-end // TOKENS)) if first < end else (0, 0))
    return found


def items_of(xp, problem, cut, groups, size=0, most=0, overhead=2, checked=False):
    moved = {k: xp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in problem.items()}
    bound = OP.signature.bind(**moved)
    bound.apply_defaults()
    arguments = conformance.checked_arguments(OP, dict(bound.arguments))
    sequences = len(expected_ranges(problem))
    room = sequences + 2
    items = xp.full((groups, room, 6), -99, np.int32)
    counts = xp.zeros(groups, np.int32)
    macros = {
        "CUT": cut, "SPARSE": problem.get("indices") is not None, "TOKENS": TOKENS,
        "OVERHEAD": overhead, "THREADS": THREADS,
    }  # fmt: skip
    with host_options(checked=checked, seed=1, global_races=checked):
        KERNEL(
            groups, THREADS, *key_arguments(arguments), sequences, groups, size, most, room, items,
            counts, macros=macros,
        )  # fmt: skip
    return [
        Item(group, *items[group, i].tolist())
        for group in range(groups)
        for i in range(int(counts[group]))
    ]


def check(items, ranges, slots):
    """Each tile of each sequence once, in parts that are numbered, counted and have a place; a
    sequence without tiles once."""
    places = []
    for sequence, (first, end) in enumerate(ranges):
        parts = sorted((item for item in items if item.sequence == sequence), key=lambda i: i.first)
        assert [part.index for part in parts] == list(range(len(parts)))
        assert {part.parts for part in parts} == {len(parts)}
        if first == end:
            assert len(parts) == 1
            assert parts[0].first == parts[0].end
            continue
        borders = [first, *(part.end for part in parts)]
        assert borders[-1] == end
        for part, border in zip(parts, borders):
            assert part.first == border < part.end
        if len(parts) > 1:
            places += [part.slot for part in parts]
    assert len(items) == sum(sum(i.sequence == s for i in items) for s in range(len(ranges)))
    assert len(set(places)) == len(places)
    assert all(0 <= place < slots for place in places)


def problems():
    """Requests none, one, more than threads; empty ones at every place; windows, several tokens,
    tables that are too narrow, keys named by each query."""
    rng = np.random.default_rng(0)
    yield "nobody", paged_lens([])
    yield "one empty", paged_lens([0])
    yield "all empty", paged_lens([0] * 5)
    yield "one key", paged_lens([1])
    yield "one tile", paged_lens([TOKENS])
    yield "one long", paged_lens([5000])
    yield "empty around", paged_lens([0, 0, 300, 0, 0, 17, 0])
    yield "skewed", paged_lens([4000, *[16] * 40])
    yield "skewed at the end", paged_lens([*[1] * 70, 4000])
    yield "short ones", paged_lens([1] * 300)
    for count in (2, 63, 65, 200):
        lens = rng.integers(0, 400, count) * (rng.random(count) < 0.7)
        yield f"{count} random", paged_lens(lens.tolist())
    lens = rng.integers(0, 2000, 20).tolist()
    yield "window", paged_lens(lens, window=300, tokens=3)
    yield "small window", paged_lens(lens, window=1)
    yield "more tokens than keys", paged_lens([1, 0, 5, 40], tokens=8)
    yield "narrow table", paged_lens(lens, columns=100)
    yield "narrow table, window", paged_lens(lens, columns=100, window=500)
    yield "no table", paged_lens([5, 0], columns=0)
    yield "named keys", named_keys(3, 2, 130)
    yield "no named keys", named_keys(3, 2, 0)
    yield "many queries", named_keys(40, 2, 17)


each_problem = pytest.mark.parametrize(
    "problem", [pytest.param(problem, id=name) for name, problem in problems()]
)


@each_problem
@pytest.mark.parametrize("overhead", [1, 2, 5])
def test_shares(xp, problem, overhead):
    """Every share has as much to do as any other, but for a sequence's overhead at either end,
    which may be its neighbour's."""
    ranges = expected_ranges(problem)
    total = sum(end - first + overhead for first, end in ranges)
    for shares in (1, 2, 4, 7, 33, 132):
        items = items_of(xp, problem, "SHARES", shares, overhead=overhead)
        check(items, ranges, 2 * shares)
        size = max(1, -(-total // shares))
        for share in range(shares):
            own = [item for item in items if item.group == share]
            work = sum(item.end - item.first for item in own)
            work += overhead * sum(item.index == 0 for item in own)
            assert work < size + 2 * overhead
            if (share + 1) * size <= total:
                assert work > size - 2 * overhead


@each_problem
@pytest.mark.parametrize("size", [1, 3, 64])
def test_pieces(xp, problem, size):
    """Cut at multiples of `size` tiles, wherever the first tile is."""
    ranges = expected_ranges(problem)
    most = max(1, -(-max((end for _, end in ranges), default=0) // size))
    for spare in (0, 2):
        parts = len(ranges) * (most + spare)
        items = items_of(xp, problem, "PIECES", parts, size, most + spare)
        check(items, ranges, parts)
        for item in items:
            first, end = ranges[item.sequence]
            assert item.first == max(first, item.first // size * size)
            assert item.end == min(end, (item.first // size + 1) * size)


@each_problem
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_splits(xp, problem, splits):
    """At most so many, of one length but for the last."""
    ranges = expected_ranges(problem)
    parts = len(ranges) * splits
    items = items_of(xp, problem, "SPLITS", parts, splits, splits)
    check(items, ranges, parts)
    for item in items:
        assert item.parts <= splits
        first, end = ranges[item.sequence]
        length = max(1, -(-(end - first) // splits))
        assert item.end - item.first == min(length, end - item.first)


@pytest.mark.parametrize("cut", ["SHARES", "PIECES", "SPLITS"])
@pytest.mark.parametrize("lens", [[1], [0, 40, 0, 300], [1] * 90], ids=str)
def test_checked_build_finds_no_fault(xp, cut, lens):
    """More shares than there is work, too."""
    problem = paged_lens(lens)
    groups = 30 if cut == "SHARES" else 5 * len(lens)
    items = items_of(xp, problem, cut, groups, 5, 5, checked=True)
    check(items, expected_ranges(problem), 2 * groups)
