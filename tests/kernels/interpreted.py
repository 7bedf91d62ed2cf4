"""The Triton kernels against their plain-torch references. ``test_kernels.py`` runs this file in its own process:
TRITON_INTERPRET must be set before triton is imported. On a machine with a GPU the same tests run on it.
"""

import math
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "attention"))

from ragged_cases import SHAPES, make_case, tolerance

from laprox_sglang.attention.base import create
from laprox_sglang.attention.torch_reference import TorchRaggedAttention
from laprox_sglang.kernels import decode_plan as planning
from laprox_sglang.kernels import ragged_decode as decode
from laprox_sglang.kernels import ragged_extend as extend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, where results are masked
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Splits of at least 32 entries, so that small cases have several."""
    monkeypatch.setattr(planning, "LEAST_PIECE", 32)
    monkeypatch.setattr(extend, "LEAST_SPLIT", 32)
    for module in (decode, extend):
        monkeypatch.setattr(module, "BLOCK_N", 32)
    monkeypatch.setattr(extend, "BLOCK_M", 16)


def lists(case):
    batch = case.batch
    return batch.rows, batch.indptr, batch.slots, batch.pool_index, batch.tail_start, batch.seq_len


def make_plan(batch, wanted):
    """Room for a plan of so many pieces, and its workspace, all of it poisoned."""
    plan = planning.DecodePlan.empty(batch.num_layers, batch.size * batch.num_kv_heads, batch.indptr.device, wanted)
    plan.pieces.fill_(10**9)
    plan.first.fill_(10**9)
    return planning.plan_decode(batch.indptr, batch.tail_start, batch.seq_len, batch.num_kv_heads, decode.BLOCK_N, plan)


def check_decode(case, splits=4, logit_cap=0.0):
    """``splits``: pieces per list of mean length."""
    arguments = (case.q, case.k_rows, case.v_rows, case.layer, *lists(case), case.batch.num_kv_heads, case.scale)
    heads, group = case.batch.num_kv_heads, case.q.shape[1] // case.batch.num_kv_heads
    plan = make_plan(case.batch, splits * case.batch.size * heads)
    numel = decode.workspace_numel(plan.programs, group, case.q.shape[2], 1)
    workspace = torch.full((numel,), math.nan, device=case.q.device)
    out = case.poisoned_out()
    result = decode.ragged_decode(*arguments, logit_cap, out, workspace, plan)
    assert result is out
    torch.testing.assert_close(out, decode.ragged_decode_reference(*arguments, logit_cap), **tolerance(case.q.dtype))


def check_extend(case, splits=1, logit_cap=0.0):
    pools = (case.q, case.k_rows, case.v_rows, case.layer, *lists(case), case.batch.q_start)
    rest = (case.batch.num_kv_heads, case.scale, logit_cap)
    out = case.poisoned_out()
    result = extend.ragged_extend(*pools, int(case.batch.q_len_host.max()), *rest, out, None, splits)
    assert result is out
    torch.testing.assert_close(out, extend.ragged_extend_reference(*pools, *rest), **tolerance(case.q.dtype))


@pytest.mark.parametrize("shape", [name for name in SHAPES if name.startswith("decode")])
def test_decode_shapes(shape):
    check_decode(make_case(**SHAPES[shape]).to(DEVICE))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 63, 100])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_at_every_edge_of_a_split(n, splits):
    check_decode(make_case([1], [1], [n], kv_heads=1, group=2, layers=1, layer=0).to(DEVICE), splits)
    check_decode(make_case([1], [n], [7], kv_heads=1, group=2, layers=1, layer=0).to(DEVICE), splits)


@pytest.mark.parametrize(
    ("tail", "longest", "wanted"),
    [
        ([1], [0], 1),
        ([3], [700], 20),
        ([1, 33, 70], [63, 1, 100], 5),
        ([1] * 4, [3000, 20, 0, 90], 16),
        ([9], [500], 900),
    ],
)
def test_decode_plan(tail, longest, wanted):
    batch = make_case([1] * len(tail), tail, longest, layers=3).to(DEVICE).batch
    plan = make_plan(batch, wanted)
    pieces, first = planning.plan_decode_reference(
        batch.indptr, batch.tail_start, batch.seq_len, batch.num_kv_heads, decode.BLOCK_N, wanted
    )
    assert plan.first.tolist() == first
    for layer, mine in enumerate(pieces):
        found = plan.pieces[layer]
        assert [tuple(piece[:3]) for piece in found[: len(mine)].tolist()] == mine
        assert (found[len(mine) :, 0] == -1).all()


def test_a_long_list_gets_as_many_pieces_as_its_share():
    """One head with 16 times the mean: no piece is longer than that of equal lists of the same total."""
    longest = 0
    for lengths in ([40_000] * 32, [640_000] + [640_000 // 31] * 31):
        indptr = torch.tensor([0, *lengths]).cumsum(0)[None].to(DEVICE)
        zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        plan = planning.DecodePlan.empty(1, 32, torch.device(DEVICE), 528)
        planning.plan_decode(indptr, zeros, zeros, 32, 64, plan)
        used = plan.pieces[0][plan.pieces[0][:, 0] >= 0]
        spans = used[:, 2] - used[:, 1]
        assert spans.sum() == sum(lengths) and (spans > 0).all()
        longest = max(longest, int(spans.max()))
    assert longest <= 1.05 * sum(lengths) / 528


def test_pieces_fill_the_device_once():
    units = planning.device_units(torch.device(DEVICE))
    for head_dim, resident in ((64, 6), (80, 3), (128, 3), (256, 2)):
        one_round = resident * units
        assert planning.pieces_for(2, head_dim, torch.device(DEVICE)) + 2 == one_round
        assert planning.pieces_for(one_round, head_dim, torch.device(DEVICE)) > one_round


def test_a_plan_of_another_size_is_refused():
    batch = make_case([1], [1], [9]).to(DEVICE).batch
    plan = planning.DecodePlan.empty(2, 5, torch.device(DEVICE), 8)
    with pytest.raises(ValueError, match="does not fit"):
        planning.plan_decode(batch.indptr, batch.tail_start, batch.seq_len, batch.num_kv_heads, 32, plan)


# (dtype, G, D): every type with a padded D, every group and D with some type.
TYPES_AND_HEADS = [
    *((dtype, 3, 80) for dtype in TYPES),
    *((torch.bfloat16, group, 64) for group in (1, 2, 4, 5, 6, 12, 16)),
    (torch.float16, 7, 128),
    (torch.bfloat16, 8, 96),
    (torch.float32, 4, 256),
]


@pytest.mark.parametrize(("dtype", "group", "head_dim"), TYPES_AND_HEADS)
def test_decode_types_and_heads(dtype, group, head_dim):
    check_decode(make_case([1, 1], [3, 40], [70, 9], group=group, head_dim=head_dim, dtype=dtype).to(DEVICE), 2)


def test_decode_logit_cap():
    check_decode(make_case(**SHAPES["decode_lists"], sharpness=20.0).to(DEVICE), logit_cap=5.0)


def test_decode_of_graph_padding_is_zero():
    """A padded request of a CUDA graph may have no entry at all."""
    case = make_case([1, 1], [3, 1], [0, 0]).to(DEVICE)
    case.batch.seq_len[1] = case.batch.tail_start[1]
    out = case.poisoned_out()
    arguments = (case.q, case.k_rows, case.v_rows, case.layer, *lists(case), case.batch.num_kv_heads, case.scale)
    decode.ragged_decode(*arguments, out=out)
    assert (out[1] == 0).all() and out[0].isfinite().all() and (out[0] != 0).any()


def test_nan_is_not_hidden():
    case = make_case([1], [1], [100], kv_heads=1).to(DEVICE)
    case.k_rows[case.batch.rows[case.batch.indptr[0, case.layer] + 70].long()] = math.nan
    arguments = (case.q, case.k_rows, case.v_rows, case.layer, *lists(case), case.batch.num_kv_heads, case.scale)
    assert decode.ragged_decode(*arguments).isnan().all()


def test_a_small_workspace_is_refused():
    case = make_case([1], [1], [9]).to(DEVICE)
    arguments = (case.q, case.k_rows, case.v_rows, case.layer, *lists(case), case.batch.num_kv_heads, case.scale)
    with pytest.raises(ValueError, match="workspace_numel"):
        decode.ragged_decode(*arguments, workspace=torch.empty(10, device=DEVICE))


@pytest.mark.parametrize(
    ("shape", "splits"),
    [("decode_five", 1), ("extend_long", 1), ("mixed", 1), ("first_layer", 1), ("extend_short", 2), ("first_layer", 4)],
)
def test_extend_shapes(shape, splits):
    check_extend(make_case(**SHAPES[shape]).to(DEVICE), splits)


@pytest.mark.parametrize(("dtype", "group", "head_dim"), TYPES_AND_HEADS)
def test_extend_types_and_heads(dtype, group, head_dim):
    check_extend(make_case([5, 9], [5, 40], [33, 2], group=group, head_dim=head_dim, dtype=dtype).to(DEVICE))


def test_extend_logit_cap():
    check_extend(make_case([3, 12], [5, 40], [33, 70], sharpness=20.0).to(DEVICE), 2, logit_cap=5.0)


@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
def test_lse(logit_cap):
    case = make_case(**SHAPES["decode_lists"]).to(DEVICE)
    q = 2 * torch.randn(3, 7, *case.q.shape[1:], device=DEVICE)
    arguments = (q, case.k_rows, case.layer, *lists(case)[:2], case.batch.num_kv_heads, case.scale, logit_cap)
    lse = extend.ragged_lse(*arguments)
    assert (lse == -math.inf).any() and lse.isfinite().any()
    torch.testing.assert_close(lse, extend.ragged_lse_reference(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["decode_lists", "first_layer"])
def test_interface(shape):
    case = make_case(**SHAPES[shape]).to(DEVICE)
    oracle, attention = TorchRaggedAttention(), create("triton")
    for _ in range(2):  # the second call finds a used workspace
        out = attention.forward(*case.arguments(), out=case.poisoned_out())
        torch.testing.assert_close(out, oracle.forward(*case.arguments()), **tolerance(case.q.dtype))
    q = torch.randn(case.batch.size, 3, *case.q.shape[1:], device=DEVICE)
    arguments = (q, case.k_rows, case.layer, case.batch, case.scale)
    torch.testing.assert_close(
        attention.lse_of_lists(*arguments), oracle.lse_of_lists(*arguments), rtol=1e-5, atol=1e-5
    )


def test_a_static_batch_is_planned_anew_in_every_step():
    """As a CUDA graph has it: the batch is the same object, what its buffers say has changed."""
    case = make_case([1] * 2, [9] * 2, [300, 20]).to(DEVICE)
    pools = torch.randn_like(case.k_rows), torch.randn_like(case.v_rows)
    attention, batch = create("triton"), case.batch
    for _ in range(3):
        for layer in range(2):
            out = attention.forward(case.q, *pools, layer, batch, 0.125)
            arguments = (case.q, *pools, layer, *lists(case), batch.num_kv_heads, 0.125)
            torch.testing.assert_close(out, decode.ragged_decode_reference(*arguments), rtol=1e-5, atol=1e-5)
        batch.indptr.copy_(batch.indptr.flip(0))  # the requests change places


@pytest.mark.skipif(not INTERPRETED, reason="memory that nothing touches takes no room on a CPU only")
def test_pools_of_more_than_2_to_the_31_elements():
    slots, heads, head_dim = 2**16 + 8, 2, 128
    k = torch.empty(129, slots, heads, head_dim, dtype=torch.float16)
    last, own = 128, torch.tensor([slots - 1, slots - 2, slots - 3])
    k[last, own] = torch.randn(3, heads, head_dim).half()
    k_rows = k.view(-1, head_dim)
    assert k.numel() > 2**31
    row = (last * slots + slots - 1) * heads
    indptr = torch.zeros(1, 129 * heads + 1, dtype=torch.int64)
    indptr[0, -2], indptr[0, -1] = 1, 2
    rows = torch.tensor([row, row + 1], dtype=torch.int32)
    table = torch.zeros(1, 4, dtype=torch.int32)
    table[0, :2] = own[1:]
    zero, two = torch.zeros(1, dtype=torch.int64), torch.full((1,), 2)
    q = torch.randn(1, 4, head_dim).half()
    arguments = (q, k_rows, k_rows, last, rows, indptr, table, zero, zero, two, heads, 0.1)
    found = decode.ragged_decode(*arguments)
    torch.testing.assert_close(found, decode.ragged_decode_reference(*arguments), **tolerance(q.dtype))
    found = extend.ragged_extend(*arguments[:-2], torch.tensor([0, 1]), 1, heads, 0.1)
    torch.testing.assert_close(found, decode.ragged_decode_reference(*arguments), **tolerance(q.dtype))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_decode_in_a_cuda_graph():
    """Recorded once, replayed after lengths and rows changed on the device."""
    case, other = (make_case([1] * 3, [40] * 3, [longest] * 3).to(DEVICE) for longest in (100, 60))
    rows = torch.zeros(max(len(case.batch.rows), len(other.batch.rows)), dtype=torch.int32, device=DEVICE)
    k_rows, v_rows = (torch.zeros(10_000, 64, device=DEVICE) for _ in range(2))
    pool = other.k_rows.shape[0]
    indptr, slots = case.batch.indptr.clone(), torch.zeros(6, 200, dtype=torch.int32, device=DEVICE)
    numbers = [torch.zeros(3, dtype=torch.int64, device=DEVICE) for _ in range(3)]
    out, heads = torch.empty_like(case.q), case.batch.num_kv_heads
    q = case.q.clone()
    plan = make_plan(case.batch, 12)
    workspace = torch.empty(decode.workspace_numel(plan.programs, 3, 64, 1), device=DEVICE)
    pools = (k_rows[:pool], v_rows[:pool])

    def fill(source):
        q.copy_(source.q)
        rows[: len(source.batch.rows)] = source.batch.rows
        indptr.copy_(source.batch.indptr)
        slots[: source.batch.slots.shape[0], : source.batch.slots.shape[1]] = source.batch.slots
        for number, name in zip(numbers, ("pool_index", "tail_start", "seq_len"), strict=True):
            number.copy_(getattr(source.batch, name))
        for mine, theirs in zip(pools, (source.k_rows, source.v_rows), strict=True):
            mine.copy_(theirs)

    def step():
        planning.plan_decode(indptr, *numbers[1:], heads, decode.BLOCK_N, plan)
        decode.ragged_decode(
            q, *pools, 1, rows, indptr, slots, *numbers, heads, 0.125, out=out, workspace=workspace, plan=plan
        )

    fill(other)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    out.fill_(math.nan)
    other.q.mul_(-1)
    fill(other)
    graph.replay()
    torch.testing.assert_close(out, TorchRaggedAttention().forward(*other.arguments()), rtol=1e-5, atol=1e-5)
