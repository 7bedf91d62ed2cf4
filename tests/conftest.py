"""Every test process runs SGLang's CPU engine where there is no GPU, with few threads."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("NUMBA_NUM_THREADS", "2")

from laprox_sglang import cpu_engine

cpu_engine.enable()
