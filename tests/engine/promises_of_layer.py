"""What the draws of moe_layer must reach."""

from conformance.families.router.cases_route import LOSSES
from moe_ref.config import DISPATCHERS
from tests.engine.promises import each

LAYER = {
    "several sequences": lambda c: c.sequences > 1,
    "all losses at once": lambda c: len(c.losses.split("+")) == len(LOSSES),
    "a capacity": lambda c: c.capacity > 0,
    "one group kept": lambda c: c.group_topk == 1,
    "several groups kept": lambda c: c.group_topk > 1,
    "one expert": lambda c: c.experts == 1,
    "all experts for every token": lambda c: c.topk == c.experts > 1,
    "experts over ranks": lambda c: len(c.counts) > 1,
    "a rank without tokens": lambda c: 0 in c.counts and any(c.counts),
    "a latent width": lambda c: c.latent > 0,
    "a latent width over ranks": lambda c: c.latent > 0 and len(c.counts) > 1,
    "shared experts over ranks": lambda c: c.shared > 0 and len(c.counts) > 1,
    "a recipe over ranks": lambda c: c.recipe and len(c.counts) > 1,
    "a global loss over ranks": lambda c: "global" in c.losses and len(c.counts) > 1,
    "a capacity over ranks": lambda c: c.capacity and len(c.counts) > 1,
    "a budget of rows over ranks": lambda c: c.budget and len(c.counts) > 1,
    "a budget of deepep over ranks": lambda c: c.budget and len(c.counts) > 1 and c.dispatcher == "deepep",
    "a layer that runs again": lambda c: c.rerun and len(c.counts) > 1,
    "experts in shards": lambda c: c.shards > 1,
    "a router wider than the tokens": lambda c: c.dtype == "bfloat16" and c.router_dtype == "fp32",
    "no shared experts": lambda c: not c.shared,
    "both biases over ranks": lambda c: c.fc1_bias and c.fc2_bias and len(c.counts) > 1,
    "jitter over ranks": lambda c: c.jitter and len(c.counts) > 1,
    "padding": lambda c: c.padding > 0,
    "padding over ranks": lambda c: c.padding > 0 and len(c.counts) > 1,
}
LAYER |= {f"{name} over ranks": lambda c, name=name: len(c.counts) > 1 and c.dispatcher == name for name in DISPATCHERS}
LAYER |= each("evaluation", True) | each("recipe", "mxfp8")
