"""Compiles a Gluon kernel, in a process where Triton compiles."""

import importlib
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from moe_fast.quantization._quantize import FormPointers

POINTERS = {"segment_ptr": "*i64", "tile_ptr": "*i64", "total_ptr": "*i64", "splits_ptr": "*i64", "out_ptr": "*bf16"}
POINTERS |= {"tokens_ptr": "*bf16", "source_ptr": "*i32"}


def tile(dtype: str, block: list[int]) -> str:
    """The type of a descriptor."""
    bits = {"bf16": 16, "fp32": 32}.get(dtype, 8)
    swizzled = 0 if dtype == "fp32" else min(block[-1] * bits // 8, 128)
    layout = gl.NVMMASharedLayout(swizzled, bits, len(block))
    return f"tensordesc<{dtype}{block},{layout!r}>"


def compile_gluon(
    module: str, kernel: str, tiles: dict[str, Any], constants: dict[str, Any], bias: str | None = None,
    forms: dict[str, Any] | None = None, absent: tuple[str, ...] = (), int64_names: tuple[str, ...] = (),
    divisible: tuple[str, ...] = (),
) -> tuple[int, int, int]:  # fmt: skip
    """Bytes of shared memory, products of the matrix unit, mentions of local memory in PTX (what
    ptxas spills later is not seen)."""
    function = getattr(importlib.import_module(f"moe_fast.{module}"), kernel)
    names = function.arg_names
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in names}
    types |= {name: kind for name, kind in POINTERS.items() if name in names}
    types |= {name: tile(*of) for name, of in tiles.items()} | dict.fromkeys(int64_names, "i64")
    if "bias_ptr" in names:
        types |= {"bias_ptr": bias or "constexpr"}
        constants |= {} if bias else {"bias_ptr": None}
    constant_arguments = {name: value for name, value in (constants | dict.fromkeys(absent)).items() if name in names}
    types |= dict.fromkeys(constant_arguments, "constexpr")
    indices: dict[Any, Any] = {(names.index(name),): value for name, value in constant_arguments.items()}
    for name, fields in (forms or {}).items():
        types[name] = FormPointers(*(field or "constexpr" for field in fields))
        indices |= {(names.index(name), i): None for i, field in enumerate(fields) if field is None}
    options = {name: constants[name] for name in ("num_warps", "maxnreg") if name in constants}
    by_16 = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    built = compile(GluonASTSource(function, types, indices, by_16), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = built.asm["ptx"]
    return built.metadata.shared, ptx.count("wgmma.mma_async"), ptx.count(".local")
