"""What goes into FlashInfer, on a CPU: its own plain-torch references read the lists that we build for it.

They stand for its kernels, which need a GPU: same arguments, same contract (pages, bottom-right causal).
"""

import inspect

import flashinfer
import numpy as np
import pytest
import torch
from flashinfer.trace.templates import attention as references
from ragged_cases import SHAPES, make_case

from laprox_sglang.attention import base
from laprox_sglang.attention.gpu_flashinfer import (
    INT32_MAX,
    FlashInferRaggedAttention,
    Wrappers,
    plan_inputs,
    query_order,
    row_indices,
)
from laprox_sglang.attention.torch_reference import TorchRaggedAttention

# The references round their results to bfloat16.
TOLERANCE = dict(rtol=1e-2, atol=1e-2)


class OnReferences(FlashInferRaggedAttention):
    """Ours, with FlashInfer's references in the place of its wrappers."""

    def decode(self, queries, pools, inputs, indices, scale, logit_cap):
        indptr = torch.from_numpy(inputs.kv_indptr)
        return references._gqa_paged_decode_reference(queries, *pools, indptr, indices, scale)[0].to(queries.dtype)

    def prefill(self, queries, pools, inputs, indices, scale, logit_cap):
        indptrs = torch.from_numpy(inputs.q_indptr), torch.from_numpy(inputs.kv_indptr)
        return references._gqa_paged_prefill_reference(queries, *pools, *indptrs, indices, scale)[0].to(queries.dtype)


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "decode_long"])
def test_lists_and_queries(shape):
    case = make_case(**SHAPES[shape])
    out = case.poisoned_out()
    assert OnReferences().forward(*case.arguments(), out=out) is out
    torch.testing.assert_close(out, TorchRaggedAttention().forward(*case.arguments()), **TOLERANCE)


def test_batches_one_after_the_other():
    """What is kept from one batch must not reach the next."""
    attention = OnReferences()
    for shape in ("mixed", "extend_short", "mixed"):
        case = make_case(**SHAPES[shape])
        result = attention.forward(*case.arguments())
        torch.testing.assert_close(result, TorchRaggedAttention().forward(*case.arguments()), **TOLERANCE)


@pytest.mark.parametrize("shape", ["decode_lists", "mixed", "first_layer"])
def test_every_list_is_its_rows_and_then_its_tail(shape):
    case = make_case(**SHAPES[shape])
    batch, heads, stride = case.batch, case.batch.num_kv_heads, case.batch.slot_stride(case.k_rows)
    inputs = plan_inputs(batch, case.layer)
    assert inputs.kv_indptr.dtype == inputs.q_indptr.dtype == np.int32 and (inputs.last_page_len == 1).all()
    indices = row_indices(batch, case.layer, stride, inputs.kv_indptr)
    assert indices.dtype == torch.int32
    for b in range(batch.size):
        tail = batch.slots[batch.pool_index[b], batch.tail_start[b] : batch.seq_len[b]].long()
        for h in range(heads):
            at, i = case.layer * heads + h, b * heads + h
            listed = batch.rows[batch.indptr[b, at] : batch.indptr[b, at + 1]].long()
            expected = torch.cat([listed, (case.layer * stride + tail) * heads + h])
            assert torch.equal(indices[inputs.kv_indptr[i] : inputs.kv_indptr[i + 1]].long(), expected)
            assert inputs.q_indptr[i + 1] - inputs.q_indptr[i] == batch.q_len_host[b]
    assert sorted(query_order(batch)) == list(range(batch.q_start_host[-1] * heads))


def test_plans_are_made_of_host_numbers_only():
    """On a GPU, device numbers would make every layer wait: none of them is looked at."""
    case = make_case(**SHAPES["mixed"])
    expected = plan_inputs(case.batch, case.layer)
    for name in ("indptr", "tail_start", "seq_len", "q_start", "pool_index"):
        object.__setattr__(case.batch, name, None)
    found = plan_inputs(case.batch, case.layer)
    assert np.array_equal(found.kv_indptr, expected.kv_indptr) and np.array_equal(found.q_indptr, expected.q_indptr)
    assert query_order(case.batch).size


