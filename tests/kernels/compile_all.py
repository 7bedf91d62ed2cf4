"""Compile the kernels for GPUs that need not be there; print one line of JSON for each: name, registers, spills.

``test_kernels.py`` runs it in a process without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laprox_sglang.kernels.ragged_decode import BLOCK_N, LEAST_SPLIT, decode_kernel, merge_kernel
from laprox_sglang.kernels.ragged_extend import BLOCK_M, extend_kernel

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


def main(capabilities):
    for capability in capabilities:
        for group, head_dim, dtype, has_cap in [(4, 128, "bf16", False), (8, 128, "bf16", False), (3, 80, "fp16", True)]:
            block_d = triton.next_power_of_2(head_dim)
            shape = dict(D=head_dim, BLOCK_D=block_d)
            common = dict(
                shape, G=group, BLOCK_N=BLOCK_N, LEAST=LEAST_SPLIT, HAS_CAP=has_cap, PRECISION="tf32", WIDEN=False
            )
            extend = dict(common, BLOCK_M=BLOCK_M, TAIL=True, WITH_V=True)
            jobs = {
                "decode": (decode_kernel, dict(common, BLOCK_M=16, SPLITS=16)),
                "merge": (merge_kernel, dict(shape, SPLITS=64)),
                "extend": (extend_kernel, dict(extend, SPLITS=1)),
                "extend_split": (extend_kernel, dict(extend, SPLITS=16)),
                "lse": (extend_kernel, dict(extend, SPLITS=1, TAIL=False, WITH_V=False)),
            }
            for name, (kernel, constants) in jobs.items():
                registers, spilled = compile_kernel(kernel, capability, dtype, 4, **constants)
                record = dict(name=name, capability=capability, group=group, head_dim=head_dim, dtype=dtype)
                print(json.dumps(dict(record, registers=registers, spilled=spilled)), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [80, 90, 100])
