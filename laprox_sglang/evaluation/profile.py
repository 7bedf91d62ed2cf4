"""The command ``laprox-sglang profile``: each head's share of the budget, from a few calibration prompts.

HeadKV's idea (arXiv 2410.19258): a head that looks at the answer when the question is asked is worth more entries. Here
the answer is a needle in prose; a KV head's importance is the attention that the question's tokens pay to it, mean over
the group, summed over prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation.items import Item, Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", default=None, help="model folder or name (default: the demo model)")
    parser.add_argument("--prompts", type=int, default=10, help="calibration prompts (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1000, help="tokens of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="unlike that of any evaluation (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from laprox_sglang import demo_model
    from laprox_sglang.evaluation.engine import EvaluationEngine
    from laprox_sglang.evaluation.items import tokenise
    from laprox_sglang.evaluation.tasks import generate

    model = options.model_path or str(demo_model.ensure())
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = generate("needle", tokenizer, [options.length], options.prompts, options.seed)
    total: list[list[float]] = []
    with EvaluationEngine(model, pool_tokens=4 * options.length + 4096, max_tokens=2 * options.length) as engine:
        for item in tqdm(items, unit="prompt"):
            prompt = tokenise(item, tokenizer)
            engine.open(prompt.all, len(prompt.document))
            places = needle_tokens(item, prompt, tokenizer)
            found = engine.attention_to(len(prompt.asked), len(prompt.question), places)
            total = added(total, found)
    everything = sum(map(sum, total))
    shares = [[round(each / everything, 8) for each in row] for row in total]
    settings = {"model": Path(model).name, "prompts": options.prompts, "length": options.length, "seed": options.seed}
    options.output.write_text(json.dumps({**settings, "shares": shares}) + "\n")
    print(f"{options.output}: {len(shares)} layers of {len(shares[0])} KV heads")
    return 0


def needle_tokens(item: Item, prompt: Prompt, tokenizer: Any) -> list[int]:
    """Positions of the document's tokens that spell the expected value."""
    position, places = 0, []
    value = item.expected[0]
    pieces = [tokenizer.decode([token]) for token in prompt.document]
    text = "".join(pieces)
    start = text.index(value)
    for index, piece in enumerate(pieces):
        if position < start + len(value) and position + len(piece) > start:
            places.append(index)
        position += len(piece)
    return places


def added(total: list[list[float]], more: list[list[float]]) -> list[list[float]]:
    if not total:
        return more
    return [[a + b for a, b in zip(one, two, strict=True)] for one, two in zip(total, more, strict=True)]
