"""A case of route: a router, what happens to it step by step, and over which ranks its tokens are shared out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.shared_out import check_counts
from conformance.core.tensors import DTYPES, hashed
from moe_ref.config import RouterConfig

STEPS = ("train", "eval", "nograd", "record", "forward", "backward", "finish", "frozen", "reload")
FORWARDS = STEPS[:6]  # those that take logits
LOSSES = ("z_loss", "aux_loss", "seq_aux_loss", "global_aux_loss")


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
    ranks: int = 1  # that share a sequence; without counts all with the same tokens: a sum over them is so many times this rank's
    counts: tuple[int, ...] = ()  # tokens of each of several real ranks; empty: one process
    grads: str = ""

    def __post_init__(self) -> None:
        unknown = [step for step in self.steps.split("+") if step not in STEPS]
        if unknown or self.steps.split("+")[0] not in FORWARDS:
            raise ValueError(
                f"steps is {self.steps!r}; it must be some of {', '.join(STEPS)}, joined by +, and begin with a forward"
            )
        if self.tokens % self.sequences:
            raise ValueError(f"tokens {self.tokens} is no multiple of sequences {self.sequences}")
        check_counts(self.counts, self.tokens)
        if self.counts and (len(self.counts) % self.ranks or any(count % self.sequences for count in self.counts)):
            raise ValueError(
                f"counts is {self.counts}; it must have multiples of sequences, {self.sequences}, and so many that ranks, {self.ranks}, divide them"
            )


RouteCase.serves("route")


def config_of(case: RouteCase) -> RouterConfig:
    """The configuration that the case describes."""
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
        capacity_factor=case.capacity / 4 or None,
        drop_policy=case.policy,
        pad_to_capacity=case.pad,
        aux_loss_coeff=coeffs.get("aux", 0.0),
        seq_aux_loss_coeff=coeffs.get("seq", 0.0),
        global_aux_loss_coeff=coeffs.get("global", 0.0),
        z_loss_coeff=coeffs.get("z", 0.0),
        loss_per_token=case.per_token,
    )


def logits_of_step(case: RouteCase, step: int) -> Tensor:
    """[T,E] logits whose gaps no rounding closes: the ranks of the experts, and a little more in float32."""
    noise = hashed(case.seed, f"logits {step}", case.tokens * case.experts).reshape(case.tokens, case.experts)
    rank = noise.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    fine = (noise % 64) / 1024 if case.dtype == "float32" else 0
    return torch.from_numpy((rank - case.experts // 2) * min(0.5, 8 / case.experts) + fine).to(DTYPES[case.dtype])
