"""The correctness part of the kernel benchmark: every kind of size against the references, then graphs and large pools.

On a GPU this is the suite that no CPU can run. In Triton's interpreter the same checks run on small sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .bench import compare
from .bench_cases import LAYER, LAYERS, TAIL, DecodeCase, make_case, ours
from .bench_compress import POOL_KERNEL, Stretch
from .column_scores import column_norms_reference, pooled_scores_reference, window_lse_reference
from .pack_rows import pack_rows_reference
from .projected_norm import projected_norm_reference
from .ragged_decode import ragged_decode
from .ragged_extend import ragged_extend, ragged_extend_reference, ragged_lse, ragged_lse_reference
from .select import select_reference
from .shapes import MODELS, ModelShape

# (query heads of a group, head dim, type): every supported group and size, each type
SIZES = (
    (1, 64, torch.bfloat16),
    (2, 80, torch.float16),
    (3, 96, torch.bfloat16),
    (4, 128, torch.float32),
    (5, 64, torch.float16),
    (6, 128, torch.bfloat16),
    (7, 128, torch.bfloat16),
    (12, 64, torch.float32),
    (16, 256, torch.bfloat16),
)


@dataclass
class Check:
    name: str
    passed: bool
    detail: str


def check_all(device: str) -> list[Check]:
    compression = _compression(device)
    return [*_decode_sizes(device), *_extend(device), _lse(device), _replay(device), _far_rows(device), *compression]


def _check(name: str, found: torch.Tensor, expected: torch.Tensor) -> Check:
    error, passed = compare(found, expected)
    return Check(name, passed and bool(expected.isfinite().all()), f"largest difference {error:.2g}")


def _decode_sizes(device: str) -> Iterator[Check]:
    small = device == "cpu"
    mean = 70 if small else 700
    for group, size, dtype in SIZES:
        shape = ModelShape("", LAYERS, 0, 2 * group, 2, size, 0, 0)
        case = make_case(shape, "tiny" if small else "scattered", 2 if small else 5, mean, device, dtype)
        yield _check(f"decode, group {group}, D {size}, {dtype}", ours(case)(), case.expected)
    shape = ModelShape("", LAYERS, 0, 6, 2, 64, 0, 0)
    for lists in ("ample", "skewed", "tiny"):
        case = make_case(shape, lists, 3, mean, device)
        yield _check(f"decode, {lists} lists", ours(case)(), case.expected)
    case = make_case(shape, "ample", 2, mean, device, torch.float32, logit_cap=2.0)
    yield _check("decode, capped logits", ours(case)(), case.expected)
    if not small:
        for shape in MODELS.values():
            case = make_case(shape, "skewed", 4, 6554, device)
            yield _check(f"decode, {shape.name}, skewed lists", ours(case)(), case.expected)


def _extend(device: str) -> Iterator[Check]:
    shape = ModelShape("", LAYERS, 0, 6, 2, 64, 0, 0)
    for new in (2, TAIL):
        case = make_case(shape, "skewed", 2, 40 if device == "cpu" else 700, device)
        q = torch.randn(case.batch * new, shape.query_heads, shape.head_dim, device=device).to(case.q.dtype)
        q_start = torch.arange(0, case.batch * new + 1, new, device=device)
        arguments = case.arguments | {"q": q, "q_start": q_start}
        expected = ragged_extend_reference(**arguments)
        found = ragged_extend(**arguments, most_new=new, out=torch.full_like(q, math.nan))
        yield _check(f"extend by {new} tokens", found, expected)


def _lse(device: str) -> Check:
    case = make_case(ModelShape("", LAYERS, 0, 6, 2, 64, 0, 0), "ample", 2, 50, device)
    q = torch.randn(2, 8, 6, 64, device=device).to(case.q.dtype)
    arguments = (q, case.k_rows, LAYER, case.rows, case.indptr, 2, case.scale)
    return _check("log-sum-exp of the lists", ragged_lse(*arguments), ragged_lse_reference(*arguments))


def recorded(step: Callable[[], object], device: str) -> Callable[[], object]:
    """The step as a CUDA graph; where there is no GPU, the step itself, which has its addresses from now on too."""
    step()
    if device == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _replay(device: str) -> Check:
    """A recorded step, replayed with lists shorter and longer than those it was recorded with, equals an eager one."""
    shape = ModelShape("", LAYERS, 0, 16, 4, 128, 0, 0)
    means = (60, 3, 150) if device == "cpu" else (900, 3, 6000)
    cases = [make_case(shape, "ample", 4, mean, device) for mean in means]
    first, largest = cases[0], max(len(case.k_rows) for case in cases)
    rows = torch.zeros(max(len(case.rows) for case in cases), dtype=torch.int32, device=device)
    k, v = (torch.zeros(largest, shape.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    buffers: dict[str, Any] = dict(indptr=first.indptr.clone(), slots=first.slots.clone(), q=first.q.clone())
    static = replace(first, k_rows=k, v_rows=v, rows=rows, **buffers)
    out = torch.empty_like(static.q)

    def fill(case: DecodeCase) -> None:
        # Row ids depend on the slots of a layer: here they are those of the largest case.
        layer_rows, own = largest // LAYERS, len(case.k_rows) // LAYERS
        rows[: len(case.rows)] = case.rows + case.rows // own * (layer_rows - own)
        for pool, source in ((k, case.k_rows), (v, case.v_rows)):
            pool.view(LAYERS, layer_rows, -1)[:, :own] = source.view(LAYERS, own, -1)
        for name, buffer in buffers.items():
            buffer.copy_(getattr(case, name))

    fill(first)
    replay = recorded(lambda: ragged_decode(**static.arguments, out=out), device)
    checks = []
    for case in (*cases[1:], first):
        fill(case)
        out.fill_(math.nan)
        replay()
        checks.append(_check("", out, case.expected))
    worst = min(checks, key=lambda check: check.passed)
    return replace(worst, name="a recorded step, lists shorter and longer than when it was recorded")


def _far_rows(device: str) -> Check:
    """Rows behind the 2^31st number of the pool (on a GPU: elsewhere the pool is small)."""
    numbers = 2**31 + 2**24 if device == "cuda" else 2**20
    name = f"rows at the end of a pool of {numbers:,} numbers"
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 5 * numbers:
        return Check(name, True, "not run: too little free memory")
    case = make_case(ModelShape("", LAYERS, 0, 4, 1, 128, 0, 0), "ample", 1, 500, device)
    k, v = (torch.zeros(numbers // 128, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    # The tail's rows follow from the slots of a layer, so they lie elsewhere than in the case's own pool.
    tail = LAYER * (len(k) // LAYERS) + case.slots[0].long()
    for large, small in ((k, case.k_rows), (v, case.v_rows)):
        large[-len(small) :] = small
        large[tail] = torch.randn(TAIL, 128, device=device).to(large.dtype)
    far = replace(case, k_rows=k, v_rows=v, rows=case.rows + (len(k) - len(case.k_rows)))
    return _check(name, ours(far)(), far.expected)


def _compression(device: str) -> Iterator[Check]:
    """Scores within rounding; selection and packing in every bit."""
    shape, tokens = ModelShape("", 2, 0, 6, 2, 64, 0, 0), 60 if device == "cpu" else 5000
    stretch = Stretch.make(shape, tokens, 0.1, device, torch.bfloat16)
    q, k, v, slots = stretch.q, stretch.k, stretch.v, stretch.slots
    scale = shape.head_dim**-0.5
    lse = window_lse_reference(q, k, slots, scale)
    attention = column_norms_reference(q, k, slots, lse, 0, scale)
    norms = projected_norm_reference(v, slots, stretch.factors)
    scores = pooled_scores_reference(attention, norms, POOL_KERNEL)
    found = stretch.scores()
    yield _check("scores of a stretch", (found / scores.max()).to(q.dtype), (scores / scores.max()).to(q.dtype))
    positions, indptr = stretch.selection(found)
    expected = select_reference(found, stretch.kept * 4, stretch.protected)
    same = torch.equal(positions, expected[0]) and torch.equal(indptr.long(), expected[1].long())
    yield Check("selection", same, f"{len(positions)} of {found.numel()} entries")
    pools = k.clone(), v.clone()
    rows = stretch.pack(positions, indptr)
    packed = pack_rows_reference(*pools, slots, positions, indptr, stretch.kept)
    same = torch.equal(rows, packed) and torch.equal(k, pools[0]) and torch.equal(v, pools[1])
    yield Check("packing", same, f"{len(rows)} rows")
