"""Each hook against the real SGLang: it is in place, does its work, and its absence is noticed."""

import argparse
import inspect
import os
import pkgutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sglang.srt.entrypoints.engine as engine_module
import sglang.srt.managers.scheduler as scheduler_module
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from laprox_sglang import parts, patches, runtime
from laprox_sglang.config import ConfigError, LaProxConfig
from laprox_sglang.evaluation.protocol import METHOD
from laprox_sglang.patches import (
    engine_arguments,
    evaluation_rpc,
    graph_variants,
    http_app,
    kv_pool,
    run_batch,
    scheduler_metrics,
    server_info,
    start_check,
)

load_plugins()


def parse(*flags: str) -> ServerArgs:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", "x", *flags]))


def test_every_hook_is_in_place():
    assert patches.missing() == []
    assert [detail for _, ok, detail in patches.verify_targets() if not ok] == []
    patches.require_all()


@pytest.mark.parametrize("module", patches.modules(), ids=lambda module: module.__name__.rsplit(".", 1)[1])
def test_a_missing_hook_stops_the_cache(module, monkeypatch):
    owner, name = module.TARGET.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    raw = inspect.getattr_static(owner, name)
    stock = inspect.unwrap(getattr(raw, "__func__", raw))
    monkeypatch.setattr(owner, name, type(raw)(stock) if isinstance(raw, classmethod | staticmethod) else stock)
    assert patches.missing() == [module.TARGET]
    with pytest.raises(patches.HookMissingError, match=r"not hooked.*sglang==0\.5\.23"):
        patches.require_all()


@pytest.mark.parametrize("module", patches.modules(), ids=lambda module: module.__name__.rsplit(".", 1)[1])
def test_a_changed_signature_is_reported(module, monkeypatch):
    monkeypatch.setattr(module, "PARAMETERS", ("self", "other"))
    assert [target for target, ok, _ in patches.verify_targets() if not ok] == [module.TARGET]
    with pytest.raises(patches.HookMissingError, match="has parameters"):
        patches.require_all()


def test_the_evaluation_reaches_the_scheduler():
    """``Engine.collective_rpc`` finds the method by name; tests/evaluation/test_eval_command.py runs it."""
    assert getattr(scheduler_module.Scheduler, METHOD) is evaluation_rpc.laprox_evaluate


def test_cli_flags_and_config():
    assert not hasattr(parse(), "_laprox_config")
    assert parse("--laprox-ratio", "0.5")._laprox_config == LaProxConfig(ratio=0.5)
    assert parse("--laprox-config", '{"window": 16, "min-tokens": 64}', "--laprox-window", "8")._laprox_config == (
        LaProxConfig(window=8, min_tokens=64)
    )


def test_engine_takes_the_settings():
    server_args = engine_module.Engine.server_args_class(model_path="x", laprox_ratio=0.5)
    assert server_args._laprox_config == LaProxConfig(ratio=0.5)
    assert not hasattr(engine_module.Engine.server_args_class(model_path="x"), "_laprox_config")
    with pytest.raises(ConfigError, match="unknown laprox setting"):
        engine_module.Engine.server_args_class(model_path="x", laprox_rato=0.5)
    wrapped = engine_module.Engine.server_args_class
    engine_arguments.install()
    assert engine_module.Engine.server_args_class is wrapped


def pool() -> SimpleNamespace:
    from contextlib import nullcontext

    import torch

    return SimpleNamespace(
        _kv_buffer_shapes=lambda: ((9, 2, 4), (9, 2, 4)),
        kv_cache_layout="nhd",
        page_size=1,
        layer_num=3,
        store_dtype=torch.float32,
        device="cpu",
        memory_saver_adapter=SimpleNamespace(region=lambda _: nullcontext()),
    )


def with_radix_backend(monkeypatch, name):
    import sglang.srt.runtime_context as context

    monkeypatch.setattr(context, "get_memory", lambda: SimpleNamespace(radix_cache_backend=name))


