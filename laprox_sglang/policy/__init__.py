"""What to keep of a stretch: a score for every (layer, kv head, token), and an allocation of the budget over them.

Pure torch, no SGLang; importing this package loads neither (see registry.py). README.md says where a new one goes.
"""
