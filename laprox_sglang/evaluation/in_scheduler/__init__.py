"""The half of the evaluation that runs inside the scheduler process, where keys, values, queries and logits are.

A document is prefilled once and stays dense. Each policy and budget then gets its own compressed copy of it in the
tree, under a cache salt of its own, and requests with that salt read it as any compressed prefix is read. So one
prefill serves all policies, and their requests run in one batch.

``session`` takes the commands, ``recorder`` keeps what the model computed over the dense document, ``forks`` makes the
copies, ``errors`` measures attention output. Nothing here is imported by a server: only the command that
``patches.evaluation_rpc`` adds for an in-process engine does.
"""
