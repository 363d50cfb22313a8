"""Checks of Transformer Engine's compiled kernels on a GPU: what is wrong in the installed release.

python -m evidence.rediscovery.checks_gpu NAME
"""

from typing import Any

import torch

from evidence.rediscovery.checks import answer, judged
from evidence.rediscovery.checks_ranks import check

MANY = 2**31  # elements that a signed number of 32 bits cannot count


def alone() -> Any:
    """The installed Transformer Engine and nothing else."""
    from conformance.peers.transformer_engine import alone

    return alone


@check
def r03() -> str:
    """Scores of the balancing loss sum to 1 where one expert is chosen."""
    from conformance.families.router.cases import LogitsCase

    case = LogitsCase(function="aux_loss_scores", tokens=1, experts=4, topk=1, score="sigmoid", logits=(16, -8, 4, 0))
    return judged(alone(), case, "cuda")


@check
def r04() -> str:
    """The router's backward with 2048 experts."""
    from conformance.families.router.cases import LogitsCase

    case = LogitsCase(function="topk_routing", tokens=2, experts=2048, topk=2, score="sigmoid", grads="logits")
    return judged(alone(), case, "cuda")


@check
def d01() -> str:
    """An expert's rows of more than 2^31 elements, padded: each row stays, and the others are 0."""
    from transformer_engine.pytorch import Fp8Padding

    columns = 2**16
    used = MANY // columns + 65
    small = torch.arange(columns, dtype=torch.int16, device="cuda") % 127
    rows = torch.empty((used, columns), dtype=torch.bfloat16, device="cuda")
    for first in range(0, used, 1024):
        number = torch.arange(first, min(first + 1024, used), dtype=torch.int16, device="cuda") % 127
        rows[first : first + 1024] = number[:, None] + small
    try:
        padded, _ = Fp8Padding(1, align_size=128)(rows, [used])
        wrong_rows = (padded[:used] != rows).any(1).nonzero().flatten().tolist()
        is_zero_padded = not padded[used:].any()
    except RuntimeError as error:
        return f"padding {used} rows of {columns} columns raises: {str(error).splitlines()[0]}"
    if wrong_rows:
        return f"of {used} rows of {columns} columns {len(wrong_rows)} are others', the first is {wrong_rows[0]}"
    return "" if is_zero_padded else "rows of padding are not 0"


@check
def q04() -> str:
    """Half of a tensor in MXFP8 has half of its codes; bytes need no matrix units."""
    from transformer_engine.common.recipe import MXFP8BlockScaling
    from transformer_engine.pytorch import MXFP8Quantizer
    from transformer_engine.pytorch.fp8 import get_fp8_te_dtype

    quantizer = MXFP8Quantizer(get_fp8_te_dtype(MXFP8BlockScaling()))
    quantized = quantizer.make_empty((256, 64), dtype=torch.bfloat16, device="cuda")
    quantized._rowwise_data.copy_(torch.arange(256, dtype=torch.uint8, device="cuda")[:, None].expand(-1, 64))
    try:
        codes = [half._rowwise_data for half in quantized.split(128)]
    except Exception as error:
        return f"split raises {type(error).__name__}: {str(error).splitlines()[0]}"
    return "" if torch.equal(torch.cat(codes), quantized._rowwise_data) else "the halves have others' codes"


@check
def n01() -> str:
    """Weights in FP8 are kept for the second microbatch in a CUDA graph as without one."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    class Flat(torch.nn.Module):
        """A grouped layer whose rows are shared out evenly."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = te.GroupedLinear(2, 64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")

        def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
            """Two experts, 32 rows each."""
            out: torch.Tensor = self.layer(x, [32, 32], **options)
            return out

    recipe, outputs = DelayedScaling(), []
    x = torch.linspace(-1, 1, 64 * 64, device="cuda", dtype=torch.bfloat16).view(64, 64)
    weight = torch.linspace(-2, 2, 64 * 64, device="cuda", dtype=torch.bfloat16).view(64, 64)
    for graphed in (False, True):
        module: Any = Flat()
        weights = list(module.parameters())
        with torch.no_grad():
            for parameter in weights:
                parameter.copy_(weight)
        if graphed:
            sample = x.clone().requires_grad_()
            module = te.make_graphed_callables(
                module, (sample,), num_warmup_iters=3, enabled=True, recipe=recipe, cache_quantized_params=True
            )
        for first in (True, False):
            with te.autocast(enabled=True, recipe=recipe):  # once for each microbatch
                out = module(x.clone().requires_grad_(), is_first_microbatch=first)
            with torch.no_grad():
                for parameter in weights:
                    parameter.neg_()  # what is kept does not change
        outputs.append(out.detach().clone())
    if torch.equal(*outputs):
        return ""
    without_graph, with_graph = (float(out[0, 0]) for out in outputs)
    return f"the second microbatch gives {with_graph:.4g} in a graph, {without_graph:.4g} without one"


@check
def k03() -> str:
    """One step of FusedAdam over more than 2^31 elements: with a gradient of 1 each becomes -lr."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.zeros(MANY + 64, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    try:
        FusedAdam([weight], lr=0.5).step()
        num_wrong = int((weight.detach() != -0.5).sum())
    except RuntimeError as error:
        return f"a step of {weight.numel()} elements raises: {str(error).splitlines()[0]}"
    return f"after a step {num_wrong} of {weight.numel()} elements are not -0.5" if num_wrong else ""


@check
def k01() -> str:
    """A group without parameters counts the step, as the others do."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    weight = torch.nn.Parameter(torch.zeros(16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam([{"params": [weight]}, {"params": []}], lr=0.5)
    optimizer.step()
    steps = [group.get("step", 0) for group in optimizer.param_groups]
    return "" if steps[0] == steps[1] else f"after one step the groups count {steps[0]} and {steps[1]}"


if __name__ == "__main__":
    answer()
