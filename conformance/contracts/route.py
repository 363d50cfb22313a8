"""route over several steps: probs, map, losses, gradients and state, with what happens between global batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.case import Case
from conformance.contracts.balancing import aux_gradient, aux_scores, z_terms
from conformance.contracts.base import Contract, Problem, accumulator_of, leaf
from conformance.contracts.topk import gradient, keys_of, weights
from conformance.interface import Implementation, named_outputs
from conformance.judge import Expectation
from conformance.judge.bound import ROUNDOFF, Bounded
from conformance.judge.exact import Exact
from conformance.judge.running import Running
from conformance.values import DTYPES, hashed, payload
from moe_ref.capacity import expert_capacity
from moe_ref.config import MoEConfig, RouterState
from moe_ref.selection import topk_routing

STEPS = ("train", "eval", "nograd", "record", "forward", "backward", "finish", "frozen", "reload")
PLAIN = ("law", "grads", "ranks", "per_token", "scale", "padding", "pad", "policy", "capacity", "bias", "scaling", "dtype", "seed", "poison", "rate", "coeff")
FORWARDS = STEPS[:6]  # those that take logits
LOSSES = ("z_loss", "aux_loss", "seq_aux_loss", "global_aux_loss")
STATE = ("expert_bias", "tokens_per_expert", "global_tokens_per_expert", "global_steps")  # what is compared of the state
ROUTE_OUTPUTS = ("probs", "routing_map", "losses", "indices", "state")


Script = Callable[[Any, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RouteCase(Case):
    """A router and what happens to it, step by step."""

    steps: str = "train"  # joined by +
    tokens: int = 2  # of one micro-batch; a multiple of sequences
    sequences: int = 1
    experts: int = 2
    topk: int = 1
    dtype: str = "float32"
    score: str = "sigmoid"
    groups: int = 0
    group_topk: int = 0
    scaling: int = 0  # in eighths
    bias: bool = False  # whether the expert bias is on
    rate: int = 16  # its update rate in 1024ths
    losses: str = ""  # any of aux, seq, global and z, joined by +
    coeff: int = 4  # of each loss, in eighths
    capacity: int = 0  # factor in quarters; 0: none
    pad: bool = False
    policy: str = "probs"
    padding: int = 0  # of 8 tokens
    per_token: bool = False  # calculate_per_token_loss
    scale: int = 8  # loss scale in eighths
    ranks: int = 1  # that share a sequence, all with the same tokens: a sum over them is so many times this rank's
    grads: str = ""

    def __post_init__(self) -> None:
        unknown = [step for step in self.steps.split("+") if step not in STEPS]
        if unknown or self.steps.split("+")[0] not in FORWARDS:
            raise ValueError(f"steps is {self.steps!r}; it must be some of {', '.join(STEPS)}, joined by +, and begin with a forward")
        if self.tokens % self.sequences:
            raise ValueError(f"tokens {self.tokens} is no multiple of sequences {self.sequences}")


RouteCase.serves("route")


def config_of(case: RouteCase) -> MoEConfig:
    """The configuration that the case describes."""
    losses = case.losses.split("+")
    kinds = tuple(f"{name}_aux_loss".replace("aux_aux", "aux") for name in ("aux", "seq", "global") if name in losses)
    return MoEConfig(
        num_moe_experts=case.experts,
        moe_ffn_hidden_size=1,
        moe_router_topk=case.topk,
        moe_router_score_function="softmax" if case.score.startswith("softmax") else case.score,  # type: ignore[arg-type]
        moe_router_pre_softmax=case.score == "softmax_pre",
        moe_router_num_groups=case.groups or None,
        moe_router_group_topk=case.group_topk or None,
        moe_router_topk_scaling_factor=case.scaling / 8 or None,
        moe_router_enable_expert_bias=case.bias,
        moe_router_bias_update_rate=case.rate / 1024,
        moe_router_load_balancing_type=kinds or "none",  # type: ignore[arg-type]
        moe_aux_loss_coeff=(case.coeff / 8,) * len(kinds) if kinds else 0.0,
        moe_z_loss_coeff=case.coeff / 8 if "z" in losses else None,
        moe_expert_capacity_factor=case.capacity / 4 or None,
        moe_pad_expert_input_to_capacity=case.pad,
        moe_token_drop_policy=case.policy,  # type: ignore[arg-type]
        moe_enable_routing_replay=any(step in case.steps for step in ("record", "forward", "backward")),
        calculate_per_token_loss=case.per_token,
        moe_token_dispatcher_type="alltoall",
    )


def logits_of_step(case: RouteCase, step: int) -> Tensor:
    """[T,E] logits whose gaps no rounding closes: the ranks of the experts, and a little more in float32."""
    noise = hashed(case.seed, f"logits {step}", case.tokens * case.experts).reshape(case.tokens, case.experts)
    rank = noise.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    fine = (noise % 64) / 1024 if case.dtype == "float32" else 0
    return torch.from_numpy((rank - case.experts // 2) * min(0.5, 8 / case.experts) + fine).to(DTYPES[case.dtype])


class Route(Contract[RouteCase]):
    """`route`, `finish_batch` and the state between them."""

    function = "route"
    outputs = ROUTE_OUTPUTS
    primary = "0.probs"
    optional = ("batch_size", "padding_mask", "replay", "sum_tp_cp", "sum_tp_dp_cp")
    companions = ("new_state", "finish_batch", "state_tensors", "state_from")

    def legal(self, case: RouteCase) -> Problem:
        steps = case.steps.split("+")
        required = {f"logits.{i}": logits_of_step(case, i) for i, step in enumerate(steps) if step in FORWARDS}
        settings: dict[str, Any] = {"training": True, "loss_scale": case.scale / 8}
        settings |= {"batch_size": case.sequences} if case.sequences > 1 else {}
        settings |= {"padding_mask": torch.from_numpy(hashed(case.seed, "padding", case.tokens) % 8 < case.padding)} if case.padding else {}
        settings |= {"replay": "record"} if any(step in ("record", "forward", "backward") for step in steps) else {}
        settings |= dict.fromkeys(("sum_tp_cp", "sum_tp_dp_cp"), lambda x: x * case.ranks) if case.ranks > 1 else {}
        recorded = [i for i, step in enumerate(steps) if step in FORWARDS and step != "nograd"]
        cotangents = {f"{i}.probs": payload(case.seed, f"d_probs {i}", (case.tokens, case.experts), case.dtype) for i in recorded} if case.grads else {}
        wanted = tuple(f"logits.{i}" for i in recorded) if case.grads else ()
        config = config_of(case)
        first = {"logits": required["logits.0"], "config": config}
        return Problem(self.function, required, settings, {}, wanted, cotangents, script=self._script(config, steps), first=first)

    @staticmethod
    def _script(
        config: MoEConfig, steps: list[str], watch: Callable[[int, RouterState], None] | None = None
    ) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
        def script(implementation: Any, given: dict[str, Any]) -> dict[str, Any]:
            state = implementation.call("new_state", config, device=given["logits.0"].device)
            common = {name: given[name] for name in ("batch_size", "padding_mask", "loss_scale", "sum_tp_cp", "sum_tp_dp_cp") if name in given}
            over_all = {name: given[name] for name in ("sum_tp_dp_cp",) if name in given}
            target = None
            outputs: dict[str, Any] = {}
            for i, step in enumerate(steps):
                if watch:
                    watch(i, state)
                if step in ("finish", "frozen"):
                    state = implementation.call("finish_batch", state, config, **over_all, **({"frozen": True} if step == "frozen" else {}))
                elif step == "reload":
                    saved = {name: x.clone() for name, x in implementation.call("state_tensors", state).items()}
                    state = implementation.call("state_from", saved)
                else:
                    how: dict[str, Any] = {"training": False} if step == "eval" else {}
                    how |= {"replay": step} if step in ("record", "forward", "backward") else {}
                    how |= {"replay_target": target} if step == "forward" else {}
                    with torch.no_grad() if step == "nograd" else nullcontext():
                        result = named_outputs(implementation.call("route", given[f"logits.{i}"], config, state=state, **common, **how), ROUTE_OUTPUTS)
                    state = result["state"]
                    target = result["indices"] if step == "record" else target
                    outputs |= {f"{i}.{name}": result[name] for name in ("probs", "routing_map")}
                    told = _fields(result["losses"])
                    outputs |= {f"{i}.{name}": loss for name, loss in told.items() if loss is not None}
                    outputs[f"{i}.losses"] = torch.tensor([told.get(name) is not None for name in LOSSES])
            tensors = implementation.call("state_tensors", state)
            return outputs | {f"state.{name}": tensors[name].clone() for name in STATE if name in tensors}

        return script

    def expected(self, case: RouteCase, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        config, steps = config_of(case), case.steps.split("+")
        before: dict[int, RouterState] = {}
        leaves = {name: leaf(x) for name, x in problem.required.items()}
        right_script = self._script(config, steps, before.__setitem__)
        out = right_script(Implementation(moe_ref), problem.settings | leaves)
        asked = [name for name in problem.cotangents if out[name].requires_grad]
        inputs = [leaves[name] for name in problem.wanted]
        cotangents = [problem.cotangents[name].double() for name in asked]
        gradients = torch.autograd.grad([out[name] for name in asked], inputs, cotangents, allow_unused=True) if asked else (None,) * len(inputs)
        values = {f"d_{name}": torch.zeros_like(x) if g is None else g for name, x, g in zip(problem.wanted, inputs, gradients, strict=True)}
        right: dict[str, Expectation] = {}
        recorded, queue = torch.zeros(0), []
        for i, step in enumerate(steps):
            if step not in FORWARDS:
                continue
            if step == "forward":
                queue.append(recorded)
            replayed = recorded if step == "forward" else queue.pop(0) if step == "backward" else None
            one = _Step(case, config, problem, i, step, before[i], out, replayed, accumulator_of(declared, DTYPES[case.dtype]))
            if one.ambiguous:
                return {}
            recorded = one.chosen if step == "record" else recorded
            right |= one.expectations(values.get(f"d_logits.{i}"))
        for name in STATE:
            value = out[f"state.{name}"]
            close = Bounded(value.double(), value.double().abs() * 2.0**-22, torch.float32, torch.float32)
            right[f"state.{name}"] = close if value.is_floating_point() else Exact(value, "integers")
        return right

    def neighbour(self, case: RouteCase) -> RouteCase:
        other = "softmax_pre" if case.score != "softmax_pre" and not case.bias else "sigmoid"
        return replace(case, golden="", law="", seed=case.seed + 1, score=other, experts=case.experts * 2, groups=0, group_topk=0, rate=case.rate + 5)

    def simpler(self, case: RouteCase) -> Iterator[RouteCase]:
        steps = case.steps.split("+")
        for i in range(len(steps)):
            fewer = steps[:i] + steps[i + 1 :]
            if fewer and fewer[0] in FORWARDS and _replays_fit(fewer):
                yield replace(case, steps="+".join(fewer))
        for name in PLAIN:
            default: Any = RouteCase.__dataclass_fields__[name].default
            if getattr(case, name) != default:
                yield replace(case, **{name: default} | ({"pad": False, "policy": "probs"} if name == "capacity" else {}))
        for kind in filter(None, case.losses.split("+")):
            yield replace(case, losses="+".join(x for x in case.losses.split("+") if x != kind))
        if case.groups:
            yield replace(case, groups=0, group_topk=0)
        if case.sequences > 1:
            yield replace(case, sequences=1)
        yield from (replace(case, tokens=t) for t in sorted({1, 2, case.tokens // 2, case.tokens - 1}) if 0 < t < case.tokens and t % case.sequences == 0)
        if not case.groups:
            yield from (replace(case, experts=e) for e in sorted({case.topk + 1, case.experts // 2}) if case.topk < e < case.experts)
            yield from (replace(case, topk=k) for k in (1, 2) if k < case.topk and (k > 1 or case.score != "softmax"))


def _fields(losses: Any) -> dict[str, Any]:
    return dict(losses) if isinstance(losses, dict) else {name: getattr(losses, name, None) for name in LOSSES}


def _replays_fit(steps: list[str]) -> bool:
    """Whether each forward replay has something recorded, and each backward one something queued."""
    recorded = queued = 0
    for step in steps:
        recorded += step == "record"
        queued += (step == "forward") - (step == "backward")
        if queued < 0 or (step == "forward" and not recorded):
            return False
    return True


class _Step:
    """What is right of one forward, and how far off an honest result may be."""

    def __init__(
        self,
        case: RouteCase,
        config: MoEConfig,
        problem: Problem,
        index: int,
        step: str,
        state: RouterState,
        out: dict[str, Any],
        replayed: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self.case, self.config, self.index, self.step, self.state, self.out, self.dtype = case, config, index, step, state, out, dtype
        self.logits = problem.required[f"logits.{index}"]
        self.cotangent = problem.cotangents.get(f"{index}.probs")
        self.x = Running.of(self.logits, dtype)
        mask = problem.settings.get("padding_mask")
        self.valid = torch.ones(len(self.logits), dtype=torch.bool) if mask is None else ~mask
        self.learns = step not in ("eval", "nograd")
        settings = {name: value for name, value in config.router_settings.items() if value is not None}
        if config.moe_router_enable_expert_bias:
            settings["expert_bias"] = state.expert_bias
        self.settings = settings
        self.kept = out[f"{index}.routing_map"]
        self.chosen = topk_routing(self.logits.double(), **settings).routing_map if replayed is None else replayed
        self.p = weights(self.logits, self.chosen, settings, dtype)[1]
        self.ambiguous = (replayed is None and self._close_keys()) or self._close_drops()

    def _close_keys(self) -> bool:
        """Whether rounding could change the choice."""
        keys = keys_of(self.logits, self.settings, self.dtype)
        slack = 4 * float(keys.error.max()) if keys.error.numel() else 0.0
        value, topk = keys.value, self.config.moe_router_topk
        groups, kept = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if groups and kept:
            by_group = value.reshape(len(value), groups, -1)
            score = by_group.sort(dim=2, descending=True).values[..., : topk // kept].sum(2)
            if _close(score, kept, topk * slack):
                return True
            best = torch.zeros_like(score, dtype=torch.bool).scatter(1, score.topk(kept).indices, True)
            value = torch.where(best[..., None].expand_as(by_group).reshape(value.shape), value, -torch.inf)
        return _close(value, topk, slack)

    def _close_drops(self) -> bool:
        if self.config.moe_expert_capacity_factor is None or self.config.moe_token_drop_policy != "probs":
            return False
        how: dict[str, Any] = {"num_experts": self.case.experts, "topk": self.case.topk, "capacity_factor": self.config.moe_expert_capacity_factor}
        capacity = expert_capacity(len(self.logits), **how)
        slack = 4 * (float(self.p.error.max()) + float(self.p.value.max()) * float(torch.finfo(self.logits.dtype).eps)) if self.p.value.numel() else 0.0
        return _close(torch.where(self.chosen, self.p.value, -torch.inf).T, capacity, slack)

    def expectations(self, gradient_value: Tensor | None) -> dict[str, Expectation]:
        i = self.index
        right: dict[str, Expectation] = {f"{i}.routing_map": Exact(self.kept, "integers")}
        if self.config.moe_pad_expert_input_to_capacity:
            del right[f"{i}.routing_map"]  # any unrouted tokens may fill up
        stays = self.kept & self.chosen
        right[f"{i}.losses"] = Exact(self.out[f"{i}.losses"], "integers")  # which there are
        right[f"{i}.probs"] = self.p.masked(stays).bounded(self.logits.dtype, self.out[f"{i}.probs"].detach())
        slope = Running(torch.zeros_like(self.x.value), torch.zeros_like(self.x.value), self.dtype)
        if self.cotangent is not None:
            slope = gradient(self.logits, self.chosen, torch.where(stays, self.cotangent, 0), self.settings, self.dtype)
        apart = torch.zeros_like(slope.value)  # what autograd adds up is rounded to the logits' dtype before and after
        if self.learns:
            for name, (loss, by_logits) in self._losses().items():
                right[f"{i}.{name}"] = Running(loss.value.reshape(()), loss.error.reshape(()), self.dtype).bounded(torch.float32, self.out[f"{i}.{name}"])
                slope = slope + by_logits
                apart = apart + by_logits.value.abs() + slope.value.abs()
        if gradient_value is not None:
            bound = slope.bounded(self.logits.dtype, gradient_value)
            right[f"d_logits.{i}"] = replace(bound, bound=bound.bound + 2 * ROUNDOFF[self.logits.dtype] * apart)
        return right

    def _losses(self) -> dict[str, tuple[Running, Running]]:
        """Each loss, and its share of dlogits."""
        config, case = self.config, self.case
        factor = case.scale / 8 * (int(self.valid.sum()) * case.ranks if config.calculate_per_token_loss else 1)
        found: dict[str, tuple[Running, Running]] = {}
        if config.moe_z_loss_coeff:
            loss, slope = z_terms(self.x, self.valid, config.moe_z_loss_coeff / case.ranks)
            found["z_loss"] = loss, slope * float(factor)
        if not config.load_balancing:
            return found
        function = config.moe_router_score_function
        _, scores = aux_scores(self.x, function)
        aux_map = moe_ref.aux_loss_scores(self.logits.double(), topk=case.topk, score_function=function, padding_mask=~self.valid).routing_map.double()
        for name, coeff in config.load_balancing.items():
            # over so many ranks: counts are as many times higher, and so are tokens
            weight = self._column_weights(name, aux_map) * (coeff * case.experts / case.topk / case.ranks)
            exact = Running(weight, weight.abs() * 2.0**-22, self.dtype)  # counts are exact; four factors are not
            shared = (scores * exact).masked(self.valid[:, None])
            loss = shared.sum(1).sum(0)
            found[name] = loss, aux_gradient(self.x, exact * float(factor), function).masked(self.valid[:, None])
        return found

    def _column_weights(self, name: str, aux_map: Tensor) -> Tensor:
        """[T,E] count of each score's column over the tokens squared; see `moe_ref.router.route`."""
        case, tokens, valid = self.case, len(self.logits), float(self.valid.sum())
        if name == "seq_aux_loss":
            by_sequence = aux_map.reshape(tokens // case.sequences, case.sequences, case.experts)
            count = by_sequence.sum(0).expand(by_sequence.shape).reshape(aux_map.shape)
            length = (valid if case.padding else tokens) / case.sequences
            return count / max(length, 1e-300) ** 2 / case.sequences if length else count * 0
        count = aux_map.sum(0).expand(aux_map.shape)
        if name == "global_aux_loss":
            held = self.state.global_tokens_per_expert.double() / case.ranks + aux_map.sum(0)
            count = (held / float(self.state.global_steps + 1)).expand(aux_map.shape)
        length = valid if case.padding else tokens
        return count / length**2 if length else count * 0


def _close(values: Tensor, count: int, slack: float) -> bool:
    """Whether the last that is in and the first that is out are nearer than `slack`, in some row."""
    if not 0 < count < values.shape[1]:
        return False
    order = values.sort(dim=1, descending=True).values
    gap = order[:, count - 1] - order[:, count]
    return bool((gap[gap.isfinite()] <= slack).any())
