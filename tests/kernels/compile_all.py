"""Compile the kernels at production shapes for GPUs that need not be there; print what the machine code looks like.

    python tests/kernels/compile_all.py [--json] [--all]

``--json``: one object a line. ``--all``: every shape for every GPU, not the selection that the tests take.
``test_kernels.py`` runs it in a process without TRITON_INTERPRET.
"""

import json
import sys

import sass
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laprox_sglang.kernels import column_scores as columns
from laprox_sglang.kernels import decode_plan as planning
from laprox_sglang.kernels import pack_rows as packing
from laprox_sglang.kernels import page_table as tables
from laprox_sglang.kernels import projected_norm as projection
from laprox_sglang.kernels import ragged_decode as decode
from laprox_sglang.kernels import ragged_extend as extend
from laprox_sglang.kernels import select as selection

GPUS = (80, 90, 100)
FLOATS = {"acc_ptr", "lse_ptr", "attention_ptr", "norms_ptr", "scores_ptr"}
INT32 = {
    "rows_ptr", "pieces_ptr", "first_ptr", "counts_ptr", "kept_ptr", "ends_ptr", "positions_ptr", "source_ptr",
    "target_ptr", "index_ptr", "left_rows_ptr", "left_positions_ptr", "right_rows_ptr", "right_positions_ptr",
}  # fmt: skip
POOL = {"q_ptr", "k_ptr", "v_ptr", "factors_ptr", "from_ptr", "to_ptr"}


def type_of(name, dtype, given):
    if name in given:
        return given[name]
    if name in POOL or name == "out_ptr":
        return "*" + dtype
    if name in FLOATS:
        return "*fp32"
    if name in INT32:
        return "*i32"
    if name in ("scale", "cap"):
        return "fp32"
    if name in ("k_stride_l", "v_stride_l"):
        return "i64"
    return "*i64" if name.endswith("_ptr") else "i32"


