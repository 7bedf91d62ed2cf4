"""The package's settings: one frozen record, its command-line flags, and their validation.

This module imports neither torch nor SGLang, so that a bad flag is reported before anything heavy is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GQA_RULES = ("mean_attention", "mean_score")
KERNELS = ("auto", "triton", "flashinfer", "torch")
GPU_KERNELS = ("triton", "flashinfer")
CUDA_GRAPHS = ("off", "decode")
BACKEND_NAME = "laprox"
ENABLE_VARIABLE = "LAPROX_SGLANG_ENABLE"


class ConfigError(ValueError):
    """A setting that cannot work; the message says which one, why, and what to use instead."""


def _flag(help_text: str, default: Any, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, **extra})


@dataclasses.dataclass(frozen=True)
class LaProxConfig:
    """What to keep of a compressed stretch, and what reads it. Field names are the flag names without ``--laprox-``.

    Exactly one of ``ratio`` and ``budget_tokens`` decides the size; when neither is given, ``DEFAULT_RATIO`` does.
    """

    ratio: float | None = _flag(
        "share of a compressed stretch's KV entries that is kept, over 0 and at most 1 (1 keeps everything)",
        None,
        type=float,
    )
    budget_tokens: int | None = _flag(
        "entries kept per KV head on average, for each compressed stretch (instead of a ratio)", None, type=int
    )
    window: int = _flag(
        "length of the observation window: the last queries, which score the tokens before them", 32, type=int
    )
    sink: int = _flag("first tokens of a sequence that every head keeps", 4, type=int)
    min_tokens: int = _flag(
        "a stretch of new tokens shorter than this stays whole until memory is needed", 128, type=int
    )
    rescore_interval: int = _flag(
        "while an answer is written, compress its tokens whenever this many have come since the last time "
        "(0: only when the request finishes)",
        0,
        type=int,
    )
    pool_kernel: int = _flag(
        "width in tokens of the average pooling of attention over neighbouring tokens (odd; 1 turns it off)",
        21,
        type=int,
    )
    gqa: str = _flag(
        "how the query heads of one KV head are joined: mean of their attention, or mean of their scores",
        "mean_attention",
        type=str,
        choices=GQA_RULES,
    )
    score: str = _flag("score of an entry (see laprox_sglang.policy)", "laprox", type=str)
    allocation: str = _flag("how the budget is shared between layers and heads", "model", type=str)
    kernels: str = _flag(
        "what computes attention over kept entries: triton or flashinfer (on a GPU), torch (anywhere, slow), or what "
        "fits the device",
        "auto",
        type=str,
        choices=KERNELS,
    )
    cuda_graphs: str = _flag(
        "experimental, never run on a GPU: record decode steps in CUDA graphs",
        "off",
        type=str,
        choices=CUDA_GRAPHS,
    )
    profile: str | None = _flag(
        "file with each head's share, for the allocation profile (made by laprox-sglang profile)", None, type=str
    )

    # Measured: at half, the loss on real text is not told apart from zero (see the README's results).
    DEFAULT_RATIO = 0.5

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ConfigError for the first setting that cannot work."""
        if self.ratio is not None and self.budget_tokens is not None:
            raise ConfigError("give either --laprox-ratio or --laprox-budget-tokens, not both")
        if self.ratio is not None:
            _require_number("ratio", self.ratio)
            if not (math.isfinite(self.ratio) and 0 < self.ratio <= 1):
                raise ConfigError(
                    f"--laprox-ratio {self.ratio} is not in (0, 1]; use for example 0.25, or 1 to keep all"
                )
        if self.budget_tokens is not None:
            _require_integer("budget-tokens", self.budget_tokens, 1)
        _require_integer("window", self.window, 1)
        _require_integer("sink", self.sink, 0)
        _require_integer("min-tokens", self.min_tokens, 1)
        _require_integer("pool-kernel", self.pool_kernel, 1)
        _require_integer("rescore-interval", self.rescore_interval, 0)
        if 0 < self.rescore_interval < self.window:
            raise ConfigError(
                f"--laprox-rescore-interval {self.rescore_interval} is shorter than --laprox-window {self.window}: the "
                "same queries would score twice; use at least the window, or 0 to turn rescoring off"
            )
        if self.window > self.min_tokens:
            raise ConfigError(
                f"--laprox-window {self.window} is larger than --laprox-min-tokens {self.min_tokens}: a compressed "
                "request must be at least as long as the window that scores it; raise min-tokens or lower the window"
            )
        if self.pool_kernel % 2 == 0:
            raise ConfigError(f"--laprox-pool-kernel {self.pool_kernel} is even; use an odd width, or 1 to turn it off")
        _require_choice("gqa", self.gqa, GQA_RULES)
        _require_choice("kernels", self.kernels, KERNELS)
        _require_choice("cuda-graphs", self.cuda_graphs, CUDA_GRAPHS)
        if self.cuda_graphs != "off" and self.kernels not in ("auto", "triton"):
            raise ConfigError(
                f"--laprox-cuda-graphs {self.cuda_graphs} needs --laprox-kernels triton: {self.kernels} reads the "
                "lengths of the lists on the host, which a recorded graph cannot"
            )
        from laprox_sglang.policy.registry import check_names

        try:
            check_names(self.score, self.allocation)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if (self.profile is None) == (self.allocation == "profile"):
            raise ConfigError(
                "--laprox-profile FILE and --laprox-allocation profile (or --laprox-policy headkv) go together; make "
                "the file with `laprox-sglang profile`"
            )

    def check_device(self, device: str) -> None:
        """Raises ConfigError for what ``device`` (SGLang's name of it) cannot run."""
        if device.startswith("cuda"):
            return
        for flag, value, needs in (
            ("kernels", self.kernels, self.kernels in GPU_KERNELS),
            ("cuda-graphs", self.cuda_graphs, self.cuda_graphs != "off"),
        ):
            if needs:
                raise ConfigError(
                    f"--laprox-{flag} {value} needs a CUDA device, and this server runs on {device}; drop the flag"
                )

    def kept_slots(self, tokens: int) -> int:
        """Slots that a stretch of ``tokens`` tokens keeps, which is its budget of entries per KV head on average."""
        if tokens <= 0:
            return 0
        if self.budget_tokens is not None:
            return min(tokens, self.budget_tokens)
        ratio = self.DEFAULT_RATIO if self.ratio is None else self.ratio
        return min(tokens, max(1, math.ceil(tokens * ratio - 1e-9)))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LaProxConfig:
        """Keys may be spelled ``min_tokens`` or ``min-tokens``. An unknown key raises ConfigError.

        ``policy`` names a preset (see ``policy.presets``), which gives what the other keys do not.
        """
        known = {"policy", *(field.name for field in dataclasses.fields(cls))}
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).replace("-", "_").removeprefix("laprox_")
            if name not in known:
                raise ConfigError(f"unknown laprox setting {key!r}; known settings: {', '.join(sorted(known))}")
            if name in arguments:
                raise ConfigError(f"laprox setting {name!r} is given twice")
            arguments[name] = value
        policy = arguments.pop("policy", None)
        if policy is not None:
            from laprox_sglang.policy.presets import preset

            try:
                arguments = {**preset(policy), **arguments}
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return cls(**arguments)

    @classmethod
    def from_json(cls, text: str) -> LaProxConfig:
        return cls.from_dict(parse_json_object(text))


def parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--laprox-config is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError('--laprox-config must be a JSON object such as {"ratio": 0.25, "window": 32}')
    return value


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--laprox-" + field.name.replace("_", "-")


def add_flags(parser: Any) -> None:
    """Add every ``--laprox-*`` flag to an argparse parser. All default to None: 'not given'."""
    group = parser.add_argument_group("LaProx KV cache compression")
    for field in dataclasses.fields(LaProxConfig):
        default = LaProxConfig.DEFAULT_RATIO if field.name == "ratio" else field.default
        group.add_argument(
            flag_name(field),
            dest="laprox_" + field.name,
            type=field.metadata["type"],
            choices=field.metadata.get("choices"),
            default=None,
            help=f"{field.metadata['help']} (default: {default})",
        )
    group.add_argument(
        "--laprox-policy",
        dest="laprox_policy",
        type=str,
        default=None,
        help="a method of the field as score, allocation, window, pooling and sinks together, such as snapkv or "
        "ada-snapkv (see laprox_sglang.policy.presets); a flag given besides it wins",
    )
    group.add_argument(
        "--laprox-config",
        dest="laprox_config",
        type=str,
        default=None,
        help="the same settings as one JSON object; a flag given besides it wins",
    )


def from_arguments(arguments: Mapping[str, Any]) -> LaProxConfig | None:
    """Take the ``laprox_*`` entries of ``arguments``; None when the user gave none of them.

    ``laprox_config`` may be a JSON string or a mapping. Raises ConfigError.
    """
    given = {key: value for key, value in arguments.items() if key.startswith("laprox_") and value is not None}
    if not given:
        return None
    base = given.pop("laprox_config", {})
    if isinstance(base, str):
        base = parse_json_object(base)
    merged = {str(key).replace("-", "_").removeprefix("laprox_"): value for key, value in base.items()}
    flags = {key.removeprefix("laprox_"): value for key, value in given.items()}
    for one, other in (("ratio", "budget_tokens"), ("budget_tokens", "ratio")):
        if one in flags and other not in flags:
            merged.pop(other, None)
    config = LaProxConfig.from_dict({**merged, **flags})
    check_served(config)
    return config


def check_served(config: LaProxConfig) -> None:
    """Raises ConfigError for what a server cannot do: a score that only the evaluation can compute, a missing file."""
    from laprox_sglang.policy.registry import NOT_SERVED

    if config.score in NOT_SERVED:
        raise ConfigError(
            f"the score {config.score!r} cannot be served: {NOT_SERVED[config.score]}; use it in `laprox-sglang eval`, "
            "or serve another score or policy"
        )
    if config.profile is not None and not Path(config.profile).is_file():
        raise ConfigError(f"--laprox-profile {config.profile} is not a file; make one with `laprox-sglang profile`")


def _require_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"--laprox-{name} must be a whole number, not {value!r}")
    if value < least:
        raise ConfigError(f"--laprox-{name} {value} is too small; it must be at least {least}")


def _require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"--laprox-{name} {value!r} is unknown; choose from {', '.join(choices)}")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--laprox-{name} must be a number, not {value!r}")
