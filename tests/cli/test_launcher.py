"""The command line that `laprox-sglang serve` hands to SGLang."""

from __future__ import annotations

import socket

import pytest

from laprox_sglang import launcher
from laprox_sglang.config import ENABLE_VARIABLE, ConfigError
from laprox_sglang.launcher import LaunchError, build_arguments, check_port, given_value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], None),
        (["--device", "cpu"], "cpu"),
        (["--device=cuda"], "cuda"),
        (["--device", "cpu", "--device", "cuda"], "cuda"),
        (["--device"], ""),
        (["--device", "--port", "1"], ""),
        (["--device-count", "2"], None),
        (["--device="], ""),
    ],
)
def test_given_value(arguments, expected):
    assert given_value(arguments, "--device") == expected


def test_gpu_gets_only_what_laprox_needs():
    argv = build_arguments(["--model-path", "m", "--laprox-ratio", "0.5"], plain=False, cpu=False)
    assert argv == [
        *("--model-path", "m", "--laprox-ratio", "0.5"),
        *("--attention-backend", "laprox", "--radix-cache-backend", "laprox", "--page-size", "1"),
        *("--disable-decode-cuda-graph", "--disable-prefill-cuda-graph", "--enable-cache-report"),
    ]


def test_graphs_of_decode_steps_are_recorded_only_when_asked_for():
    for asked in (["--laprox-cuda-graphs", "decode"], ["--laprox-config", '{"cuda-graphs": "decode"}']):
        argv = build_arguments(asked, plain=False, cpu=False)
        assert given_value(argv, "--disable-decode-cuda-graph") is None
        assert given_value(argv, "--disable-prefill-cuda-graph") == ""


def test_cpu_defaults_give_way_to_the_user():
    argv = build_arguments(["--model-path", "m", "--max-running-requests=3"], plain=False, cpu=True)
    assert given_value(argv, "--device") == "cpu"
    assert given_value(argv, "--attention-backend") == "laprox"
    assert given_value(argv, "--max-running-requests") == "3"
    assert argv.count("--max-running-requests") == 0
    assert given_value(argv, "--sleep-on-idle") == ""


def test_memory_fraction_replaces_the_token_limit():
    argv = build_arguments(["--mem-fraction-static", "0.5"], plain=False, cpu=True)
    assert given_value(argv, "--max-total-tokens") is None


def test_plain_is_stock_sglang():
    assert build_arguments(["--model-path", "m"], plain=True, cpu=False) == [
        "--model-path",
        "m",
        "--enable-cache-report",
    ]
    argv = build_arguments([], plain=True, cpu=True)
    assert given_value(argv, "--attention-backend") == "torch_native"
    assert given_value(argv, "--radix-cache-backend") is None
    assert given_value(argv, "--page-size") is None


def test_model_may_be_the_first_word():
    assert build_arguments(["m", "--port", "1"], plain=True, cpu=False)[:4] == ["--model-path", "m", "--port", "1"]


def test_what_laprox_needs_may_be_spelled_out():
    given = ["--attention-backend=laprox", "--page-size", "1"]
    argv = build_arguments(given, plain=False, cpu=False)
    assert argv[:3] == given
    assert argv.count("--page-size") == 1 and "--attention-backend" not in argv


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--attention-backend", "triton"],
            ["--attention-backend triton", "needs --attention-backend laprox", "--plain"],
        ),
        (["--page-size=16"], ["--page-size 16", "--page-size 1"]),
        (["--radix-cache-backend", "flexkv"], ["flexkv"]),
        (["--disable-radix-cache"], ["--disable-radix-cache", "radix cache", "--plain"]),
        (["--decode-attention-backend", "fa3"], ["--decode-attention-backend"]),
    ],
)
def test_conflicts_name_the_remedy(arguments, words):
    with pytest.raises(LaunchError) as caught:
        build_arguments(arguments, plain=False, cpu=True)
    assert all(word in str(caught.value) for word in words)
    build_arguments(arguments, plain=True, cpu=True)


def test_laprox_flags_with_plain_are_refused():
    with pytest.raises(LaunchError, match="--laprox-ratio has no meaning with --plain"):
        build_arguments(["--laprox-ratio=0.5"], plain=True, cpu=True)


def test_graphs_need_kernels_that_can_be_recorded():
    asked = ["--laprox-cuda-graphs", "decode", "--laprox-kernels"]
    build_arguments([*asked, "triton"], plain=False, cpu=False)
    for kernels in ("flashinfer", "torch"):
        with pytest.raises(ConfigError, match="--laprox-cuda-graphs decode needs --laprox-kernels triton"):
            build_arguments([*asked, kernels], plain=False, cpu=False)
    with pytest.raises(ConfigError, match="kernels 'cuda' is unknown; choose from auto, triton, flashinfer, torch"):
        build_arguments(["--laprox-config", '{"kernels": "cuda"}'], plain=False, cpu=False)


@pytest.mark.parametrize("value", ["0", "1.5", "nan"])
def test_bad_settings_are_found_before_sglang_is_loaded(value):
    with pytest.raises(ConfigError, match="laprox-ratio"):
        build_arguments(["--laprox-ratio", value], plain=False, cpu=True)


def test_kill_switch_is_not_overridden(monkeypatch):
    monkeypatch.setenv(ENABLE_VARIABLE, "0")
    with pytest.raises(LaunchError, match=ENABLE_VARIABLE):
        build_arguments([], plain=False, cpu=True)
    build_arguments([], plain=True, cpu=True)


def test_the_users_list_is_not_changed():
    arguments = ["m"]
    build_arguments(arguments, plain=True, cpu=True)
    assert arguments == ["m"]


def test_serve_adds_the_demo_model_only_when_no_model_is_named(monkeypatch):
    from laprox_sglang import cpu_engine, demo_model

    started: list[list[str]] = []
    monkeypatch.setattr(cpu_engine, "has_cuda_device", lambda: True)
    monkeypatch.setattr(demo_model, "ensure", lambda: "/demo")
    monkeypatch.setattr(launcher, "run_sglang", lambda argv: started.append(list(argv)))
    launcher.serve([], plain=True)
    launcher.serve(["--model-path", "m"], plain=True)
    launcher.serve(["--config", "file.yaml"], plain=True)
    launcher.serve(["--help"])
    assert [given_value(argv, "--model-path") for argv in started] == ["/demo", "m", None, None]
    assert started[3] == ["--help"]


def test_a_port_in_use_is_refused_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(LaunchError, match=f"port {port}.*--port"):
            check_port(["--port", port])
    check_port(["--port", port])
    with pytest.raises(LaunchError, match="port abc"):
        check_port(["--port", "abc"])
