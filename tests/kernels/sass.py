"""What a compiled kernel says of itself: registers, spills, shared memory, and the instructions of its inner loop."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass

import triton

# Resources of a multiprocessor: registers, shared memory in bytes (less 1 KB that each program reserves), threads.
REGISTERS, RESERVED = 65536, 1024
SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
THREADS = 2048
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*)(.*?);", re.MULTILINE
)


@dataclass
class Compiled:
    """spills: bytes of local memory. resident: programs that fit a multiprocessor at a time. The rest counts
    instructions of the inner loop, the one that a backward branch closes and that holds the most matrix products (or
    else the most loads): wide are loads from global memory of 16 bytes per thread, narrow all others, mma tensor-core
    products, and in_flight the bytes that the resident programs have under way to shared memory in one turn of it."""

    name: str
    capability: int
    registers: int
    spills: int
    shared: int
    resident: int
    instructions: int
    wide: int
    narrow: int
    mma: int
    mma_kind: str
    in_flight: int

    def as_dict(self):
        return asdict(self)


def read(name, capability, warps, compiled):
    """Compiled of a kernel of triton.compile."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, text = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
    registers = int(re.search(r"REG:(\d+)", usage).group(1))
    spills = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    shared = compiled.metadata.shared
    resident = min(
        REGISTERS // (-(-registers // 8) * 8 * 32 * warps),
        SHARED[capability] // (shared + RESERVED),
        THREADS // (32 * warps),
        32,
    )
    loop = inner_loop(text)
    count = Counter()
    kinds = Counter()
    for operation in loop:
        base, *suffixes = operation.split(".")
        if base in ("LDG", "LDGSTS"):
            count["wide" if "128" in suffixes else "narrow"] += 1
            if base == "LDGSTS":
                count["bytes"] += 32 * warps * (16 if "128" in suffixes else 8 if "64" in suffixes else 4)
        elif base in ("UTMALDG", "UBLKCP"):
            count["wide"] += 1
        elif base in ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"):
            count["mma"] += 1
            kinds[base] += 1
    kind = kinds.most_common(1)[0][0] if kinds else "-"
    return Compiled(
        name, capability, registers, spills, shared, resident, len(loop), count["wide"], count["narrow"],
        count["mma"], kind, resident * count["bytes"],
    )  # fmt: skip


def _cuobjdump(option, path):
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def inner_loop(text):
    """The operations of the loop that does the work; all operations where there is no loop."""
    found = [(int(at, 16), operation, rest) for at, operation, rest in INSTRUCTION.findall(text)]
    loops = []
    for at, operation, rest in found:
        target = re.search(r"0x([0-9a-f]+)", rest) if operation.split(".")[0] == "BRA" else None
        if target and int(target.group(1), 16) < at:
            loops.append([name for here, name, _ in found if int(target.group(1), 16) <= here <= at])
    if not loops:
        return [operation for _, operation, _ in found]

    def work(loop):
        products = sum("MMA" in operation for operation in loop)
        loads = sum(operation.startswith("LDG") for operation in loop)
        return products, loads, -len(loop)

    return max(loops, key=work)


def table(records):
    """The records as text, one line each."""
    columns = list(records[0])
    rows = [columns, *([str(record[column]) for column in columns] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
