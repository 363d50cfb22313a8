"""Kernels are compiled anew for few integers: sizes, strides and counts stay plain arguments that
`do_not_specialize` names, which Triton ignores for integers inside a record, or that are known to
be divisible together.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

import moe_fast
from moe_fast.experts.weighting import BiasAdded, ScaledRows
from moe_fast.launch.specialization import jit
from moe_fast.quantization.quantize import quantize_for_products
from moe_ref.config import Recipe
from tests.common.fast import interpreted

MODULES = [
    importlib.import_module(module.name) for module in pkgutil.walk_packages(moe_fast.__path__, moe_fast.__name__ + ".")
]


def is_kernels(module: str) -> bool:
    return module.rpartition(".")[2].startswith("_")


def records_of_launches() -> set[type]:
    """The NamedTuples of kernel modules that launchers make."""
    made_by_launchers = (thing for m in MODULES if not is_kernels(m.__name__) for thing in vars(m).values())
    return {thing for thing in made_by_launchers if hasattr(thing, "_fields") and is_kernels(thing.__module__)}


def integers_in_records(argument: Any, in_record: bool = False) -> int:
    if isinstance(argument, tuple):
        return sum(integers_in_records(field, True) for field in argument)
    return int(in_record and isinstance(argument, int))


def specialisation(argument: Any, on_alignment: bool = True) -> Any:
    """What Triton compiles for: the type, 1, and divisibility by 16."""
    if isinstance(argument, tuple):
        return tuple(map(specialisation, argument))
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return argument if argument in (None, 1) else (argument >= 1 << 31, on_alignment and argument % 16 == 0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, set]:
    """By kernel, the specialisations of later launches, whose records must hold no integer."""
    keys: dict[str, set] = {}
    run = InterpretedFunction.run

    def recorded(self: Any, *arguments: Any, **settings: Any) -> Any:
        assert sum(map(integers_in_records, arguments)) == 0, self.__name__
        named = zip(self.arg_names, arguments, strict=False)
        ignored, at_one = (self.kwargs[key] or () for key in ("do_not_specialize", "do_not_specialize_on_alignment"))
        key = tuple(specialisation(argument, name not in at_one) for name, argument in named if name not in ignored)
        keys.setdefault(self.__name__, set()).add(key)
        return run(self, *arguments, **settings)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return keys


def test_records_that_launches_pass_hold_pointers_alone() -> None:
    records = records_of_launches()
    assert {record.__name__ for record in records} == {"RowMapPointers", "FormPointers", "Operands"}
    assert all(field.endswith("_ptr") for record in records for field in record._fields)  # type: ignore[attr-defined]


@interpreted
def test_other_numbers_of_tokens_experts_and_rows_compile_permutation_once(launches: dict[str, set]) -> None:
    for num_tokens, num_experts, num_rows in ((1, 2, 16), (16, 3, 48), (17, 18, 300)):
        tokens, probs = torch.ones(num_tokens, 32), torch.ones(num_tokens, num_experts)
        result = moe_fast.permute(tokens, probs > 0, probs=probs, num_rows=num_rows)
        moe_fast.unpermute(result.rows, result.row_map)
    assert [len(launches[kernel]) for kernel in ("permute_kernel", "unpermute_kernel")] == [1, 1]


@interpreted
def test_other_numbers_of_tokens_and_experts_compile_fused_quantization_once(launches: dict[str, set]) -> None:
    recipe = Recipe(scaling="mxfp8")
    for num_tokens, num_experts in ((1, 2), (16, 3), (17, 16)):
        routing_map = torch.ones(num_tokens, num_experts, dtype=torch.bool)
        moe_fast.permute_and_quantize(
            torch.ones(num_tokens, 64), routing_map, recipe, align=32, num_rows=1024, columnwise=True
        )
        h, splits = torch.ones(64 * num_experts, 64), torch.full((num_experts,), 64)
        moe_fast.glu_and_quantize(h, recipe, splits=splits, columnwise=True)
    kernels = ("scatter_kernel", "gather_kernel", "quantize_activated_blocks_kernel")
    assert [len(launches[kernel]) for kernel in kernels] == [1, 1, 1]


def multiply(num_experts: int, height: int, width: int, recipe: Recipe | None = None) -> None:
    """grouped_linear and its gradients, of rows of `width` and results of `height`."""
    rows, weight = torch.ones(16 * num_experts, width), torch.ones(num_experts, height, width)
    splits = torch.full((num_experts,), 16)
    d_out = moe_fast.grouped_linear(rows, weight, splits, recipe=recipe)
    moe_fast.grouped_dgrad(d_out, weight, splits, recipe=recipe)
    moe_fast.grouped_wgrad(d_out, rows, splits, recipe=recipe)


def move(width: int) -> None:
    tokens, probs = torch.ones(4, width, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    result = moe_fast.permute(tokens, probs > 0, probs=probs)
    moe_fast.unpermute(result.rows, result.row_map, probs=probs).sum().backward()
    moe_fast.sort_chunks(tokens.detach(), torch.tensor([1, 3]), torch.tensor([1, 0]))


def activate(width: int) -> None:
    h = torch.ones(4, 2 * width)
    moe_fast.glu_backward(moe_fast.glu(h), h)


def quantize(width: int) -> None:
    for scaling in ("block", "current"):
        quantized = moe_fast.quantize(torch.ones(4, width), Recipe(scaling)).quantized
    moe_fast.dequantize(quantized)


def choose(num_experts: int) -> None:
    logits = torch.ones(4, num_experts, requires_grad=True)
    bias = torch.ones(num_experts)
    moe_fast.topk_routing(logits, topk=1, expert_bias=bias, score_function="sigmoid").probs.sum().backward()
    moe_fast.permute(torch.ones(4, 2), torch.ones(4, num_experts) > 0, num_rows=4 * num_experts)
    moe_fast.z_loss(logits, coeff=0.5).backward()
    moe_fast.aux_loss_scores(logits, topk=1, score_function="sigmoid").scores.sum().backward()


def weigh(width: int) -> None:
    rows, probs, ends = (
        torch.ones(4, width, requires_grad=True),
        torch.ones(4, requires_grad=True),
        torch.tensor([1, 4]),
    )
    scaled = ScaledRows.apply(rows, probs, ends)
    bias = torch.ones(2, width, requires_grad=True)
    BiasAdded.apply(scaled, bias, probs, ends).sum().backward()
    x, first, second, gate = (
        torch.ones(shape, requires_grad=True) for shape in ((4, width), (4, width), (width, 2), (1, width))
    )
    moe_fast.shared_experts(x, first, second, gate_weight=gate).sum().backward()


OF_WIDTH = {
    move: ("permute_kernel", "unpermute_kernel", "unpermute_backward_kernel", "sort_chunks_kernel"),
    activate: ("activation_kernel", "activation_backward_kernel"),
    quantize: ("quantize_blocks_kernel", "group_amax_kernel", "cast_groups_kernel", "dequantize_kernel"),
    weigh: (
        *("scale_rows_kernel", "add_bias_kernel", "weighted_rows_backward_kernel", "bias_gradient_kernel"),
        *("gate_kernel", "gate_backward_kernel"),
    ),
    choose: ("topk_kernel", "topk_backward_kernel", "routing_walk_kernel", "z_loss_kernel", "aux_scores_kernel"),
}


@interpreted
@pytest.mark.parametrize("call", OF_WIDTH, ids=lambda call: call.__name__)
@pytest.mark.parametrize("widths", [(16, 48, 128), (1, 3, 17)], ids=("divisible", "others"))
def test_other_widths_compile_a_kernel_once_if_they_are_divisible_and_once_if_not(
    launches: dict[str, set], call: Callable[[int], None], widths: tuple[int, ...]
) -> None:
    call(widths[0])
    assert launches.keys() >= set(OF_WIDTH[call])
    compiled = {kernel: set(launches[kernel]) for kernel in OF_WIDTH[call]}
    for width in widths:
        call(width)
    assert {kernel: launches[kernel] for kernel in OF_WIDTH[call]} == compiled


@interpreted
@pytest.mark.parametrize("recipe", [None, Recipe("current")], ids=("exact", "codes"))
def test_products_of_other_sizes_compile_once(launches: dict[str, set], recipe: Recipe | None) -> None:
    for size in ((2, 16, 32), (3, 48, 16)):
        multiply(*size, recipe)
    kind = "grouped" if recipe is None else "scaled"
    assert [len(launches[f"{kind}_{product}_kernel"]) for product in ("matmul", "wgrad")] == [1, 1]


@interpreted
def test_products_of_which_not_all_sizes_are_divisible_compile_once(launches: dict[str, set]) -> None:
    for size in ((2, 1, 3), (1, 3, 5), (3, 17, 1), (2, 16, 3), (2, 3, 16)):
        multiply(*size)
    assert [len(launches[f"grouped_{product}_kernel"]) for product in ("matmul", "wgrad")] == [1, 1]
    multiply(2, 16, 32)
    assert [len(launches[f"grouped_{product}_kernel"]) for product in ("matmul", "wgrad")] == [2, 2]


@interpreted
@pytest.mark.parametrize("recipe", [None, Recipe("current"), Recipe("mxfp8")], ids=("exact", "group", "blocks"))
def test_products_by_pointers_with_and_without_a_bias_compile_once(
    launches: dict[str, set], recipe: Recipe | None
) -> None:
    rows, weight, splits = torch.ones(64, 32), torch.ones(2, 32, 32), torch.tensor([32, 32])
    for bias in (None, torch.ones(2, 32), torch.ones(32, 2).t(), torch.ones(2, 32).double()):
        moe_fast.grouped_linear(rows, weight, splits, bias=bias, recipe=recipe)
        compiled = launches[f"{'grouped' if recipe is None else 'scaled'}_matmul_kernel"]
        assert len(compiled) == (2 if bias is not None and bias.dtype == torch.float64 else 1)


@interpreted
def test_an_activation_with_and_without_probs_compiles_once(launches: dict[str, set]) -> None:
    h = torch.ones(4, 32, requires_grad=True)
    for probs in (None, torch.ones(4), torch.ones(4, requires_grad=True)):
        moe_fast.glu(h, probs=probs).sum().backward()
    assert [len(launches[f"activation{suffix}_kernel"]) for suffix in ("", "_backward")] == [1, 1]


@interpreted
def test_a_quantiser_compiles_once_for_splits_of_both_dtypes(launches: dict[str, set]) -> None:
    splits = torch.tensor([64, 64])
    for given in (splits, splits.int()):
        moe_fast.dequantize(quantize_for_products(torch.ones(128, 128), Recipe("block"), splits=given))
    assert [len(launches[kernel]) for kernel in ("quantize_blocks_kernel", "dequantize_kernel")] == [1, 1]


@interpreted
def test_scales_of_a_weight_compile_a_product_once_for_each_layout(launches: dict[str, set]) -> None:
    for depth in (32, 64, 96):  # one block of the depth has columns that lie side by side
        multiply(2, 64, depth, Recipe("mxfp8"))
    assert len(launches["scaled_matmul_kernel"]) == 3


@interpreted
def test_scales_that_columns_share_compile_a_product_once(launches: dict[str, set]) -> None:
    for depth in (128, 256):  # one block of the depth has scales that lie side by side
        multiply(2, 256, depth, Recipe("block"))
    assert len(launches["scaled_matmul_kernel"]) == 1


@interpreted
def test_rows_compile_once_for_whole_lines_for_others_and_for_strided_ones(launches: dict[str, set]) -> None:
    sizes, order = torch.tensor([1, 2]), torch.tensor([1, 0])
    lines = (torch.ones(3, 16), torch.ones(3, 48)[:, 16:])
    arguments = (torch.ones(3, 5), torch.ones(3, 1), torch.ones(3, 17)[:, :16])
    strided = (torch.ones(5, 3).t(), torch.ones(3, 10)[:, ::2], torch.ones(16, 3).t(), torch.ones(3, 32)[:, ::2])
    for number, group in enumerate((lines, arguments, strided), 1):
        for tokens in group:
            moe_fast.sort_chunks(tokens, sizes, order)
        assert len(launches["sort_chunks_kernel"]) == number


@jit(together=[("stride_x", "width"), ("size",)], along=["step_x", "step_y"], do_not_specialize=["count"])
def nothing_kernel(stride_x, step_x, step_y, width, size, count):
    triton.language.static_assert(True)


LINES, LINE_OF_X, STRIDED = (16, 1, 1, 32), (16, 1, 0, 32), (1, 16, 1, 16)
NO_LINES = ((17, 1, 1, 32), (16, 1, 1, 3))


@interpreted
@pytest.mark.parametrize(
    ("given", "known"),
    [
        ((*LINES, 48, 1), ["stride_x", "step_x", "step_y", "width", "size"]),
        ((*LINE_OF_X, 48, 16), ["stride_x", "step_x", "step_y", "width", "size"]),
        ((*LINES, 5, 16), ["stride_x", "step_x", "step_y", "width"]),
        *(((*sizes, 48, 16), ["step_x", "step_y", "size"]) for sizes in NO_LINES),
        ((*STRIDED, 48, 16), ["size"]),
        ((1, 1, 1, 1, 1, 1), ["step_x", "step_y"]),
    ],
)
def test_a_kernel_knows_the_integers_of_whole_lines_and_of_each_other_group(
    monkeypatch: pytest.MonkeyPatch, given: tuple[int, ...], known: list[str]
) -> None:
    specialized: list[list[str]] = []
    monkeypatch.setattr(
        InterpretedFunction,
        "run",
        lambda self, *_, **__: specialized.append(
            [n for n in self.arg_names if n not in self.kwargs["do_not_specialize"]]
        ),
    )
    nothing_kernel[1,](*given)
    assert specialized == [known]
