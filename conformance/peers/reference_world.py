"""The reference on real ranks: each rank gathers all inputs, runs the reference for all ranks, and
keeps its own result. All other functions are the reference's. This is slow and gathers far too
much, but its collectives and their gradients are right. Runs of `moe_ref` use it, and defects of
dispatchers are planted in it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ref
from moe_ref.quantization.quantize import Quantized
from moe_ref.quantization.recipes import Scaled

RANKED = (
    "tokens",
    "routing_map",
    "indices",
    "probs",
    "scales",
    "rows",
    "handles",
    "biases",
)  # arguments with one value per rank
COLLECTIVES = tuple(
    f"{dispatcher}_{step}"
    for dispatcher, steps in (
        *(("allgather", ("dispatch", "combine")), ("alltoall", ("dispatch", "combine"))),
        *(("deepep", ("dispatch", "cached_dispatch", "combine")), ("deepep_low_latency", ("dispatch", "combine"))),
        ("hybridep", ("dispatch", "cached_dispatch", "combine")),
    )
    for step in steps
)


def declares(function: str) -> dict[str, Any]:
    """The collectives are bit-equal on every run."""
    return {"deterministic": True} if function in (*COLLECTIVES, "moe_layer") else {}


def __getattr__(name: str) -> Any:
    """A collective, the layer, or the reference's attribute of that name."""
    if name == "moe_layer":
        return import_module("conformance.peers.reference_layer").moe_layer
    return collective(name) if name in COLLECTIVES else getattr(moe_ref, name)


def collective(name: str) -> Callable[..., Any]:
    """The reference's collective for one rank: one value for each list over ranks, and a group."""
    reference_function = getattr(moe_ref, name)
    parameters = inspect.signature(reference_function).parameters

    def call(*args: Any, group: Any, **settings: Any) -> Any:
        arguments = dict(zip(parameters, args, strict=False)) | settings
        if "handles" in arguments:
            arguments["handles"] = [arguments["handles"]]  # holds all ranks' handles
        fields = [(key, index) for key, x in arguments.items() for index in _places(x)]
        tensors = [arguments[key] if index is None else arguments[key][index] for key, index in fields]
        out: list[Any] = []

        def play(all_tensors: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[Any]]:
            """The reference's tensors of each rank, and the results."""
            results = reference_function(**_arguments(arguments, fields, all_tensors))
            return [_tensors(result) for result in results], results

        tensors = Played.apply(group, play, out, *tensors)
        return _with_tensors(out[0], list(tensors), dist.get_rank(group))

    call.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        *(x.replace(name="handle") if x.name == "handles" else x for x in parameters.values()),
        inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY),
    ])  # fmt: skip
    return call


def _places(x: Any) -> list[int | None]:
    """The indices of an argument's tensors; None: the argument itself."""
    if isinstance(x, Tensor):
        return [None]
    return (
        [index for index, element in enumerate(x) if isinstance(element, Tensor)]
        if isinstance(x, (tuple, list))
        else []
    )


def _arguments(
    rank_arguments: dict[str, Any], fields: Sequence[tuple[str, int | None]], all_tensors: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """The reference's arguments: lists over the ranks, and for biases a list of lists."""
    arguments = {key: x for key, x in rank_arguments.items() if key not in RANKED or x is None}
    for position, (key, index) in enumerate(fields):
        column = [rank_tensors[position] for rank_tensors in all_tensors]
        if index is None:
            arguments[key] = column
        else:
            arguments.setdefault(key, []).append(column)
    if "handles" in rank_arguments:
        arguments["handles"] = rank_arguments["handles"][0]
    return arguments


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a result; of a Quantized, its differentiable source."""
    fields = [result] if isinstance(result, Tensor) else result
    return [
        x.form(False).source_MN if isinstance(x, Quantized) else x for x in fields if isinstance(x, (Tensor, Quantized))
    ]


def _with_tensors(results: list[Any], tensors: list[Tensor], rank: int) -> Any:
    """This rank's result with these tensors; its handle holds all ranks' handles."""
    rank_result = results[rank]
    if isinstance(rank_result, Tensor):
        return tensors[0]
    remaining_tensors = iter(tensors)
    fields = {name: _with_tensor(x, remaining_tensors) for name, x in rank_result._asdict().items()}
    return rank_result._replace(
        **fields | ({"handle": [result.handle for result in results]} if "handle" in fields else {})
    )


def _with_tensor(x: Any, remaining_tensors: Iterator[Tensor]) -> Any:
    """A field, with the next of the tensors in place of its tensor, if it has one, on the same
    device.
    """
    if isinstance(x, Quantized):
        form, source_MN = x.form(False), next(remaining_tensors)
        groups = tuple(Scaled(*(tensor.to(source_MN.device) for tensor in group)) for group in form.groups)
        return replace(x, rowwise=replace(form, source_MN=source_MN, groups=groups))
    return next(remaining_tensors) if isinstance(x, Tensor) else x


def everybodys(tensors: Sequence[Tensor | None], group: Any) -> list[list[Any]]:
    """The tensors of each rank of the group, on the CPU. None stays None."""
    packed = [None if x is None else (x.dtype, x.shape, _content(x)) for x in tensors]
    all_packed: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_packed, packed, group=group)
    return [[None if x is None else _unpacked(*x) for x in rank_packed] for rank_packed in all_packed]


def _content(x: Tensor) -> bytes:
    dense = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: torch.dtype, shape: torch.Size, content: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)
        if content
        else torch.empty(shape, dtype=dtype)
    )


class Played(torch.autograd.Function):
    """This rank's output tensors; the backward runs the reference's on all ranks' cotangents."""

    @staticmethod
    def forward(ctx: Any, group: Any, play: Any, out: list[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.device, ctx.rank = group, tensors[0].device, dist.get_rank(group)
        ctx.wanted = [x.requires_grad for x in tensors]
        shared = everybodys(tensors, group)
        with torch.enable_grad():
            ctx.inputs = [
                [x.requires_grad_(wanted) for x, wanted in zip(rank_outputs, ctx.wanted, strict=True)]
                for rank_outputs in shared
            ]
            ctx.outputs, results = play(ctx.inputs)
        out.append(results)
        rank_outputs = tuple(x.detach().to(ctx.device, copy=True) for x in ctx.outputs[ctx.rank])
        ctx.mark_non_differentiable(
            *(x for x, output in zip(rank_outputs, ctx.outputs[ctx.rank], strict=True) if not output.requires_grad)
        )
        return rank_outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        all_cotangents = everybodys(cotangents, ctx.group)
        pairs = [
            (x, dx)
            for rank_outputs, rank_cotangents in zip(ctx.outputs, all_cotangents, strict=True)
            for x, dx in zip(rank_outputs, rank_cotangents, strict=True)
            if dx is not None and x.requires_grad
        ]
        leaves = [x for x, wanted in zip(ctx.inputs[ctx.rank], ctx.wanted, strict=True) if wanted]
        gradients = iter(
            torch.autograd.grad(
                [x for x, _ in pairs], leaves, [dx for _, dx in pairs], allow_unused=True, retain_graph=True
            )
            if pairs
            else ()
        )
        input_gradients = [next(gradients, None) if wanted else None for wanted in ctx.wanted]
        return None, None, None, *(None if x is None else x.to(ctx.device) for x in input_gradients)
