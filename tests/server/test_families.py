"""Every supported family, recognised by structure: compress, share and answer in the real server."""

import pytest

from laprox_sglang.policy.presets import preset
from tests.server.harness import LAPROX, Server, cached
from tests.server.tiny_models import FAMILIES, tiny_model, tokens

# Each family with another method of the field, so that a real server has run them.
POLICIES = {"qwen2": "ada-criticalkv", "qwen3": "cake", "mistral": "defensivekv", "qwen3_moe": "ada-pyramid"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_family_is_served_compressed(family):
    kernels = "torch" if family == "mistral" else "auto"
    flags = ("--dtype", "float32", "--skip-tokenizer-init", "--laprox-ratio", "0.3", "--chunked-prefill-size", "512")
    flags += ("--laprox-policy", POLICIES[family], "--laprox-kernels", kernels)
    with Server(tiny_model(family), *LAPROX, *flags) as server:
        prompt = tokens(800, 1)
        first = server.generate(prompt, 8)
        state = server.idle_slots()
        settings = preset(POLICIES[family])
        assert {name: state[name] for name in settings} == settings
        assert state["compressions"] >= 1 and state["slots_saved"] > 500
        assert state["kernels"] == {"torch": "torch", "auto": "cpu"}[kernels]
        assert state["slots_held"] + state["slots_saved"] == state["tokens_cached"] == 807
        again = server.generate(prompt + first["output_ids"] + tokens(30, 2), 8)
        assert cached(again) == 807
        together = server.together([prompt + tokens(20, 3 + index) for index in range(4)], 8)
        assert all(cached(reply) >= 800 for reply in together)
        server.flush()
        assert server.idle_slots()["slots_free"] == state["slots_total"]
