"""``laprox-sglang eval``: how much of the model's next-token distribution a setting keeps, on real text."""
