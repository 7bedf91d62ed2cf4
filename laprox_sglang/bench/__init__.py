"""``laprox-sglang bench``: what the compressed cache costs and gains, against stock SGLang on the same machine.

One run, servers started one after the other, equal work (``ignore_eos``). ``servers`` starts them, ``workloads``
holds what is measured (one function each), ``report`` writes the table, ``command`` joins the three.
"""
