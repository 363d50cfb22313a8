"""route over several steps, with finish_batch: probs, map, losses, gradients and state."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

import moe_ref
from conformance.core.contract import Contract, Problem, accumulator_of, leaf
from conformance.core.signature import Input, Output, Signature
from conformance.core.tensors import DTYPES, hashed, payload
from conformance.families.router.cases_route import (
    EVALUATED,
    FORWARDS,
    LOSSES,
    REPLAYS,
    RouteCase,
    config_of,
    logits_of_step,
    mask_of_step,
)
from conformance.families.router.route_step import Played, Step
from conformance.interface import Implementation, named_outputs
from conformance.judge import Expectation
from conformance.judge.exact import Exact
from moe_ref.config import RankGroup, RouterConfig, RouterRanks, RouterState

STATE = ("expert_bias", "tokens_per_expert", "global_tokens_per_expert", "global_steps")  # compared
ROUTE_OUTPUTS = ("probs", "routing_map", "losses", "indices", "state")

Script = Callable[[Any, dict[str, Any]], dict[str, Any]]


class Route(Contract[RouteCase]):
    """`route`, `finish_batch` and the state between them."""

    function = "route"
    case_type = RouteCase
    signature = Signature(
        inputs=[
            Input("logits", "TE", gradient=True),
            Input("padding_mask", "T", ("bool",), field="", optional="padding"),
        ],
        outputs=[Output(name) for name in ROUTE_OUTPUTS],
        settings=("batch_size", "replay", "ranks"),
    )
    primary = "0.probs"
    companions = ("new_state", "finish_batch", "state_tensors", "state_from")

    def legal(self, case: RouteCase) -> Problem:
        steps = case.steps.split("+")
        required = {f"logits.{i}": logits_of_step(case, i) for i, step in enumerate(steps) if step in FORWARDS}
        settings: dict[str, Any] = {"training": True, "loss_scale": case.scale / 8}
        settings |= {"batch_size": case.sequences} if case.sequences > 1 else {}
        uneven = len(set(case.counts)) > 1  # needs a mask, because without one all ranks have equal counts
        settings |= (
            {"padding_mask": torch.from_numpy(hashed(case.seed, "padding", case.tokens) % 8 < case.padding)}
            if case.padding or uneven
            else {}
        )
        settings |= {"replay": "record"} if any(step in REPLAYS for step in steps) else {}
        if case.ranks > 1:
            group = RankGroup(case.ranks, lambda x: x * case.ranks)
            settings |= {"ranks": RouterRanks(group, group)}
        recorded = [i for i, step in enumerate(steps) if step in FORWARDS and step != "nograd"]
        cotangents = (
            {
                f"{i}.probs": payload(case.seed, f"d_probs {i}", (case.tokens, case.experts), case.dtype)
                for i in recorded
            }
            if case.grads
            else {}
        )
        wanted = tuple(f"logits.{i}" for i in recorded) if case.grads else ()
        config = config_of(case)
        of = required if case.layout_of == "logits" else (case.layout_of,)
        first = {"logits": required["logits.0"], "config": config}
        return Problem(
            self.function,
            required,
            settings,
            dict.fromkeys(of, case.layout),
            wanted,
            cotangents,
            script=self._script(config, steps),
            first=first,
        )

    @staticmethod
    def _script(
        config: RouterConfig, steps: list[str], watch: Callable[[int, RouterState], None] | None = None
    ) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
        def script(implementation: Any, inputs: dict[str, Any]) -> dict[str, Any]:
            state = implementation.call("new_state", config, device=inputs["logits.0"].device)
            common = {name: inputs[name] for name in ("batch_size", "loss_scale", "ranks") if name in inputs}
            ranks = {name: inputs[name] for name in ("ranks",) if name in inputs}
            target = None
            outputs: dict[str, Any] = {}
            for i, step in enumerate(steps):
                if watch:
                    watch(i, state)
                if step in ("finish", "frozen"):
                    state = implementation.call(
                        "finish_batch", state, config, **ranks, **({"frozen": True} if step == "frozen" else {})
                    )
                elif step in ("reload", "narrow"):
                    state = loaded_again(implementation, state, torch.bfloat16 if step == "narrow" else None)
                else:
                    replay = step.removeprefix(EVALUATED)
                    options: dict[str, Any] = {"training": False} if step.startswith("eval") else {}
                    options |= {"replay": replay} if step in REPLAYS else {}
                    options |= {"replay_target": target} if replay == "forward" else {}
                    if "padding_mask" in inputs:
                        options["padding_mask"] = mask_of_step(inputs["padding_mask"], i)
                    with torch.no_grad() if step == "nograd" else nullcontext():
                        result = named_outputs(
                            implementation.call(
                                "route", inputs[f"logits.{i}"], config, state=state, **common, **options
                            ),
                            ROUTE_OUTPUTS,
                        )
                    state = result["state"]
                    target = result["indices"] if replay == "record" else target
                    outputs |= {f"{i}.{name}": result[name] for name in ("probs", "routing_map")}
                    losses = _fields(result["losses"])
                    outputs |= {f"{i}.{name}": loss for name, loss in losses.items() if loss is not None}
                    outputs[f"{i}.losses"] = torch.tensor([_detached(losses.get(name)) for name in LOSSES])
            tensors = implementation.call("state_tensors", state)
            return outputs | {f"state.{name}": tensors[name].clone() for name in STATE if name in tensors}

        return script

    def expected(self, case: RouteCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        played = self.played(case, problem)
        steps = self.forwards(case, problem, played, declared)
        return self.judged(played, steps, [steps] * case.ranks, [steps] * case.ranks)

    def played(self, case: RouteCase, problem: Problem) -> Played:
        """The reference's outputs, gradients and states, float64."""
        config, steps = config_of(case), case.steps.split("+")
        states_before: dict[int, RouterState] = {}
        leaves = {name: leaf(x) for name, x in problem.required.items()}
        script = self._script(config, steps, states_before.__setitem__)
        out = script(Implementation(moe_ref), problem.settings | leaves)
        attached = [name for name in problem.cotangents if out[name].requires_grad]
        inputs = [leaves[name] for name in problem.wanted]
        cotangents = [problem.cotangents[name].double() for name in attached]
        gradients = (
            torch.autograd.grad([out[name] for name in attached], inputs, cotangents, allow_unused=True)
            if attached
            else (None,) * len(inputs)
        )
        values = {
            f"d_{name}": torch.zeros_like(x) if g is None else g
            for name, x, g in zip(problem.wanted, inputs, gradients, strict=True)
        }
        return Played(out, values, states_before)

    @staticmethod
    def forwards(case: RouteCase, problem: Problem, played: Played, declared: Mapping[str, Any]) -> list[Step]:
        """The steps that take logits."""
        config = config_of(case)
        recorded, queue, forwards = torch.zeros(0), [], []
        for i, step in enumerate(case.steps.split("+")):
            if step not in FORWARDS:
                continue
            replay = step.removeprefix(EVALUATED)
            if replay == "forward":
                queue.append(recorded)
            replayed = recorded if replay == "forward" else queue.pop(0) if replay == "backward" else None
            forward_step = Step(
                case,
                config,
                problem,
                i,
                step,
                played.before[i],
                played.outputs,
                replayed,
                accumulator_of(declared, DTYPES[case.dtype]),
            )
            recorded = forward_step.chosen if replay == "record" else recorded
            forwards.append(forward_step)
        return forwards

    @staticmethod
    def judged(
        played: Played, steps: list[Step], sequence: list[list[Step]], steps_of_ranks: list[list[Step]]
    ) -> dict[str, Expectation]:
        """One rank's expectations; none if rounding could change a choice on any rank.

        Args:
            played: the outputs and gradients of the rank's calls.
            steps: the steps of the rank.
            sequence: the steps of each rank of its sequence.
            steps_of_ranks: the steps of each rank of the batch.
        """
        if any(step.ambiguous for forwards in steps_of_ranks for step in forwards):
            return {}
        expectations: dict[str, Expectation] = {}
        for i, step in enumerate(steps):
            step.sequence, step.every = ([forwards[i] for forwards in ranks] for ranks in (sequence, steps_of_ranks))
            expectations |= step.expectations(played.gradients.get(f"d_logits.{step.index}"))
        for name in STATE:
            value = played.outputs[f"state.{name}"]
            # exact: sums of n/1024 are not rounded
            expectations[f"state.{name}"] = Exact(value, "values" if value.is_floating_point() else "integers")
        return expectations


def loaded_again(implementation: Any, state: Any, dtype: torch.dtype | None) -> Any:
    """The state, saved and loaded again; with a dtype, as in a model whose buffers were cast
    to it.
    """
    saved = {name: x.clone() for name, x in implementation.call("state_tensors", state).items()}
    cast = {name: x.to(dtype) for name, x in saved.items() if dtype is not None and x.is_floating_point()}
    return implementation.call("state_from", saved | cast)


def _detached(loss: Any) -> bool:
    """Whether there is a loss that holds no graph, so that logging it keeps no activations."""
    return loss is not None and not loss.requires_grad


def _fields(losses: Any) -> dict[str, Any]:
    return dict(losses) if isinstance(losses, dict) else {name: getattr(losses, name, None) for name in LOSSES}
