"""Laws of two-layer experts: rows with a probability of zero, and settings that change no
result.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.core import row_laws
from conformance.core import universal_laws as universal
from conformance.core.autocast import of_products
from conformance.core.contract import Opaque, Problem
from conformance.core.double_backward import DOUBLE_BACKWARD
from conformance.core.law import Law, Trial, algebraic, plain, upside_down
from conformance.core.shared_out_laws import SHARED_OUT, of_one_process
from conformance.families.experts import laws as experts
from conformance.families.experts.laws import doubled
from conformance.families.experts.precision import recipe_of
from conformance.families.experts.precision_mlp import LAYERS, pairs_from
from conformance.families.quantization.cases import ROLES
from conformance.interface import Implementation
from conformance.judge import Expectation, Finding
from conformance.judge.bound import Bounded
from moe_ref.config import LinearAmax

DELAYED_WEIGHTS = ("fc2_weight", "fc1_weight")  # the weights, in the order of a backward pass
ROUNDED = 1 / 16  # the share by which rounding may change an amax of computed values
ALIGNED = 16  # rows of the padding: more than most experts of a small case have


def _zero_probs(trial: Trial) -> Finding | None:
    """Rows with prob 0 affect only the gradient of that prob."""
    probs = trial.problem.settings["probs"]
    nothing = probs == 0
    rows = trial.problem.required["rows"]
    changed_rows = torch.where(nothing[:, None], upside_down(torch.where(rows.isfinite(), rows, 0), 1) + 1, rows)
    expected: dict[str, Expectation] = dict(trial.expected)
    d_probs = expected.get("d_probs")
    if isinstance(d_probs, Bounded):
        expected["d_probs"] = replace(d_probs, bound=torch.where(nothing, torch.inf, d_probs.bound))
    return trial.judged("zero_probs", expected, trial.run(trial.problem.with_tensors({"rows": changed_rows})))


def _scaling(trial: Trial) -> Finding | None:
    """Twice the probs."""
    probs = trial.problem.settings["probs"]
    twice = replace(trial.problem.with_tensors({"probs": probs * 2}), wanted=(), cotangents={})
    return doubled(trial, "scaling", twice, ("out",))


def _cotangent_scaling(trial: Trial) -> Finding | None:
    """Twice the cotangent."""
    twice = replace(trial.problem, cotangents={name: x * 2 for name, x in trial.problem.cotangents.items()})
    return doubled(trial, "cotangent_scaling", twice, tuple(f"d_{name}" for name in trial.problem.wanted))


def _other_setting(trial: Trial, name: str, value: Any) -> dict[str, Any]:
    """Run without the setting if the call has it, else with it."""
    settings = {key: x for key, x in trial.problem.settings.items() if key != name}
    is_set = name in trial.problem.settings
    return trial.run(replace(trial.problem, settings=settings if is_set else settings | {name: value}))


def _recompute(trial: Trial) -> Finding | None:
    """Recompute in the backward pass if the call does not, and else do not: the same bits if the
    implementation is deterministic.
    """
    shared = trial.case.function == "shared_experts"
    return trial.repeats(
        "recompute", _other_setting(trial, "recompute", True if shared else ("moe_act", "moe")[trial.case.seed % 2])
    )


def _delayed(trial: Trial) -> Finding | None:
    """The gradients of the weights are left for later.

    Each comes once, fc2's first, with the same bits if the implementation is deterministic, and the
    backward pass gives none of them. Only for functions that name the setting.
    """
    problem = replace(trial.problem, first=arguments_of(trial.problem))

    def call(implementation: Any, tensors: dict[str, Any], wgrads: list[Any]) -> dict[str, Any]:
        arguments = [tensors[name] for name in problem.first]
        return {"out": implementation.call(problem.function, *arguments, **_settings(problem, tensors), wgrads=wgrads)}

    return left_for_later(replace(trial, problem=problem), call, "rows")


def arguments_of(problem: Problem) -> dict[str, Any]:
    """The arguments that are passed by position; for a script, those of its call."""
    return problem.first if problem.script else problem.required


def _settings(problem: Problem, tensors: dict[str, Any]) -> dict[str, Any]:
    """The keywords, with the states and the noise of both layers."""
    named = {name: tensors[name] for name, x in problem.settings.items() if not isinstance(x, Opaque)}
    return named | pairs_from(tensors)


def _amaxes(trial: Trial) -> Finding | None:
    """The amaxes of both layers, some of which are larger before the call than the amax of what it
    quantises. Those stay; the others become that amax. Only for functions that name the setting.
    """
    problem = replace(trial.problem, first=arguments_of(trial.problem))
    if not trial.extras["names"](problem.function, "amaxes"):
        return None
    amax_names = [f"amax.{layer}.{role}" for layer in LAYERS for role in ROLES]
    nothing = torch.zeros(len(problem.first["tokens_per_expert"]))

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        arguments = [tensors[name] for name in problem.first]
        earlier_amaxes = [tensors[name].clone() for name in amax_names]  # an argument may not change
        amaxes = LinearAmax(*earlier_amaxes[:3]), LinearAmax(*earlier_amaxes[3:])
        out = implementation.call(problem.function, *arguments, **_settings(problem, tensors), amaxes=amaxes)
        return {"out": out, "amaxes": amaxes}

    def read(implementation: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        first, second = outputs.pop("amaxes")
        return outputs | dict(zip(amax_names, (*first, *second), strict=True))

    settings = problem.settings | {"amaxes": Opaque("amaxes")}
    raised = replace(problem, settings=settings, script=script, read=read)
    fresh = _in_reference(_with_inputs(raised, dict.fromkeys(amax_names, nothing)))
    earlier = {
        name: torch.where((torch.arange(len(nothing)) + position) % 2 == 0, fresh[name] * 2 + 1, fresh[name] / 2)
        for position, name in enumerate(amax_names)
    }
    outputs = trial.run(_with_inputs(raised, earlier))
    expected_amaxes = {name: _raised(earlier[name], fresh[name], name.endswith("weight")) for name in amax_names}
    return trial.judged("amaxes", trial.expected | expected_amaxes, outputs)


def _with_inputs(problem: Problem, tensors: dict[str, Tensor]) -> Problem:
    """The call with more tensors for its script."""
    return replace(problem, required=problem.required | tensors)


def _in_reference(problem: Problem) -> dict[str, Any]:
    """The outputs of the reference, after its backward."""
    inputs = problem.required | problem.settings
    inputs = inputs | {name: inputs[name].detach().clone().requires_grad_() for name in problem.wanted}
    assert problem.script is not None and problem.read is not None
    outputs = problem.script(Implementation(moe_ref), inputs)
    if problem.wanted:
        torch.autograd.grad(outputs["out"], [inputs[name] for name in problem.wanted], problem.cotangents["out"])
    return problem.read(Implementation(moe_ref), outputs)


def _raised(earlier: Tensor, fresh: Tensor, is_exact: bool) -> Bounded:
    """The larger of both amaxes.

    What is quantised may be rounded differently, unless it `is_exact`.
    """
    expected = torch.maximum(earlier, fresh).double()
    bound = torch.where((earlier > fresh) | torch.tensor(is_exact), 0.0, expected * ROUNDED)
    return Bounded(expected, bound, torch.float32, torch.float32)


def _rows_again(trial: Trial) -> Finding | None:
    """The rows are overwritten by NaN after the forward pass, and a function makes them again: the
    results have the same bits if the implementation is deterministic, so no saved row was read.
    Only for functions that name the setting.
    """
    problem = replace(trial.problem, first=arguments_of(trial.problem))
    if not trial.extras["names"](problem.function, "rows_again"):
        return None

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        rows, *other_arguments = (tensors[name] for name in problem.first)
        settings = _settings(problem, tensors)
        copy, values = rows.clone(), rows.detach().clone()
        out = implementation.call(problem.function, copy, *other_arguments, **settings, rows_again=values.clone)
        copy.data.fill_(torch.nan)  # a change that autograd does not count
        return {"out": out}

    recomputed = replace(problem, settings=problem.settings | {"rows_again": Opaque("rows_again")}, script=script)
    return trial.repeats("rows_again", trial.run(recomputed))


def left_for_later(trial: Trial, call: Callable[..., dict[str, Any]], first: str) -> Finding | None:
    """The law `delayed` of call(implementation, given, wgrads), whose first input is `first`.

    If only these weights have a gradient, `backward` runs by itself, because `grad` would not reach
    the products, which wait. Otherwise `first` has a gradient as well.
    """
    if not trial.extras["names"](trial.problem.function, "wgrads"):
        return None
    problem, names = trial.problem, [name for name in DELAYED_WEIGHTS if name in trial.problem.wanted]

    only_weights = set(problem.wanted) <= set(names)

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        wgrads: list[Any] = []
        if not only_weights:
            return call(implementation, tensors, wgrads) | {"wgrads": wgrads}
        weights = {name: tensors[name].detach().requires_grad_() for name in names}
        outputs = call(implementation, tensors | weights, wgrads)
        heads = {name: x for name, x in outputs.items() if name in problem.cotangents and x.requires_grad}
        torch.autograd.backward([*heads.values()], [problem.cotangents[name].to(x.device) for name, x in heads.items()])
        early_gradients = {f"d_{name}": x.new_zeros(()) if x.grad is None else x.grad for name, x in weights.items()}
        return {name: x.detach() for name, x in outputs.items()} | early_gradients | {"wgrads": wgrads}

    def read(implementation: Any, outputs: dict[str, Any]) -> dict[str, Any]:
        wgrads = outputs.pop("wgrads")
        early_names = [name for name in names if outputs[f"d_{name}"].any()]
        late_gradients = [wgrad() for wgrad in wgrads]
        complaint = f"gives a gradient of {early_names[0]} at once" if early_names else ""
        complaint = complaint or (
            ""
            if len(late_gradients) == len(names)
            else f"leaves {len(late_gradients)} gradients for {' and '.join(names)}"
        )
        return outputs | (
            {"told": complaint} if complaint else {f"d_{n}": x for n, x in zip(names, late_gradients, strict=True)}
        )

    delayed = replace(problem, settings=problem.settings | {"wgrads": Opaque("wgrads")}, script=script, read=read)
    if only_weights:
        delayed = replace(delayed, wanted=(), cotangents={})
    elif first not in problem.wanted:
        delayed = replace(delayed, wanted=(*problem.wanted, first))
    outputs = trial.run(delayed)
    return Finding("wgrads", "delayed", outputs["told"]) if "told" in outputs else trial.repeats("delayed", outputs)


def _alignment(trial: Trial) -> Finding | None:
    """Pad each expert's rows if the call does not, and else do not pad them."""
    return trial.judged("alignment", trial.expected, _other_setting(trial, "align", ALIGNED))