def compile_kernel(name, kernel, capability, constants, dtype="bf16", warps=4, stages=decode.STAGES, **types):
    signature = {n: "constexpr" if n in constants else type_of(n, dtype, types) for n in kernel.arg_names}
    # As at run time: PyTorch's allocations and the strides of real models are multiples of 16.
    fixed = set(kernel.do_not_specialize or ())
    divisible = [n for n, t in signature.items() if n not in fixed and (t.startswith("*") or "stride" in n)]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = dict(num_warps=warps, num_stages=stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return sass.read(name, capability, warps, compiled)


def attention(group, head_dim, block_m, block_n, **more):
    shape = dict(G=group, D=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=triton.next_power_of_2(head_dim))
    return dict(shape, HAS_CAP=False, PRECISION="tf32", WIDEN=False) | more


def decodes(group, head_dim, **more):
    return attention(group, head_dim, 16, decode.BLOCK_N, FIELDS=planning.FIELDS, **more)


def extends(group, head_dim, **more):
    fixed = dict(TAIL=True, WITH_V=True, SPLITS=1, LEAST=extend.LEAST_SPLIT)
    return attention(group, head_dim, extend.BLOCK_M, extend.BLOCK_N, **(fixed | more))


def window(group, head_dim, **more):
    block_d = triton.next_power_of_2(head_dim)
    return dict(G=group, D=head_dim, BLOCK_D=block_d, HAS_CAP=False, PRECISION="tf32", WIDEN=False) | more


def lse_of(group, head_dim):
    return window(group, head_dim, BLOCK_M=columns.BLOCK_M, BLOCK_N=columns.BLOCK_N, SPLITS=1)


def columns_of(group, head_dim):
    return window(group, head_dim, BLOCK_T=columns.BLOCK_T, BLOCK_W=columns.BLOCK_W, MEAN=True)


def norms_of(group, head_dim):
    tiles = dict(BLOCK_T=projection.BLOCK_T, BLOCK_C=projection.BLOCK_C, BLOCK_D=triton.next_power_of_2(head_dim))
    return dict(tiles, G=group, D=head_dim, MEAN=True, PRECISION="tf32", WIDEN=False)


SCORES = dict(out_ptr="*fp32", stages=2)
SELECT = dict(protected_ptr="*i1", indptr_ptr="*i32")
TABLE = dict(PARTS=tables.PARTS, LANES=tables.LANES, BLOCK=tables.BLOCK, FIELDS=tables.FIELDS)
FP16 = dict(dtype="fp16")
# Groups and head dims of Llama-3.1-8B, Qwen3-8B (4, 128), Qwen3-30B-A3B (8, 128) and others.
EVERYWHERE = [
    ("decode G=4 D=128", decode.decode_kernel, decodes(4, 128), {}),
    ("decode G=8 D=128", decode.decode_kernel, decodes(8, 128), {}),
    ("extend G=4 D=128", extend.extend_kernel, extends(4, 128), dict(warps=extend.WARPS)),
    ("window lse G=4 D=128", columns.window_lse_kernel, lse_of(4, 128), {}),
    ("column norms G=4 D=128", columns.column_norms_kernel, columns_of(4, 128), SCORES),
    ("projected norm G=4 D=128", projection.projected_norm_kernel, norms_of(4, 128), SCORES),
    ("select: digits", selection.count_digits_kernel, dict(DONE=2, SPAN=selection.SPAN, BLOCK=1024, BINS=256), SELECT),
    ("pack: copy", packing.copy_columns_kernel, dict(GATHER=True, WIDTH=128, BLOCK=32), {}),
]
ON_H100 = [
    ("decode G=1 D=64", decode.decode_kernel, decodes(1, 64), {}),
    ("decode G=5 D=80", decode.decode_kernel, decodes(5, 80), FP16),
    ("decode G=7 D=96", decode.decode_kernel, decodes(7, 96), {}),
    ("decode G=12 D=256", decode.decode_kernel, decodes(12, 256), {}),
    ("decode G=16 D=128", decode.decode_kernel, decodes(16, 128), {}),
    ("decode G=3 D=80, capped", decode.decode_kernel, decodes(3, 80, HAS_CAP=True), FP16),
    ("extend in splits G=7 D=96", extend.extend_kernel, extends(7, 96, SPLITS=16), dict(warps=extend.WARPS)),
    ("listed lse G=4 D=128", extend.extend_kernel, extends(4, 128, TAIL=False, WITH_V=False), dict(warps=extend.WARPS)),
    ("merge D=128", decode.merge_kernel, dict(D=128, BLOCK_D=128, SPLITS=decode.MOST_SPLITS), {}),
    ("merge pieces G=4 D=128", decode.merge_pieces_kernel, dict(G=4, D=128, BLOCK_D=128, BLOCK_P=16), {}),
    ("plan of 512 lists", planning.plan_kernel, dict(LISTS=512, LEAST=256, BLOCK_N=64, FIELDS=4), {}),
    ("column norms G=8 D=256", columns.column_norms_kernel, columns_of(8, 256), SCORES),
    ("projected norm G=7 D=80", projection.projected_norm_kernel, norms_of(7, 80), SCORES | FP16),
    ("projected norm G=2 D=256", projection.projected_norm_kernel, norms_of(2, 256), SCORES),
    ("pooled scores", columns.pooled_scores_kernel, dict(GROUPS=1, KERNEL=21, BLOCK=columns.BLOCK_POOL), SCORES),
    ("select: write", selection.write_kept_kernel, dict(PASSES=8, BLOCK=1024, BINS=256), SELECT),
    ("pack: addresses", packing.pack_addresses_kernel, dict(STEPS=10, BLOCK=512), {}),
    ("split: addresses", packing.split_addresses_kernel, dict(STEPS=10, BLOCK=512), {}),
    ("split: count", packing.count_left_kernel, dict(BLOCK=512), {}),
    ("page table", tables.page_table_kernel, dict(LAYER_MAJOR=False, **TABLE), {}),
    ("page table by layer", tables.page_table_kernel, dict(LAYER_MAJOR=True, **TABLE), {}),
]


def main():
    everything = [(job, gpu) for gpu in GPUS for job in (EVERYWHERE + ON_H100 if "--all" in sys.argv else EVERYWHERE)]
    if "--all" not in sys.argv:
        everything += [(job, 90) for job in ON_H100]
    records = []
    for (name, kernel, constants, options), gpu in everything:
        records.append(compile_kernel(name, kernel, gpu, constants, **options).as_dict())
        if "--json" in sys.argv:
            print(json.dumps(records[-1]), flush=True)
    if "--json" not in sys.argv:
        print(sass.table(records))


if __name__ == "__main__":
    main()
