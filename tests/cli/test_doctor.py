"""The parts of the doctor's report."""

from __future__ import annotations

import pytest

from laprox_sglang import doctor
from laprox_sglang.config import ENABLE_VARIABLE
from laprox_sglang.doctor import Check


def by_name(checks):
    return {check.name: check for check in checks}


def test_versions_are_those_that_the_package_asks_for():
    checks = by_name(doctor.check_versions())
    assert doctor.expected_sglang() == "0.5.23"
    assert checks["python"].ok and checks["sglang"].ok and checks["torch"].ok and checks["flashinfer-python"].ok


@pytest.mark.parametrize("found", ["0.5.22", None])
def test_another_sglang_fails_with_the_remedy(monkeypatch, found):
    monkeypatch.setattr(doctor, "installed_version", lambda package: found if package == "sglang" else "1")
    check = by_name(doctor.check_versions())["sglang"]
    assert check.ok is False and "pip install sglang==0.5.23" in check.detail


def test_plugin_is_found_and_switches_are_reported(monkeypatch):
    monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert all(check.ok for check in doctor.check_plugin())
    monkeypatch.setenv(ENABLE_VARIABLE, "0")
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    checks = by_name(doctor.check_plugin())
    assert checks[ENABLE_VARIABLE].ok is False and checks["SGLANG_PLUGINS"].ok is False


def test_device(monkeypatch):
    monkeypatch.setattr(doctor.cpu_engine, "has_cuda_device", lambda: False)
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert next(iter(doctor.check_device())).ok is True
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    check = next(iter(doctor.check_device()))
    assert check.ok is False and "x86-64" in check.detail


def test_kernels(monkeypatch):
    monkeypatch.setattr(doctor.cpu_engine, "has_cuda_device", lambda: False)
    assert [check.detail for check in doctor.check_kernels()] == ["auto is cpu (numba and torch); also torch (slow)"]
    monkeypatch.setattr(doctor.cpu_engine, "has_cuda_device", lambda: True)
    kernels, graphs = doctor.check_kernels()
    assert kernels.detail == "auto is triton; also flashinfer, torch (slow)" and "no GPU has run it" in graphs.detail


def test_model(demo_model_folder, tmp_path):
    good = next(iter(doctor.check_model(str(demo_model_folder))))
    assert good.ok and "30 layers" in good.detail
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "kv_lora_rank": 512}')
    bad = next(iter(doctor.check_model(str(tmp_path))))
    assert bad.ok is False and "MLA" in bad.detail


def test_a_check_that_breaks_is_a_finding():
    def broken():
        yield Check("first", True, "fine")
        raise ImportError("no such module")

    assert doctor.guarded("group", broken)[1] == Check("group", False, "ImportError: no such module")


def test_exit_code_and_summary(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_hooks", lambda: [Check("hook a.b", True, "ok")])
    monkeypatch.setattr(doctor, "check_device", lambda: [Check("device", True, "a device")])
    assert doctor.run(None) == 0
    assert capsys.readouterr().out.rstrip().endswith("ready")
    monkeypatch.setattr(doctor, "check_hooks", lambda: [Check("hook a.b", False, "gone")])
    assert doctor.run(None) == 1
    text = capsys.readouterr().out
    assert "FAIL  hook a.b" in text and text.rstrip().endswith("not ready: hook a.b")


def test_every_refused_mode_is_listed():
    from laprox_sglang.refused import REFUSED_MODES

    text = doctor.refused_modes()
    assert all(mode.name in text and mode.flag in text for mode in REFUSED_MODES)
