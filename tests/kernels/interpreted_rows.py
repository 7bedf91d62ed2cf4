"""Packing, splitting and page tables against their references and against the tree's own path: the same bits."""

import pytest
import torch
from interpreted import DEVICE
from interpreted import pytestmark as pytestmark

from laprox_sglang.cache import segment as segments
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.kernels import pack_rows as packing
from laprox_sglang.kernels import page_table as tables
from laprox_sglang.kernels.page_table import Part


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK", 64)
    monkeypatch.setattr(tables, "BLOCK", 16)
    monkeypatch.setattr(tables, "LANES", 2)
    monkeypatch.setattr(tables, "PARTS", 4)


def make_pool(slots, layers=2, heads=3, head_dim=64, dtype=torch.float32):
    """Every number of the pool is different, so that a row in the wrong place is seen."""
    k = torch.arange(layers * (slots + 1) * heads * head_dim).view(layers, slots + 1, heads, head_dim)
    k = k.to(torch.int64) % 251 if dtype != torch.float32 else k
    return RowPool(k.to(dtype).to(DEVICE), (k + 1).to(dtype).to(DEVICE))


def copy_of(pool):
    return RowPool(pool.k.clone(), pool.v.clone())


def selection(tokens, lists, entries, seed=0):
    """Any ``entries`` of tokens x lists entries, in CSR order."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(tokens * lists, generator=generator)[:entries].sort().values
    indptr = torch.zeros(lists + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(chosen // tokens, minlength=lists).cumsum(0)
    return (chosen % tokens).to(torch.int32).to(DEVICE), indptr.to(DEVICE)


def stretch(slots, tokens, seed=0):
    return (torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[:tokens] + 1).to(DEVICE)


def same(one, other):
    for mine, theirs in zip((one.k, one.v), (other.k, other.v), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("tokens", "entries"), [(1, 0), (1, 6), (63, 1), (63, 100), (63, 378), (20, 61)])
def test_pack(tokens, entries):
    pool = make_pool(70)
    slots, (positions, indptr) = stretch(70, tokens), selection(tokens, 6, entries)
    trees, reference = copy_of(pool), copy_of(pool)
    segment, _ = segments.pack(trees, slots, positions, indptr)
    count = trees.slots_for(entries)
    expected = packing.pack_rows_reference(reference.k, reference.v, slots, positions, indptr, count)
    found = packing.pack_rows(pool.k, pool.v, slots, positions, indptr, count)
    assert torch.equal(found, segment.row_ids) and torch.equal(found, expected) and found.dtype == torch.int32
    same(pool, trees)
    same(pool, reference)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "scratch"),
    [(torch.float32, 64, 0), (torch.bfloat16, 80, 0), (torch.float16, 96, 1 << 20), (torch.bfloat16, 256, 1 << 20)],
)
def test_move_of_overlapping_rows(monkeypatch, dtype, head_dim, scratch):
    """A rotation: each target is the source of another row. Also where the scratch holds a part of a row only."""
    monkeypatch.setattr(packing, "SCRATCH_BYTES", scratch)
    pool = make_pool(9, head_dim=head_dim, dtype=dtype)
    expected = copy_of(pool)
    source = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:41].to(torch.int32).to(DEVICE)
    target = source.roll(1)
    packing.move_rows((pool.k_rows, pool.v_rows), source, target)
    for rows in (expected.k_rows, expected.v_rows):
        rows[target.long()] = rows[source.long()]
    same(pool, expected)


def test_the_scratch_is_bounded():
    assert packing.column_width(1000, 128, 2) == 128
    assert packing.column_width(16 << 20, 128, 2) == 16 == packing.column_width(1 << 30, 128, 2)
    assert packing.column_width(16 << 20, 80, 2) == 16 and packing.column_width(10, 96, 2) == 32


@pytest.mark.parametrize(
    ("tokens", "entries", "at"), [(63, 100, 20), (63, 378, 1), (40, 7, 39), (12, 0, 5), (30, 90, 29)]
)
def test_split(tokens, entries, at):
    """Half of the entries packed, then split, by the kernels and by the tree's own path."""
    pool = make_pool(70)
    slots, (positions, indptr) = stretch(70, tokens), selection(tokens, 6, entries)
    whole, freed = segments.pack(pool, slots, positions, indptr)
    trees, reference = copy_of(pool), copy_of(pool)
    extra = freed[:1] if segments.split_needs(trees, whole, at) else None
    left, right, _ = segments.split(trees, whole, at, extra)
    own = torch.cat([left.slots, right.slots])
    counts = left.slots.shape[0], right.slots.shape[0]
    arguments = (whole.row_ids, whole.positions, whole.indptr, at, left.entries, own, counts)
    expected = packing.split_rows_reference(reference.k, reference.v, *arguments)
    found = packing.split_rows(pool.k, pool.v, *arguments)
    for half, mine, theirs in zip((left, right), found, expected, strict=True):
        for one, other, name in zip(mine, theirs, ("row_ids", "positions", "indptr"), strict=True):
            assert torch.equal(one, other) and torch.equal(one, getattr(half, name)), name
    same(pool, trees)
    same(pool, reference)