def test_kv_pool_is_one_tensor_only_with_our_cache(monkeypatch):
    with_radix_backend(monkeypatch, "laprox")
    ours = pool()
    kv_pool.hook(lambda _: pytest.fail("stock buffers were made"), ours)
    assert ours.laprox_k.shape == (3, 9, 2, 4) and len(ours.k_buffer) == 3
    ours.k_buffer[1][2, 1, 3] = 5
    assert parts.row_pool(ours).k_rows[(1 * 9 + 2) * 2 + 1, 3] == 5
    with_radix_backend(monkeypatch, None)
    stock, calls = pool(), []
    kv_pool.hook(calls.append, stock)
    assert calls == [stock] and not hasattr(stock, "laprox_k")
    with pytest.raises(ValueError, match="not one tensor"):
        parts.row_pool(stock)


def test_scheduler_hooks_do_nothing_without_a_runtime():
    assert runtime.current() is None
    asked, reply = SimpleNamespace(rid='laprox:{"ask": "stats"}'), SimpleNamespace(internal_state={})
    assert server_info.hook(lambda _, request: reply if request is asked else None, None, asked) is reply
    assert reply.internal_state == {}
    scheduler_metrics.hook(None, None)
    assert SchedulerInternalStateController.get_internal_state.__wrapped__
    assert scheduler_module.Scheduler.run_batch.__wrapped__


def with_runtime(monkeypatch, **values):
    ours = SimpleNamespace(**values)
    monkeypatch.setattr(runtime, "current", lambda: ours)
    return ours


def test_server_info_adds_our_block_and_answers_our_questions(monkeypatch):
    observer = SimpleNamespace(answer=lambda query: {"replica": 0, "found": query})
    with_runtime(monkeypatch, state=lambda: {"slots_held": 3}, observer=observer)
    stock = SimpleNamespace(internal_state={"tp_size": 1})
    server_info.hook(lambda *_: stock, None, SimpleNamespace(rid=None))
    assert stock.internal_state == {"tp_size": 1, "laprox": {"slots_held": 3}}
    asked = SimpleNamespace(rid='laprox:{"number": 7, "ask": "segments", "limit": 2}')
    reply = server_info.hook(lambda *_: pytest.fail("stock's state was gathered"), None, asked)
    assert reply.internal_state == {"number": 7, "replica": 0, "found": {"ask": "segments", "limit": 2}}


def test_scheduler_metrics_only_where_the_scheduler_reports_any(monkeypatch):
    added = []
    with_runtime(monkeypatch, observer=SimpleNamespace(add_metrics=added.append))
    for enabled in (False, True):
        context = SimpleNamespace(current_scheduler_metrics_enabled=enabled)
        scheduler_metrics.hook(None, SimpleNamespace(metrics_collector_context=context, metrics_collector="theirs"))
    assert added == ["theirs"]


@pytest.mark.parametrize(
    ("backend", "workers", "expected"), [(None, 1, []), ("laprox", 1, [False]), ("laprox", 2, [True])]
)
def test_http_app_gets_our_endpoints_only_with_our_cache(backend, workers, expected, monkeypatch):
    import sglang.srt.arg_groups.overrides as overrides

    from laprox_sglang.observe import app

    installed = []
    values = SimpleNamespace(radix_cache_backend=backend, tokenizer_worker_num=workers)
    monkeypatch.setattr(overrides, "resolving_view", lambda _: values)
    monkeypatch.setattr(app, "install", lambda worker_processes: installed.append(worker_processes))
    monkeypatch.setitem(sys.modules, http_app.HTTP_MODULE, SimpleNamespace())
    http_app.hook(None, object())
    assert installed == expected


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("launched", [True, False])
def test_work_behind_a_batch_is_waited_for(monkeypatch, overlap, launched):
    """It runs where the batch ran, and SGLang's mark that the batch has read what it shares does not stand for it."""
    where: list[str] = []

    class Stream:
        def __enter__(self):
            where.append("forward stream")

        def __exit__(self, *_):
            where.append("scheduler's stream")

    ours = SimpleNamespace(before_batch=lambda batch: None, after_batch=lambda batch: where.append("ours") or launched)
    runner = SimpleNamespace(shared_read_done_event="event")
    scheduler = SimpleNamespace(
        enable_overlap=overlap,
        forward_stream_ctx=Stream(),
        model_worker=SimpleNamespace(last_shared_read_runner=runner),
    )
    monkeypatch.setattr(runtime, "current", lambda: ours)
    assert run_batch.hook(lambda scheduler, batch: "result", scheduler, None) == "result"
    assert where == (["forward stream", "ours", "scheduler's stream"] if overlap else ["ours"])
    assert runner.shared_read_done_event == (None if launched else "event")


