"""Cases of route: a router, its steps, and the ranks that share its tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.core.axes import Changes, Size, Words, choice, declared, dtypes, flag, number, shorter, words
from conformance.core.case import Case
from conformance.core.shared_out import counts
from conformance.core.signature import FAR
from conformance.core.tensors import DTYPES, SHARED, hashed
from conformance.families.router.cases import SCORES, Scores, experts, groups, slots
from moe_ref.config import RouterConfig

EVALUATED = "eval_"  # steps before a replay: in an evaluation, as where a policy plays
STEPS = (
    *("train", "eval", "nograd", "record", "forward", "backward", "finish", "frozen", "reload", "narrow"),
    *("eval_record", "eval_forward", "eval_backward"),
)
FORWARDS = (*STEPS[:6], *STEPS[10:])  # steps that take logits
COVERED_STEPS = (
    "train",
    "train+train+finish+train",
    "train+reload+train+finish+narrow+train+finish",
    "train+eval+nograd+train+finish+train",
    "train+frozen+train+finish+train+finish+train",
    "record+forward+forward+backward+backward+train",
)
REPLAYS = (*STEPS[3:6], *STEPS[10:])
LOSSES = ("z_loss", "aux_loss", "seq_aux_loss", "global_aux_loss")
KINDS = ("aux", "seq", "global", "z")  # of losses, in a case


@dataclass(kw_only=True)
class Steps(Words):
    """Steps in a legal order."""

    def fits(self, case: Any) -> str | None:
        """The first step is a forward.

        `forward` comes only after a record, and `backward` only with a queued replay.
        """
        steps = getattr(case, self.name).split("+")
        if steps[0] not in FORWARDS:
            return f"{self.name} must begin with one of {', '.join(FORWARDS)}"
        recorded = queued = 0
        for step in (step.removeprefix(EVALUATED) for step in steps):
            recorded += step == "record"
            queued += (step == "forward") - (step == "backward")
            if queued < 0 or (step == "forward" and not recorded):
                return f"{self.name} has nothing for a {step} replay"
        return None


@dataclass(kw_only=True)
class Sharing(Size):
    """Sequences, or ranks per sequence.

    A second call has as many, because they divide the counts.
    """

    def other(self, case: Any) -> Changes:
        return {}


@dataclass(kw_only=True)
class Tokens(Size):
    """Tokens of a batch; at least one in one process."""

    def smaller(self, case: Any) -> Iterator[Changes]:
        yield from ({self.name: n} for n in shorter(getattr(case, self.name), 0 if case.counts else 1))


@dataclass(frozen=True, kw_only=True)
class RouteCase(Case):
    """A router and its steps."""

    steps: str = declared(Steps(default="train", known=STEPS, of=COVERED_STEPS))
    tokens: int = declared(Tokens(default=2, letter="T"))  # per step; a multiple of sequences
    sequences: int = declared(Sharing(default=1, at_least=1, divides="tokens", pairs=(1, 2), argument="batch_size"))
    experts: int = experts(default=2, doubles=True)
    topk: int = slots(spare=1)
    dtype: str = dtypes("float32", "bfloat16", also=("float64",))
    score: str = declared(Scores(default="sigmoid", values=("sigmoid", *SCORES[:2], SCORES[3])))
    groups: int = groups()
    group_topk: int = number(0)
    scaling: int = number(0, 20)  # in eighths
    bias: bool = flag()  # whether the expert bias is on
    # choose by a balanced plan: then score, groups and scaling have no effect
    sinkhorn: bool = choice(False, also=(True,))
    rate: int = number(16, *range(1, 41), data=True)  # bias update rate in 1024ths
    losses: str = words("", *KINDS, repeat=False, of=("", *KINDS, "+".join(KINDS)))
    coeff: int = number(4, *range(1, 21), data=True)  # of each loss, in eighths
    divisor: int = number(1, 2, 3, 4, pairs=(3,), data=True)  # loss_divisor
    capacity: int = number(0, *range(1, 9), given=True)  # capacity factor in quarters; 0: none
    pad: bool = flag()
    policy: str = choice("probs", "position")
    padding: int = number(0, 2, 5, pairs=(3,), of=("padding_mask",), given=True)  # per 8 tokens
    per_token: bool = flag()  # calculate_per_token_loss
    scale: int = number(8, *range(1, 33), data=True)  # loss scale in eighths
    counts: tuple[int, ...] = counts()  # tokens per real rank; empty: one process
    # ranks per sequence; without counts all ranks have the same tokens, so a sum is one rank's
    # value × ranks
    ranks: int = declared(Sharing(default=1, at_least=1, pairs=(1, 2), argument="ranks"))

    @property
    def sized(self) -> bool:
        """Whether the host knows all sizes.

        The number of rounds of a plan depends on the logits.
        """
        return not self.sinkhorn

    def clash(self) -> str | None:
        if self.layout in (*SHARED, *FAR) or (self.counts and self.layout != "contiguous"):
            return f"layout is {self.layout!r}; the logits of all steps are near, and of ranks contiguous"
        if not self.tokens and not self.counts:
            return "one process needs tokens"
        if self.score.startswith("softmax") and (self.bias or (self.topk == 1 and self.score == "softmax")):
            return "softmax excludes an expert bias; over one chosen expert it is constant"
        if self.sinkhorn and (self.capacity or {*self.losses.split("+")} - {"", "z"}):
            return "sinkhorn excludes a capacity and the balancing losses"
        if self.sinkhorn and any(step in REPLAYS for step in self.steps.split("+")):
            return "sinkhorn has no indices to replay"
        if self.capacity and self.dtype != "float32":
            return "a capacity needs float32: other dtypes have too many equal keys"
        if self.divisor > 1 and not self.losses:
            return "a divisor needs losses"
        if (self.pad or self.policy != "probs") and not self.capacity:
            return "pad and policy need a capacity"
        if self.counts and (len(self.counts) % self.ranks or any(count % self.sequences for count in self.counts)):
            return f"counts is {self.counts}: sequences must divide each count, and ranks their number"
        return None

    def arguments(self) -> tuple[str, ...]:
        replay = any(step in REPLAYS for step in self.steps.split("+"))
        uneven = len(set(self.counts)) > 1
        needed = {"replay": replay, "padding_mask": uneven, "ranks": bool(self.counts)}
        return tuple(name for name, need in needed.items() if need)

    @property
    def one_sum(self) -> bool:
        """Whether the ranks' results add up to one process's, that is, do not depend on the tokens
        per rank.
        """
        # the z-loss is a mean over a rank's tokens
        means = "z" in self.losses.split("+") and (self.padding or len(set(self.counts)) > 1)
        return self.ranks == len(self.counts) and not self.capacity and not self.sinkhorn and not means


def config_of(case: RouteCase) -> RouterConfig:
    """The case's router configuration."""
    coeffs = dict.fromkeys(case.losses.split("+"), case.coeff / 8)
    return RouterConfig(
        num_experts=case.experts,
        topk=case.topk,
        score_function="softmax" if case.score.startswith("softmax") else case.score,
        pre_softmax=case.score == "softmax_pre",
        num_groups=case.groups or None,
        group_topk=case.group_topk or None,
        scaling_factor=case.scaling / 8 or None,
        expert_bias=case.bias,
        bias_update_rate=case.rate / 1024,
        sinkhorn=case.sinkhorn,
        capacity_factor=case.capacity / 4 or None,
        drop_policy=case.policy,
        pad_to_capacity=case.pad,
        aux_loss_coeff=coeffs.get("aux", 0.0),
        seq_aux_loss_coeff=coeffs.get("seq", 0.0),
        global_aux_loss_coeff=coeffs.get("global", 0.0),
        z_loss_coeff=coeffs.get("z", 0.0),
        loss_per_token=case.per_token,
        loss_divisor=case.divisor,
    )


def logits_of_step(case: RouteCase, step: int) -> Tensor:
    """The logits [T,E], with gaps that exceed rounding errors: scaled ranks of experts, plus noise
    except in bfloat16.
    """
    noise = hashed(case.seed, f"logits {step}", case.tokens * case.experts).reshape(case.tokens, case.experts)
    rank = noise.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    fine = (noise % 64) / 1024 if case.dtype != "bfloat16" else 0
    return torch.from_numpy((rank - case.experts // 2) * min(0.5, 8 / case.experts) + fine).to(DTYPES[case.dtype])


def mask_of_step(padding_mask: Tensor, step: int) -> Tensor:
    """The mask [T], rotated by the number of the step.

    In odd steps the first token is no padding.
    """
    turned = padding_mask.roll(step)
    return turned & (torch.arange(len(turned), device=turned.device) >= step % 2) if step else padding_mask
