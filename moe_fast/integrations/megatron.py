"""moe_fast within Megatron-Core's own MoELayer, with or without Transformer Engine.

    import moe_fast.integrations.megatron
    moe_fast.integrations.megatron.install()  # before the configuration and the model are made

Megatron's own options then choose moe_fast: `moe_permute_fusion` its permutation,
`moe_router_fusion` its router, and `moe_grouped_gemm` in a local layer spec its experts
(`GroupedExperts`). The rest of the layer is Megatron's: gating, dispatchers, shared experts.

Where a release of megatron-core lacks what a replacement needs, or a call has an argument that
moe_fast lacks, Megatron's own code runs, and one warning says so.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

from torch import Tensor

from moe_fast.te import shim

try:
    from megatron.core.models import backends
    from megatron.core.transformer.moe import moe_utils

    from moe_fast.integrations.megatron_experts import GroupedExperts, SequentialMLP, warn_once
except ImportError as error:
    raise ImportError(f"moe_fast.integrations.megatron needs megatron-core from 0.16 on: {error}") from error


def _offered(fused: Callable[..., Any], unfused: Callable[..., Any]) -> Callable[..., Any]:
    """`fused`, or `unfused` after a warning if the first lacks an argument or refuses a value."""
    signature = inspect.signature(fused)

    @wraps(fused)
    def function(*arguments: Any, **settings: Any) -> Any:
        try:
            signature.bind(*arguments, **settings)
        except TypeError as lacking:
            reason: Exception = lacking
        else:
            try:
                return fused(*arguments, **settings)
            except ValueError as refusal:
                reason = refusal
        warn_once(f"Megatron's own code runs in the place of moe_fast's {fused.__name__}: {reason}")
        return unfused(*arguments, **settings)

    return function


def fused_permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: Any = None) -> tuple[Tensor, Any]:
    """(rows [R,H], row map); `num_out_tokens` may be a tensor of the host."""
    return shim.moe_permute(tokens, routing_map, _number(num_out_tokens))


def fused_permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any = None
) -> tuple[Tensor, Tensor | None, Any]:
    """(rows [R,H], probs [R], row map); `num_out_tokens` may be a tensor of the host."""
    return shim.moe_permute_with_probs(tokens, probs, routing_map, _number(num_out_tokens))


def _number(num_out_tokens: Any) -> int | None:
    return None if num_out_tokens is None else int(num_out_tokens)


def _balancing_loss(coeff: float, **arguments: Any) -> Tensor:
    return moe_utils.switch_load_balancing_loss_func(moe_aux_loss_coeff=coeff, **arguments)


def _has_release(version: str, check_equality: bool = True) -> bool:
    """Whether the functions of this module are those of that release of Transformer Engine: all."""
    return True


def grouped_mlp_modules(provider: Any, moe_use_grouped_gemm: bool, *arguments: Any, **settings: Any) -> Any:
    """The spec of the experts: `GroupedExperts` in the place of SequentialMLP, if grouped products
    are asked for.
    """
    spec = _local_experts(provider, False, *arguments, **settings)
    if not moe_use_grouped_gemm:
        return spec
    if isinstance(spec, partial):  # from 0.17 on
        return partial(GroupedExperts, *spec.args, **spec.keywords)
    return GroupedExperts, spec[1]


_local_experts = backends.LocalSpecProvider.grouped_mlp_modules


def _reads(function: str, parameter: str = "fused") -> Callable[[], bool]:
    """Whether a function of moe_utils has a parameter, with which it calls a fused function."""
    return lambda: parameter in inspect.signature(getattr(moe_utils, function, len)).parameters


def _has_sequential_experts() -> bool:
    """Whether the spec of experts one after another is a class and its submodules, or a partial."""
    parameters = tuple(inspect.signature(_local_experts).parameters)
    if parameters[:2] != ("self", "moe_use_grouped_gemm"):
        return False
    spec = _local_experts(backends.LocalSpecProvider(), *[False] * (len(parameters) - 1))
    return (spec.func if isinstance(spec, partial) else spec[0]) is SequentialMLP


class Part(NamedTuple):
    """A private part of megatron-core that `install` replaces."""

    owner: Any
    name: str
    replacement: Any
    check: Callable[[], bool]  # whether the installed release has the part
    without: str | None  # what a user loses without it; None: nothing

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


_UNPERMUTED = "moe_permute_fusion does not call moe_fast"
_UNROUTED = "moe_router_fusion does not call moe_fast"
_LOCAL_EXPERTS = "moe_grouped_gemm does not give the experts of moe_fast"
# A release that lacks a part without effect calls no such thing.
PARTS = (
    Part(moe_utils, "HAVE_TE", True, lambda: hasattr(moe_utils, "HAVE_TE"), f"{_UNPERMUTED}, {_UNROUTED}"),
    Part(moe_utils, "te_general_gemm", None, lambda: not hasattr(moe_utils, "te_general_gemm"), None),  # torch's gate
    Part(moe_utils, "is_te_min_version", _has_release, lambda: hasattr(moe_utils, "is_te_min_version"), None),
    *(
        Part(moe_utils, f"fused_{name}", function, _reads(reader), _UNPERMUTED)
        for name, function, reader in (
            ("permute", fused_permute, "permute"),
            ("permute_with_probs", fused_permute_with_probs, "permute"),
            ("unpermute", shim.moe_unpermute, "unpermute"),
            ("sort_chunks_by_index", shim.moe_sort_chunks_by_index, "sort_chunks_by_idxs"),
            ("sort_chunks_by_index_with_probs", shim.moe_sort_chunks_by_index_with_probs, "sort_chunks_by_idxs"),
        )
    ),
    Part(
        moe_utils,
        "fused_permute_and_pad_with_probs",
        shim.moe_permute_and_pad_with_probs,
        _reads("permute", "align_size"),
        None,
    ),
    *(
        Part(moe_utils, name, _offered(function, unfused), _reads(unfused.__name__), _UNROUTED)
        for name, function, unfused in (
            (
                "fused_topk_with_score_function",
                shim.fused_topk_with_score_function,
                moe_utils.topk_routing_with_score_function,
            ),
            (
                "fused_compute_score_for_moe_aux_loss",
                shim.fused_compute_score_for_moe_aux_loss,
                moe_utils.compute_routing_scores_for_aux_loss,
            ),
        )
    ),
    Part(
        moe_utils,
        "fused_moe_aux_loss",
        _offered(shim.fused_moe_aux_loss, _balancing_loss),
        _reads("switch_load_balancing_loss_func"),
        _UNROUTED,
    ),
    Part(
        backends.LocalSpecProvider, "grouped_mlp_modules", grouped_mlp_modules, _has_sequential_experts, _LOCAL_EXPERTS
    ),
)
_replaced: list[tuple[Part, Any]] = []  # with what stood there
_MISSING = object()


def install() -> None:
    """Put moe_fast into the installed megatron-core, for layers that are built afterwards.

    Warns:
        UserWarning: once for each part that the installed release lacks.
    """
    if _replaced:
        return
    offered = [(part, part.check()) for part in PARTS]
    for part, is_offered in offered:
        if is_offered:
            _replaced.append((part, getattr(part.owner, part.name, _MISSING)))
            setattr(part.owner, part.name, part.replacement)
        elif part.without is not None:
            warn_once(f"this release of megatron-core has another {part}: {part.without}")


def uninstall() -> None:
    """Put back what `install` replaced. Layers that are built already keep their experts."""
    while _replaced:
        part, original = _replaced.pop()
        if original is _MISSING:
            delattr(part.owner, part.name)
        else:
            setattr(part.owner, part.name, original)