def test_rows_that_do_not_fit_are_refused():
    pool = make_pool(5)
    positions, indptr = selection(4, 6, 13)
    with pytest.raises(ValueError, match="13 entries do not fit 2 slots"):
        packing.pack_rows(pool.k, pool.v, stretch(5, 4), positions, indptr, 2)


LAYERS, HEADS, STRIDE = 2, 2, 100


def segment_part(entries, tokens=40, seed=0):
    _, indptr = selection(tokens, LAYERS * HEADS, entries, seed)
    rows = torch.randint(10_000, (entries,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Part(rows.to(DEVICE), indptr.long())


def dense_part(tokens, dtype=torch.int64, seed=0):
    return Part(stretch(STRIDE - 1, tokens, seed).to(dtype))


CASES = {
    "one segment": [[segment_part(50)]],
    "nothing": [[]],
    "no request": [],
    "empty lists": [[segment_part(1)], [segment_part(0), segment_part(2)]],
    "dense between": [[segment_part(70, seed=1), dense_part(33), segment_part(9)]],
    "batch": [
        [segment_part(63), dense_part(5)],
        [],
        [dense_part(17), segment_part(100, seed=2), dense_part(1, torch.int32)],
        [segment_part(33, seed=3)],
    ],
    "many parts": [[segment_part(5 + n, seed=n) for n in range(6)], [dense_part(2)]],
    "shared": [[segment_part(20, seed=4)] * 2, [segment_part(20, seed=4)]],
}


@pytest.mark.parametrize("layer_major", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_page_table(case, layer_major):
    requests = CASES[case]
    device = torch.device(DEVICE)
    total = sum(part.rows(LAYERS * HEADS) for parts in requests for part in parts)
    shape = (LAYERS, len(requests) * HEADS + 1) if layer_major else (len(requests), LAYERS * HEADS + 1)
    rows = torch.full((total + 3,), -7, dtype=torch.int32, device=device)
    indptr = torch.full(shape, -7, dtype=torch.int64, device=device)
    sizes = (LAYERS, HEADS, STRIDE, device, layer_major)
    tables.page_table(requests, *sizes, rows, indptr)
    if requests:
        expected = tables.page_table_reference(requests, *sizes)
        assert torch.equal(rows[:total], expected[0]) and torch.equal(indptr, expected[1])
    assert (rows[total:] == -7).all() and (indptr >= 0).all()
    for found, given in zip(tables.page_table(requests, *sizes), (rows[:total], indptr), strict=True):
        assert torch.equal(found, given)


def test_page_table_is_the_trees():
    """The order of ``concatenate``, which the tree's tables are made with on a CPU."""
    parts = [segment_part(40, seed=seed) for seed in range(3)]
    expected = segments.concatenate(
        LAYERS * HEADS, [(part.values, part.indptr) for part in parts], torch.device(DEVICE)
    )
    rows, indptr = tables.page_table([parts], LAYERS, HEADS, STRIDE, torch.device(DEVICE))
    assert torch.equal(rows, expected[0]) and torch.equal(indptr[0], expected[1])


def test_a_decode_step_adds_one_token_to_every_list():
    """For FlashInfer: the path stays, its last part is a longer piece of the request's row of the token table."""
    path, row = [segment_part(50), dense_part(4)], torch.randperm(90)[:30].to(torch.int32).to(DEVICE)
    for length in (10, 11, 12):
        requests = [[*path, Part(row[:length])]]
        found = tables.page_table(requests, LAYERS, HEADS, STRIDE, torch.device(DEVICE), layer_major=True)
        for one, other in zip(
            found, tables.page_table_reference(requests, LAYERS, HEADS, STRIDE, torch.device(DEVICE), True), strict=True
        ):
            assert torch.equal(one, other)


def test_static_buffers_that_are_too_small_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        tables.page_table(
            [[segment_part(50)]], LAYERS, HEADS, STRIDE, torch.device(DEVICE), rows=torch.empty(49, dtype=torch.int32)
        )
