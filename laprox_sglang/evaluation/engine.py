"""The half of the evaluation in the engine's process: one ``sgl.Engine`` with our backends serves all policies.

See ``in_scheduler`` for how one dense prefill serves all of them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation.protocol import METHOD, REFERENCE
from laprox_sglang.evaluation.variants import Variant

# Requests that run together; more copies of a document are made and asked in turns.
TOGETHER = 60


class EvaluationError(RuntimeError):
    """The evaluation cannot go on; the message says why."""


class EvaluationEngine:
    """``with EvaluationEngine(model) as engine``. max_tokens bounds one document with its question and answer."""

    def __init__(self, model: str, *, pool_tokens: int, max_tokens: int, seed: int = 1, dtype: str = "auto"):
        from laprox_sglang import cpu_engine

        cpu = cpu_engine.enable() or not cpu_engine.has_cuda_device()
        import sglang

        device: dict[str, Any] = {"device": "cpu"} if cpu else {}
        self.engine = sglang.Engine(
            model_path=model,
            dtype=dtype,
            attention_backend="laprox",
            radix_cache_backend="laprox",
            page_size=1,
            laprox_ratio=1.0,
            # One document at a time, and its queries in one piece.
            chunked_prefill_size=-1,
            max_prefill_tokens=max(16384, max_tokens),
            max_total_tokens=pool_tokens,
            mem_fraction_static=0.8,
            max_running_requests=TOGETHER + 4,
            disable_overlap_schedule=True,
            disable_decode_cuda_graph=True,
            disable_prefill_cuda_graph=True,
            skip_tokenizer_init=True,
            random_seed=seed,
            log_level="error",
            sleep_on_idle=True,
            **device,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="laprox-eval-")
        self._tokens: list[int] = []
        self._forks = 0

    def __enter__(self) -> EvaluationEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._folder.cleanup()
        self.engine.shutdown()

    def open(self, tokens: Sequence[int], first: int) -> None:
        """Prefill a document, its question and its reference answer, dense; logits are kept from ``first`` on."""
        # Refused while the last answers' requests are still being released; a document must not be read from the cache.
        if not self.engine.loop.run_until_complete(self.engine.tokenizer_manager.flush_cache(timeout_s=60)).success:
            raise EvaluationError("the engine did not flush its cache: requests are still running")
        self._tokens = list(tokens)
        self._call("begin", tokens=self._tokens, first=first)
        self._generate([self._tokens], [REFERENCE], 1)

    def fork(
        self,
        prefix: int,
        measured_from: int,
        variants: Sequence[Variant],
        *,
        errors: bool = False,
        reading: bool = True,
    ) -> dict[str, dict[str, Any]]:
        """Compressed copies of the first ``prefix`` tokens; what each holds, and with ``reading`` what it loses.

        Returns by ``Variant.key``: slots, entries, share held; with ``reading`` loss, kl, same, tokens of the tokens
        from ``measured_from`` on; with ``errors`` layer_errors. ``answers`` may be asked for the last ones.
        """
        # A copy is never mistaken for that of an earlier call.
        self._forks += 1
        asked = [{"salt": self._salt(each), "ratio": each.ratio, "settings": each.settings} for each in variants]
        found = self._call(
            "fork", prefix=prefix, measured_from=measured_from, variants=asked, errors=errors, reading=reading
        )
        if reading:
            self._generate([self._tokens] * len(variants), [self._salt(each) for each in variants], 1)
            for salt, measured in self._call("collect").items():
                if "error" in measured:
                    raise EvaluationError(f"{measured['error']}: the KV pool is too small; give a larger --pool-tokens")
                found[salt].update(measured)
        return {each.key: found[self._salt(each)] for each in variants}

    def answers(self, prompt: Sequence[int], variants: Sequence[Variant], new_tokens: int, stop: Sequence[int]) -> list:
        """Greedy answers, ``[tokens]`` of each variant, on the copies that the last ``fork`` made."""
        return self._generate([list(prompt)] * len(variants), [self._salt(each) for each in variants], new_tokens, stop)

    def dense_answers(self, prompts: Sequence[Sequence[int]], new_tokens: int, stop: Sequence[int]) -> list:
        """Greedy answers on the full cache."""
        return self._generate([list(each) for each in prompts], [REFERENCE] * len(prompts), new_tokens, stop)

    def attention_to(self, prefix: int, window: int, positions: Sequence[int]) -> list[list[float]]:
        """``[L][H]``: attention of the last ``window`` of ``prefix`` tokens to the tokens at ``positions``, summed."""
        return self._call("attention_to", prefix=prefix, window=window, positions=list(positions))

    def state(self) -> dict[str, Any]:
        """The server's ``laprox`` block."""
        return self.engine.get_server_info()["internal_states"][0]["laprox"]

    def _salt(self, variant: Variant) -> str:
        return f"{self._forks}:{variant.key}"

    def _generate(
        self, prompts: list[list[int]], salts: list[str], new_tokens: int, stop: Sequence[int] = ()
    ) -> list[list[int]]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "stop_token_ids": list(stop)}
        replies = self.engine.generate(input_ids=prompts, sampling_params=sampling, cache_salt=salts)
        return [reply["output_ids"] for reply in replies]

    def _call(self, command: str, **arguments: Any) -> Any:
        reply = Path(self._folder.name) / "reply.json"
        request = json.dumps({"command": command, "reply": str(reply), **arguments})
        try:
            self.engine.collective_rpc(METHOD, request=request)
        except AssertionError as error:  # how collective_rpc reports the scheduler's exception
            raise EvaluationError(str(error)) from None
        return json.loads(reply.read_text())