def _one_after_another(trial: Trial) -> Finding | None:
    """The same results as those of grouped_mlp, if it is offered."""
    return trial.judged("grouped", trial.expected, trial.run(replace(trial.problem, function="grouped_mlp")))


def _one_group(trial: Trial) -> Finding | None:
    """The same results as those of grouped_mlp with one expert, which has all tokens with
    probability 1, if it is offered. This is Megatron's `use_grouped_gemm_for_shared_expert`.
    """
    omitted_settings = ("recompute", "group")
    settings = {name: x for name, x in trial.problem.settings.items() if name not in omitted_settings}

    def script(implementation: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        x = tensors["x"]
        rows, weights = (
            torch.full((1,), len(x), device=x.device),
            (tensors["fc1_weight"][None], tensors["fc2_weight"][None]),
        )
        probs = torch.ones(len(x), device=x.device)
        return {"out": implementation.call("grouped_mlp", x, rows, *weights, probs=probs, **settings)}

    required = trial.problem.required
    first = {"rows": required["x"], "tokens_per_expert": torch.full((1,), len(required["x"]))}
    first |= {name: required[name][None] for name in ("fc1_weight", "fc2_weight")}
    grouped = Problem("grouped_mlp", first, settings | {"probs": torch.ones(len(required["x"]))})
    if not trial.extras["offers"]("grouped_mlp") or trial.extras["refusal"](grouped):
        return None
    return trial.judged("one_group", trial.expected, trial.run(replace(trial.problem, script=script, first=required)))


def _plain_products(case: Any) -> bool:
    """Whether there is no gate, and no state or noise for each of two layers."""
    return plain(case) and not case.gate and case.scaling in ("", "current", "block", "mxfp8")


def _in_any_order(case: Any) -> bool:
    """Whether scales do not depend on the order of tokens; noise does."""
    return getattr(case, "scaling", "") in ("", "delayed", "current")


def _weighted(case: Any) -> bool:
    return plain(case) and bool(case.probs)


def _doubles(case: Any) -> bool:
    """Whether results double exactly.

    They do not in float16, nor with delayed scales or a least amax.
    """
    recipe = recipe_of(case)
    return case.dtype != "float16" and (recipe is None or (recipe.scaling != "delayed" and not recipe.amax_epsilon))


def _padded_by_nothing(case: Any) -> bool:
    """Whether rows of zeros stay zero or enter no scale, and the call is legal without padding."""
    zeros = not case.bias1 or (bool(case.probs) and not case.on_input)
    return case.unit == 1 and (zeros or not case.scaling) and not _random(case)


def _random(case: Any) -> bool:
    """Whether there is noise, which has the rows of the padded buffer."""
    recipe = recipe_of(case)
    return recipe is not None and bool(recipe.stochastic_rounding) and bool(case.grads)


ZERO_PROBS = Law(
    "zero_probs", _zero_probs, lambda case: _weighted(case) and case.weights != "plain" and not case.scaling
)  # a scale covers all rows
SCALING = Law("scaling", _scaling, lambda case: _weighted(case) and not case.on_input and _doubles(case))
COTANGENT_SCALING = Law(
    "cotangent_scaling", _cotangent_scaling, lambda case: plain(case) and bool(case.grads) and _doubles(case)
)
RECOMPUTE = Law(
    "recompute", _recompute, lambda case: not case.golden and not case.illegal and bool(case.grads), recompiles=True
)
DELAYED = Law(
    "delayed",
    _delayed,
    lambda case: plain(case) and any(name in case.grads for name in DELAYED_WEIGHTS),
    recompiles=True,
)
ROWS_AGAIN = Law(
    "rows_again",
    _rows_again,
    lambda case: plain(case) and "fc1_weight" in case.grads and case.recompute != "moe",
    recompiles=True,
)
AMAXES = Law("amaxes", _amaxes, lambda case: plain(case) and case.scaling == "delayed", recompiles=True)
ALIGNMENT = Law("alignment", _alignment, lambda case: plain(case) and _padded_by_nothing(case), recompiles=True)
GROUPED = Law("grouped", _one_after_another, plain)
ONE_GROUP = Law("one_group", _one_group, _plain_products, recompiles=True)
TOKEN_REVERSAL = replace(row_laws.TOKEN_REVERSAL, applies=lambda case: plain(case) and _in_any_order(case))

_ELEMENTWISE = (
    *(*universal.EVERYWHERE, *universal.STATIC, row_laws.TOKEN_REVERSAL, row_laws.BATCH_CONCAT),
    *(experts.NEIGHBOUR_INDEPENDENCE, experts.SCALING, experts.COTANGENT_SCALING, DOUBLE_BACKWARD),
)
_PRODUCT = (
    *(*of_products(*universal.CALLS), DOUBLE_BACKWARD, experts.BUFFER_REUSE),
    *(universal.LATE_PRODUCER, universal.HOST_SYNC, experts.GRAPH_CAPTURE),
)
_SEGMENTS = (experts.NEIGHBOUR_INDEPENDENCE, experts.PADDING_INDEPENDENCE, experts.EXPERT_RELABELLING)
_UNQUANTISED = "scaling=''"
_ALGEBRA = algebraic(*_SEGMENTS, experts.ROW_REVERSAL, where=_UNQUANTISED)
_BY_ROW = algebraic(experts.GROUP_SPLIT, where=_UNQUANTISED)


def _contraction(letter: str) -> tuple[Law, ...]:
    """The law that the order of this dimension, over which the product sums, does not matter."""
    applies = lambda case: plain(case) and experts.unquantised(case)  # noqa: E731
    return algebraic(row_laws.reversal("contraction_reversal", letter, applies), where=_UNQUANTISED)


_MLP = (*_PRODUCT, RECOMPUTE, COTANGENT_SCALING)
_EXPERTS = (*_MLP, *_SEGMENTS, experts.GROUP_SPLIT, ZERO_PROBS, SCALING, ALIGNMENT)
GLU = ACTIVATION = _ELEMENTWISE
GROUPED_LINEAR = (*(*_PRODUCT, *_ALGEBRA, *_BY_ROW, *_contraction("N"), experts.SCALING, experts.COTANGENT_SCALING),)
GROUPED_DGRAD = (*_PRODUCT, *_ALGEBRA, *_BY_ROW, *_contraction("M"), experts.SCALING)
GROUPED_WGRAD = (*_PRODUCT, *_ALGEBRA, experts.TWO_PARTS, experts.SCALING)
GROUPED_MLP = (*_EXPERTS, DELAYED, ROWS_AGAIN, AMAXES)
SEQUENTIAL_MLP = (GROUPED, *_EXPERTS)
SHARED_EXPERTS = (*SHARED_OUT, *of_one_process(*_MLP[2:], TOKEN_REVERSAL, ONE_GROUP))
LATENT_PROJECTION = (
    *(*_PRODUCT, TOKEN_REVERSAL, experts.ROW_INDEPENDENCE, experts.SCALING, experts.COTANGENT_SCALING),
)
