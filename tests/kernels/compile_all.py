"""Compile the kernels for GPUs that need not be there; print one line of JSON for each: name, registers, spills.

``test_kernels.py`` runs it in a process without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laprox_sglang.kernels.ragged_decode import BLOCK_N, LEAST_SPLIT, MOST_SPLITS, decode_kernel, merge_kernel
from laprox_sglang.kernels.ragged_extend import BLOCK_M, WARPS, extend_kernel

POINTERS = {
    "rows_ptr": "*i32",
    "slots_ptr": "*i32",
    "indptr_ptr": "*i64",
    "pool_index_ptr": "*i64",
    "tail_start_ptr": "*i64",
    "seq_len_ptr": "*i64",
    "q_start_ptr": "*i64",
    "acc_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "scale": "fp32",
    "cap": "fp32",
}


def compile_kernel(kernel, capability, dtype, warps, **constants):
    """(registers, spilled bytes) of one kernel, from ptxas."""
    signature = {}
    for name in kernel.arg_names:
        pool = "*" + dtype if name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, pool)
    # As at run time: PyTorch's allocations and the strides of real models are multiples of 16.
    divisible = [n for n, t in signature.items() if t.startswith("*") or "stride" in n]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = dict(num_warps=warps, num_stages=2)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    architecture = re.search(r"\.target (sm_\w+)", ptx).group(1)
    ptxas = triton.knobs.nvidia.ptxas_blackwell if capability >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas.path, "-v", f"--gpu-name={architecture}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report).group(1))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spilled


def constants(group, head_dim, block_m, **more):
    """Constants of a decode or extend kernel as its wrapper gives them."""
    block_d = triton.next_power_of_2(head_dim)
    shape = dict(G=group, D=head_dim, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=block_d, LEAST=LEAST_SPLIT)
    return dict(shape, HAS_CAP=False, PRECISION="tf32", WIDEN=False) | more


def jobs():
    """(name, kernel, capability, dtype, warps, constants)"""
    extend = dict(TAIL=True, WITH_V=True, SPLITS=1)
    for capability in (80, 90, 100):
        for group in (4, 8):
            decode = constants(group, 128, 16, SPLITS=16)
            yield f"decode G={group} D=128", decode_kernel, capability, "bf16", 4, decode
        yield "extend G=4 D=128", extend_kernel, capability, "bf16", WARPS, constants(4, 128, BLOCK_M, **extend)
    split = constants(7, 96, BLOCK_M, **(extend | dict(SPLITS=16)))
    yield "extend in splits G=7 D=96", extend_kernel, 90, "bf16", WARPS, split
    lse = constants(4, 128, BLOCK_M, TAIL=False, WITH_V=False, SPLITS=1)
    yield "lse G=4 D=128", extend_kernel, 90, "bf16", WARPS, lse
    yield "decode G=3 D=80, capped", decode_kernel, 90, "fp16", 4, constants(3, 80, 16, SPLITS=8, HAS_CAP=True)
    yield "merge D=128", merge_kernel, 90, "bf16", 4, dict(D=128, BLOCK_D=128, SPLITS=MOST_SPLITS)


if __name__ == "__main__":
    for name, kernel, capability, dtype, warps, values in jobs():
        registers, spilled = compile_kernel(kernel, capability, dtype, warps, **values)
        print(json.dumps(dict(name=name, capability=capability, registers=registers, spilled=spilled)), flush=True)
