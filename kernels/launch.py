"""What the wrappers of all kernels ask before a launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def device_units(device: torch.device) -> int:
    """Streaming multiprocessors of the device; 4 where there is none (the interpreter), so that small tests split."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def dot_precision(rows: Tensor) -> str:
    """float32 pools are for exactness: no TF32."""
    return "ieee" if rows.dtype == torch.float32 else "tf32"


def widen_dots(rows: Tensor) -> bool:
    """Triton's interpreter multiplies the bits of bfloat16 numbers, so there they become float32 first."""
    return triton.knobs.runtime.interpret and rows.dtype == torch.bfloat16


def padded(size: int) -> int:
    """The block that holds ``size`` numbers of a matrix product: a power of 2, at least 16."""
    return max(16, triton.next_power_of_2(size))
