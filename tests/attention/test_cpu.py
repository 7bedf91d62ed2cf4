"""What only the CPU implementations have: cut lists, threads, the compile cache, the choice by length."""

import numpy as np
import pytest
import torch
from ragged_cases import SHAPES, make_case, tolerance

from laprox_sglang.attention import base, cpu_numba, cpu_sdpa
from laprox_sglang.attention.cpu_numba import NumbaRaggedAttention
from laprox_sglang.attention.torch_reference import TorchRaggedAttention
from laprox_sglang.jit import openmp


def agrees(attention, case):
    out = attention.forward(*case.arguments(), out=case.poisoned_out())
    torch.testing.assert_close(out, TorchRaggedAttention().forward(*case.arguments()), **tolerance(case.q.dtype))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("threads", [2, 3, 7, 50])
@pytest.mark.parametrize("shape", ["decode_one", "decode_long", "extend_short", "mixed"])
def test_cut_lists_are_merged(monkeypatch, parallel, threads, shape):
    """Cut for that many threads, on torch's own or all on one."""
    team = openmp.team()
    assert team.parallel and team.number, "torch's OpenMP runtime was not found"
    monkeypatch.setattr(cpu_numba, "PARALLEL_FROM", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(
        cpu_numba, "team", lambda: CutForThreads(team.parallel if parallel else 0, team.number, team.size)
    )
    agrees(NumbaRaggedAttention(), make_case(**SHAPES[shape]))


class CutForThreads(openmp.Team):
    @property
    def threads(self):
        return torch.get_num_threads()


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_plan_covers_every_list_once_and_evenly(threads):
    case = make_case(**SHAPES["mixed"])
    batch, heads = case.batch, case.batch.num_kv_heads
    host = (batch.tail_start_host, batch.seq_len_host, batch.q_start_host)
    arrays = (batch.rows.numpy(), batch.indptr_host, batch.slots.numpy(), batch.pool_index.numpy(), *host)
    q_len = batch.q_len_host
    pieces, share, most = cpu_numba.plan(threads, q_len > 20, case.layer, heads, arrays)
    assert most == 20 and share[0] == 0 and share[-1] == len(pieces)
    covered = {}
    for b, h, low, high in pieces.tolist():
        assert low == covered.get((b, h), 0) and low < high
        covered[b, h] = high
    lengths = np.diff(batch.indptr_host[:, case.layer * heads : (case.layer + 1) * heads + 1])
    lengths = lengths + (batch.seq_len_host - batch.tail_start_host)[:, None]
    assert covered == {(b, h): n for (b, h), n in np.ndenumerate(lengths) if q_len[b] <= 20}
    cost = [sum(q_len[b] * (high - low) for b, _, low, high in pieces[share[t] : share[t + 1]]) for t in range(threads)]
    assert max(cost) <= sum(cost) / threads + 20 * cpu_numba.PIECE


def test_queries_that_are_a_view():
    """SGLang's q is a slice of the fused qkv output."""
    case = make_case(**SHAPES["decode_five"])
    case.q = torch.cat([case.q, case.q], dim=1)[:, : case.q.shape[1]]
    assert not case.q.is_contiguous()
    agrees(base.create("cpu"), case)


def test_a_new_batch_replaces_the_remembered_one():
    attention = NumbaRaggedAttention()
    for shape in ("decode_five", "decode_lists", "decode_five"):
        agrees(attention, make_case(**SHAPES[shape]))


def test_odd_head_dim_is_refused_with_the_remedy():
    case = make_case(**SHAPES["decode_one"], head_dim=20)
    with pytest.raises(ValueError, match="'torch' ragged attention"):
        base.create("numba").forward(*case.arguments())


def test_cpu_default_sends_each_request_where_its_work_says():
    rows = cpu_sdpa.WALKED_WORK // 20
    case = make_case(q_len=[1, 20, 20], tail=[1, 20, 20], lists=[9, 9, 4 * rows], kv_heads=1, group=1)
    assert (case.batch.row_work > cpu_sdpa.WALKED_WORK).tolist() == [False, False, True]
    attention = base.choose("cpu")
    assert attention.name == "cpu"
    short = attention.short.forward(*case.arguments(), out=case.poisoned_out())
    long = attention.long.forward(*case.arguments(), out=case.poisoned_out())
    assert short[:21].isfinite().all() and short[21:].isnan().all()
    assert long[:21].isnan().all() and long[21:].isfinite().all()
    agrees(attention, case)


def test_extend_never_forms_the_square(monkeypatch):
    """Cost: 40 new tokens after 2,000 are 40 x 2,000 and a causal 40 x 40, not 2,040 x 2,040."""
    products = []
    flash = cpu_sdpa.flash

    def counted(q, k, v, scale, causal):
        products.append(q.shape[:-1].numel() * k.shape[-2])
        return flash(q, k, v, scale, causal)

    monkeypatch.setattr(cpu_sdpa, "flash", counted)
    case = make_case(q_len=[40], tail=[1040], lists=[1000], kv_heads=2, group=2)
    agrees(cpu_sdpa.SdpaRaggedAttention(), case)
    assert sum(products) <= 2 * 2 * 40 * (2000 + 40)


def test_results_are_written_in_the_dtype_of_the_output():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = make_case(**SHAPES["decode_five"], dtype=dtype)
        assert NumbaRaggedAttention().forward(*case.arguments()).dtype == dtype
        agrees(NumbaRaggedAttention(), case)


def test_warm_up_compiles_what_a_decode_step_runs():
    attention = base.create("cpu")
    attention.warm_up(torch.bfloat16, 72, 2)
    before = cpu_numba.attend_kernel.cache_info().misses
    for shape in ("decode_five", "decode_one"):
        agrees(attention, make_case(**SHAPES[shape], group=2, head_dim=72, dtype=torch.bfloat16))
    assert cpu_numba.attend_kernel.cache_info().misses == before


def test_a_result_does_not_depend_on_the_batch_or_on_threads(monkeypatch):
    """To the last bit: what a request says must not change with its neighbours."""
    case = make_case(q_len=[1, 20, 3], tail=[50, 900, 30], lists=[700, 3000, 40])
    whole = NumbaRaggedAttention().forward(*case.arguments())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(NumbaRaggedAttention().forward(*case.arguments()), whole)
    batch = case.batch
    for index in range(3):
        first, last = batch.q_start_host[index : index + 2]
        alone = base.RaggedBatch.build(
            rows=batch.rows,
            indptr=batch.indptr_host[index : index + 1],
            slots=batch.slots,
            pool_index=batch.pool_index[index : index + 1].numpy(),
            tail_start=batch.tail_start_host[index : index + 1],
            seq_len=batch.seq_len_host[index : index + 1],
            q_len=[last - first],
            num_kv_heads=batch.num_kv_heads,
        )
        q, k, v, layer, _, scale, *rest = case.arguments()
        found = NumbaRaggedAttention().forward(q[first:last], k, v, layer, alone, scale, *rest)
        assert torch.equal(found, whole[first:last])
