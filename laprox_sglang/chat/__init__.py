"""``laprox-sglang chat``: a multi-turn chat with a running server, by hand or scripted.

``client`` talks to the server, ``interactive`` and ``scripted`` run a chat, ``report`` shows what the turns cost.
"""
