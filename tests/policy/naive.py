"""Plain Python twins of every score (float64 loops) and every allocation (sorting, fractions), for the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

from policies import head_shares, layer_weights
from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, ScoreOptions

Row = list[float]
Entry = tuple[int, int, int]  # (position, layer, head): sorts in the order in which ties are broken


def naive_score(name: str, view: LayerView, options: ScoreOptions) -> list[Row]:
    heads, tokens = view.attention.shape[0], view.attention.shape[-1]
    if name == "streaming":
        return [[(t + 1) / tokens for t in range(tokens)]] * heads
    return [NAIVE_SCORES[name](view, options, head) for head in range(heads)]


def _columns(view: LayerView, head: int) -> list[list[Row]]:
    """[query head][token] -> attention of the queries that see the token."""
    attention = view.attention[head].double().tolist()
    window, tokens = view.attention.shape[2:]
    seen = [window] * tokens if view.visible is None else [int(v) for v in view.visible.tolist()]
    # the queries that see a token are the last ones
    return [[[rows[w][t] for w in range(window - seen[t], window)] for t in range(tokens)] for rows in attention]


def _pooled(row: Row, kernel: int) -> Row:
    half = kernel // 2
    windows = [row[max(0, t - half) : t + half + 1] for t in range(len(row))]
    return [sum(window) / len(window) for window in windows]


def _group_mean(rows: list[Row]) -> Row:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _rms_norms(view: LayerView, head: int) -> list[Row]:
    window = view.attention.shape[2]
    return [
        [math.sqrt(window * sum(a * a for a in column) / len(column)) for column in query_head]
        for query_head in _columns(view, head)
    ]


def _value(view: LayerView, head: int, token: int) -> Row:
    return view.values[token, head].double().tolist()


def _projected_norms(view: LayerView, head: int) -> list[Row]:
    result = []
    for factor in view.projection[head].double().tolist():
        norms = []
        for token in range(view.values.shape[0]):
            value = _value(view, head, token)
            out = [sum(value[i] * factor[i][j] for i in range(len(value))) for j in range(len(value))]
            norms.append(math.sqrt(sum(x * x for x in out)))
        result.append(norms)
    return result


def _laprox(view: LayerView, options: ScoreOptions, head: int) -> Row:
    attention = [_pooled(row, options.pool_kernel) for row in _rms_norms(view, head)]
    norms = _projected_norms(view, head)
    if options.gqa == "mean_score":
        return _group_mean(
            [[a * v for a, v in zip(one, two, strict=True)] for one, two in zip(attention, norms, strict=True)]
        )
    return [a * v for a, v in zip(_group_mean(attention), _group_mean(norms), strict=True)]


def _attention(view: LayerView, options: ScoreOptions, head: int) -> Row:
    rows = [[sum(column) / len(column) for column in query_head] for query_head in _columns(view, head)]
    return _group_mean([_pooled(row, options.pool_kernel) for row in rows])


def _attention_value(view: LayerView, options: ScoreOptions, head: int) -> Row:
    attention = _group_mean([_pooled(row, options.pool_kernel) for row in _rms_norms(view, head)])
    return [a * math.hypot(*_value(view, head, token)) for token, a in enumerate(attention)]


def _cake(view: LayerView, options: ScoreOptions, head: int) -> Row:
    def indicator(column: Row) -> float:
        mean = sum(column) / len(column)
        variance = sum((a - mean) ** 2 for a in column) / (len(column) - 1) if len(column) > 1 else 0.0
        return mean + 200 * variance

    rows = [[indicator(column) for column in query_head] for query_head in _columns(view, head)]
    return _group_mean([_pooled(row, options.pool_kernel) for row in rows])


def _output_l1(view: LayerView, head: int) -> Row:
    rows = []
    for weights in view.output[head].double().tolist():
        norms = []
        for token in range(view.values.shape[0]):
            value = _value(view, head, token)
            columns = range(len(weights[0]))
            norms.append(sum(abs(sum(value[i] * weights[i][j] for i in range(len(value)))) for j in columns))
        rows.append(norms)
    return _group_mean(rows)


def _critical(view: LayerView, options: ScoreOptions, head: int) -> Row:
    return [(a + 1e-4) * v for a, v in zip(_attention(view, options, head), _output_l1(view, head), strict=True)]


def _h2o(view: LayerView, options: ScoreOptions, head: int) -> Row:
    sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in view.attention[head].double().tolist()]
    return _group_mean([_pooled(row, options.pool_kernel) for row in sums])


def _defensive(view: LayerView, options: ScoreOptions, head: int) -> Row:
    worst = [0.0] * view.attention.shape[-1]
    for rows in view.attention[head].double().tolist():
        for row in rows:
            pooled = _pooled(row, options.pool_kernel)
            factor = sum(row) / sum(pooled)
            worst = [max(most, factor * a) for most, a in zip(worst, pooled, strict=True)]
    prior = sum(worst) / len(worst)
    norms = [_output_l1(view, other) for other in range(view.attention.shape[0])]
    return [
        max(most, prior) * norms[head][token] / sum(row[token] for row in norms) for token, most in enumerate(worst)
    ]


def _random(view: LayerView, options: ScoreOptions, head: int) -> Row:
    def mix(x: int) -> int:
        x %= 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x5BD1E995 % 2**32
        return x ^ x >> 16

    return [((mix(mix(mix(head) ^ token)) >> 8) + 1) / 2**24 for token in range(view.attention.shape[-1])]


NAIVE_SCORES: dict[str, Callable[[LayerView, ScoreOptions, int], Row]] = {
    "laprox": _laprox,
    "attention": _attention,
    "attention_value": _attention_value,
    "critical": _critical,
    "defensive": _defensive,
    "h2o": _h2o,
    "cake": _cake,
    "random": _random,
}


def naive_keep(name: str, scores: Tensor, total: int, protected: Tensor) -> set[Entry]:
    """What `Allocation.keep` must mark, as a set of (position, layer, head). The scores are taken as they are given."""
    layers, heads, tokens = scores.shape
    worth: dict[Entry, float] = {}
    for layer in range(layers):
        for head in range(heads):
            for position, score in enumerate(scores[layer, head].tolist()):
                worth[position, layer, head] = 0.0 if math.isnan(score) else score
    first = {entry for entry in worth if protected[entry[0]]}
    total = min(total, len(worth))
    if name in ("model", "model_raw"):
        return _best(worth, total, first)
    kept: set[Entry] = set()
    for layer, budget in enumerate(_layer_budgets(name, total, layers, heads, tokens, int(protected.sum()))):
        mine = {entry: score for entry, score in worth.items() if entry[1] == layer}
        by_head = [{entry: score for entry, score in mine.items() if entry[2] == head} for head in range(heads)]
        if name in ("layer", "layer_pyramid"):
            safe = set[Entry]()
            for share, candidates in zip(even(budget, heads), by_head, strict=True):
                safe |= _best(candidates, share // 5, first)
            kept |= _best(mine, budget, (first & set(mine)) | safe)
        else:
            shares = _head_shares(name, total, layers, heads, layer, budget, tokens, int(protected.sum()))
            for share, candidates in zip(shares, by_head, strict=True):
                kept |= _best(candidates, share, first)
    return kept


def even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def naive_pyramid(total: int, layers: int, room: int, beta: int) -> list[int]:
    if layers == 1:
        return [total]
    mean = Fraction(total, layers)
    first = min(2 * mean - mean / beta, Fraction(room))
    last = 2 * mean - first
    exact = [first - (first - last) * layer / (layers - 1) for layer in range(layers)]
    ends = [math.floor(sum(exact[:layer], Fraction(0))) for layer in range(layers + 1)]
    return sorted((after - before for before, after in pairwise(ends)), reverse=True)


def _layer_budgets(name: str, total: int, layers: int, heads: int, tokens: int, protected: int) -> list[int]:
    if name == "layer":
        return even(total, layers)
    if name in ("head", "profile"):
        return [0] * layers  # their shares do not go by layer
    fixed = min(total, protected * layers * heads)
    if name == "cake":
        slope = naive_proportional(total - fixed, layer_weights(layers).tolist(), (tokens - protected) * heads)
    else:
        assert name in ("pyramid", "layer_pyramid"), f"{name} has no brute-force twin"
        slope = naive_pyramid(total - fixed, layers, (tokens - protected) * heads, 20)
    return [a + b for a, b in zip(even(fixed, layers), slope, strict=True)]


def naive_proportional(total: int, weights: list[float], room: int) -> list[int]:
    """Fill up, cap, and fill up again, in fractions; then the largest remainders."""
    weights = [0.0 if math.isnan(weight) else weight for weight in weights]
    largest = max([*weights, 1e-300])
    parts = [Fraction(max(weight / largest, 1e-12)) for weight in weights]
    full: set[int] = set()
    while True:
        free = [index for index in range(len(parts)) if index not in full]
        rest = Fraction(total - room * len(full))
        exact = {index: rest * parts[index] / sum(parts[each] for each in free) for index in free}
        over = {index for index in free if exact[index] > room}
        if not over:
            break
        full |= over
    shares = [room if index in full else math.floor(exact[index]) for index in range(len(parts))]
    order = sorted((index for index in free if shares[index] < room), key=lambda index: shares[index] - exact[index])
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _profile_shares(total: int, layers: int, heads: int, tokens: int, protected: int) -> list[int]:
    fixed = min(total, protected * layers * heads)
    flat = [share for row in head_shares(layers, heads) for share in row]
    mixed = [(1 - 1 / 1.2) / len(flat) + share / max(sum(flat), 1e-300) / 1.2 for share in flat]
    rest = naive_proportional(total - fixed, mixed, tokens - protected)
    return [a + b for a, b in zip(even(fixed, len(flat)), rest, strict=True)]


def _head_shares(
    name: str, total: int, layers: int, heads: int, layer: int, budget: int, tokens: int, protected: int
) -> list[int]:
    if name == "head":
        return even(total, layers * heads)[layer * heads : (layer + 1) * heads]
    if name == "profile":
        return _profile_shares(total, layers, heads, tokens, protected)[layer * heads : (layer + 1) * heads]
    return even(budget, heads)


def _best(worth: dict[Entry, float], count: int, first: set[Entry]) -> set[Entry]:
    """The `count` best: those in `first` in the order of ties, then the others by score."""
    order = sorted(worth, key=lambda entry: (0, 0.0, entry) if entry in first else (1, -worth[entry], entry))
    return set(order[:count])