def test_lists_beyond_int32_are_refused():
    case = make_case(**SHAPES["decode_one"])
    case.batch.seq_len_host[0] = INT32_MAX
    with pytest.raises(ValueError, match="int32 offsets address; use --laprox-kernels triton"):
        plan_inputs(case.batch, case.layer)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((32, 8, 128, torch.bfloat16), None),
        ((28, 4, 128, torch.float16), None),
        ((5, 1, 64, torch.bfloat16), None),
        ((32, 8, 80, torch.bfloat16), "head dims 64, 128, 256, not 80"),
        ((32, 8, 128, torch.float32), "not float32"),
        ((9, 2, 64, torch.bfloat16), "no whole groups"),
    ],
)
def test_refusals_name_the_reason(shape, reason):
    found = FlashInferRaggedAttention().refusal(*shape)
    assert found is None if reason is None else reason in found


def test_kernels_of_a_gpu_are_refused_on_a_cpu():
    for kernels in ("flashinfer", "triton"):
        with pytest.raises(ValueError, match=f"--laprox-kernels {kernels} needs a CUDA device.*use auto"):
            base.choose("cpu", kernels)
    assert base.choose("cpu", "torch").name == "torch" and base.choose("cpu").name == "cpu"
    assert base.choose("cuda", "flashinfer").name == "flashinfer"


def test_the_wrappers_take_our_arguments(monkeypatch):
    """The installed FlashInfer has the parameters that we pass, under those names."""
    calls = []

    class Recorder:
        def __init__(self, kind, *arguments, **options):
            self.kind = kind
            inspect.signature(kind.__init__).bind(self, *arguments, **options)

        def plan(self, *arguments, **options):
            plan = getattr(self.kind, "_plan_impl", self.kind.plan)
            calls.append(inspect.signature(plan).bind(self, *arguments, **options).arguments)

        def run(self, *arguments):
            inspect.signature(self.kind.run).bind(self, *arguments)
            return torch.zeros_like(arguments[0])

    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        kind = getattr(flashinfer, name)
        monkeypatch.setattr(flashinfer, name, lambda *a, kind=kind, **o: Recorder(kind, *a, **o))
    monkeypatch.setattr(torch.cuda, "Event", lambda: type("Event", (), {"record": lambda _: None, "query": bool})())
    attention = FlashInferRaggedAttention()
    for shape, group in (("decode_lists", 3), ("decode_lists", 7), ("mixed", 7)):
        case = make_case(**SHAPES[shape], group=group)
        attention.forward(*case.arguments(), logit_cap=5.0)
    decode, prefill = calls[1], calls[2]
    assert (decode["num_qo_heads"], decode["num_kv_heads"], decode["page_size"], decode["head_dim"]) == (7, 1, 1, 64)
    assert (prefill["num_qo_heads"], prefill["num_kv_heads"], prefill["page_size"]) == (7, 1, 1)
    assert prefill["causal"] is True and decode["logits_soft_cap"] == prefill["logits_soft_cap"] == 5.0
    assert attention._wrappers.keys() == {("decode", False), ("decode", True), ("prefill", True)}


def test_a_wrapper_is_planned_again_only_when_its_plan_was_copied():
    class Event:
        done = False

        def record(self):
            events.append(self)

        def query(self):
            return self.done

    events, made = [], []

    def make():
        made.append(object())
        return made[-1]

    wrappers = Wrappers(make, Event)
    first = wrappers.take()
    wrappers.give_back(first)
    second = wrappers.take()
    assert second is not first
    wrappers.give_back(second)
    events[0].done = True
    assert wrappers.take() is first and wrappers.take() is not second and len(made) == 3