def test_the_decode_runner_gets_our_variants_only_with_our_backend(monkeypatch):
    from laprox_sglang.attention import backend

    assert graph_variants.hook(lambda config: f"stock for {config}", "model") == "stock for model"
    monkeypatch.setattr(backend, "current", lambda: SimpleNamespace(next_is_compressed=True))
    variants = graph_variants.hook(lambda config: pytest.fail("stock was asked"), "model")
    assert variants.select(None) == "laprox_compressed" and "laprox_dense" in variants.capture_labels


def graphs(decode: str, prefill: str) -> dict:
    config = SimpleNamespace(decode=SimpleNamespace(backend=decode), prefill=SimpleNamespace(backend=prefill))
    return {"device": "cuda", "cuda_graph_config": config}


ASKED = {"_laprox_config": LaProxConfig(cuda_graphs="decode")}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"attention_backend": "laprox"}, "both of its backends"),
        ({"radix_cache_backend": "laprox", "attention_backend": "triton"}, "both of its backends"),
        ({"page_size": 16}, "--page-size"),
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"enable_hierarchical_cache": True}, "hierarchical cache"),
        ({"disaggregation_mode": "prefill"}, "disaggregation"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "quantised KV cache"),
        ({"enable_dp_attention": True}, "data parallel attention"),
        ({"attn_dp_size": 2}, "data parallel attention"),
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"enable_streaming_session": True}, "streaming sessions"),
        ({"disable_radix_cache": True}, "disabled radix cache"),
        ({"enable_unified_memory": True}, "unified memory"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "PD multiplexing"),
        (graphs("full", "disabled"), "--disable-decode-cuda-graph"),
        (graphs("full", "disabled") | {"_laprox_config": LaProxConfig()}, "--laprox-cuda-graphs decode"),
        (graphs("breakable", "disabled") | ASKED, "with the backend full"),
        (graphs("full", "tc_piecewise") | ASKED, "--disable-prefill-cuda-graph"),
    ],
)
def test_refused_modes_name_reason_and_remedy(values, reason, monkeypatch):
    import sglang.srt.arg_groups.overrides as overrides

    both = {} if "both" in reason else {"attention_backend": "laprox", "radix_cache_backend": "laprox"}
    monkeypatch.setattr(overrides, "resolving_view", lambda _: configuration(**both, **values))
    with pytest.raises(ConfigError, match=reason):
        start_check.hook(None, object())


def test_graphs_of_decode_steps_may_be_asked_for(monkeypatch):
    import sglang.srt.arg_groups.overrides as overrides

    both = {"attention_backend": "laprox", "radix_cache_backend": "laprox"}
    for values in (graphs("full", "disabled") | ASKED, graphs("disabled", "disabled"), {"device": "cpu"}):
        monkeypatch.setattr(overrides, "resolving_view", lambda _, values=values: configuration(**both, **values))
        start_check.hook(None, object())


def test_a_plain_server_is_not_checked(monkeypatch):
    import sglang.srt.arg_groups.overrides as overrides

    monkeypatch.setattr(overrides, "resolving_view", lambda _: configuration(page_size=16, pp_size=2))
    start_check.hook(None, object())


def configuration(**values) -> SimpleNamespace:
    defaults = {
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "radix_cache_backend": None,
        "page_size": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
        "kv_cache_dtype": "auto",
        "device": "cpu",
    }
    return SimpleNamespace(**{**defaults, **values})


def test_kill_switch_registers_nothing():
    script = (
        "from laprox_sglang import cpu_engine; cpu_engine.enable()\n"
        "import sglang.srt.managers.scheduler\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.mem_cache.registry import registered_radix_cache_backends as names\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "hooks = [hook for each in HookRegistry._hooks.values() for _, hook, _ in each]\n"
        "print('laprox' in names(), sum(hook.__module__.startswith('laprox_sglang') for hook in hooks))"
    )
    for value, expected in (("0", "False 0"), ("1", f"True {len(patches.modules())}")):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "LAPROX_SGLANG_ENABLE": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip().splitlines()[-1] == expected
