"""Each kernel compiles for a GPU, also on a machine without one, where all others interpret it.

What the interpreter accepts and the compiler refuses is otherwise found only on a GPU.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from conformance.catalogue import FAMILIES, NAMES
from conformance.core.case import Case
from conformance.core.contract import Contract
from conformance.core.ranks import ranks_of
from conformance.engine.child.evaluate import evaluate
from conformance.interface import load
from moe_fast.dispatch.steps import Programs, Transfer, collect, send
from moe_fast.permutation.permute import permute_in_tiles
from moe_ref.config import Recipe
from tests.common.compile_kernels import failures
from tests.common.compiler import compiled
from tests.common.fast import interpreted
from tests.common.launches import Constant, Launch
from tests.dispatch.test_symmetric import World, in_step

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def described(argument: Any) -> Any:
    """The argument as the compiler sees it: its type, without its value."""
    if isinstance(argument, Tensor):
        return f"*{TYPES[argument.dtype]}"
    if isinstance(argument, tuple):
        fields = map(described, argument)
        return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
    if isinstance(argument, (bool, float)):
        return "i1" if isinstance(argument, bool) else "fp32"
    return Constant(None) if argument is None else "i64" if abs(argument) >= 2**31 else "i32"


def constant(argument: Any) -> Constant:
    value = getattr(argument, "value", argument)
    is_dtype = isinstance(value, triton.language.dtype)
    return Constant(value.name if is_dtype else value, is_dtype)


def launch_of(function: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Launch:
    parameters = inspect.signature(function).parameters
    values = dict(zip(parameters, arguments, strict=False)) | settings
    constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
    described_values = {
        name: constant(values[name]) if name in constants else described(values[name]) for name in parameters
    }
    if "FACTOR" in described_values:  # of codes: the interpreter multiplies them in float32, a matrix unit as bfloat16
        described_values["FACTOR"] = Constant("bf16", True)
    options = {name: settings[name] for name in OPTIONS if name in settings and name not in parameters}
    return Launch(function.__module__, function.__name__, described_values, options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """The first launch of each kernel from now on."""
    first_launches: dict[str, Launch] = {}
    run = InterpretedFunction.run

    def recorded(self: Any, *arguments: Any, **settings: Any) -> Any:
        if self.fn.__name__ not in first_launches:
            first_launches[self.fn.__name__] = launch_of(self.fn, arguments, settings)
        return run(self, *arguments, **settings)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return first_launches


def golden_cases(contract: Contract[Any]) -> Iterator[Case]:
    cases = [Case.family[contract.function](function=contract.function, golden=name) for name in contract.golden]
    yield from (case for case in cases if not ranks_of(contract, case))


@interpreted
@pytest.mark.parametrize("family", [name for name in NAMES if name not in ("dispatch", "layer", "parameters")])
def test_each_kernel_of_a_family_compiles_for_a_gpu(family, launches):
    implementation = load("moe_fast")
    for contract in FAMILIES[NAMES.index(family)].contracts:
        if implementation.offers(contract.function):
            for case in golden_cases(contract):
                evaluate(case, implementation)
    of_family = [launch for launch in launches.values() if launch.module.startswith(f"moe_fast.{family}.")]
    assert of_family
    assert compiled(failures, of_family) == ""


@interpreted
def test_the_layout_that_cuts_tiles_compiles_for_a_gpu(launches):
    permute_in_tiles(torch.zeros(4, 8), torch.eye(4, dtype=torch.bool), num_rows=4, tile_rows=128)
    assert compiled(failures, [launches["routing_layout_kernel"]]) == ""


@interpreted
def test_the_kernels_between_ranks_compile_for_a_gpu(launches):
    """Of rows as codes, with few programs."""
    world, programs = World(3, 1, torch.bfloat16), Programs(1, 1)
    (slab,) = world.slabs(64)
    tensors = (world.tokens[0], world.maps[0], world.probs[0])
    (sent,) = in_step([send(*tensors, Transfer(64, most=programs, recipe=Recipe("block")), slab, 0)])
    in_step([collect(torch.zeros(64, world.hidden, dtype=torch.bfloat16), None, sent[3], slab, programs)])
    of_family = [launch for launch in launches.values() if launch.module.startswith("moe_fast.dispatch._symmetric")]
    assert len(of_family) == 6
    assert compiled(failures, of_family) == ""


@triton.jit
def three_kernel(x_ptr, SIZE: triton.language.constexpr):
    triton.language.store(x_ptr + triton.language.arange(0, SIZE), 0.0)


@interpreted
@pytest.mark.parametrize(("size", "refused"), [(3, True), (4, False)])
def test_a_kernel_that_the_compiler_refuses_is_found(size, refused):
    launch = Launch(__name__, "three_kernel", {"x_ptr": "*fp32", "SIZE": Constant(size)}, {})
    assert ("three_kernel does not compile" in compiled(failures, [launch])) == refused
