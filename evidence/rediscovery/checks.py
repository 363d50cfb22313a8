"""One check per defect: what is wrong in the installed release, or "".

python -m evidence.rediscovery.checks NAME
"""

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import moe_ref
from evidence.rediscovery.checks_ranks import CHECKS, check


def judged(namespace: Any, case: Any, device: str = "cpu") -> str:
    """The contract's finding on one case.

    Raises:
        RuntimeError: the case was not judged.
    """
    from conformance.engine.child.evaluate import evaluate
    from conformance.interface import Implementation

    outcome = evaluate(case, Implementation(namespace), device)
    if outcome.status == "PASS":
        return ""
    if outcome.status != "FAIL":
        raise RuntimeError(f"{case.function} is {outcome.status}: {outcome.reason}")
    finding = outcome.finding or {}
    return f"{case.function}: {finding.get('output')} {finding.get('message')} ({case.text})"


def releases() -> Any:
    """The adapter of megatron-core's releases."""
    from evidence.rediscovery import releases

    return releases


def router(**options: Any) -> Any:
    """A `TopKRouter` of the release on a CPU, layer 1 of 1."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import distributed

    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    settings = {
        "num_layers": 1, "hidden_size": 4, "num_attention_heads": 1, "num_moe_experts": 4, "moe_router_topk": 2,
        "use_cpu_initialization": True, "add_bias_linear": False, "perform_initialization": False,
        "moe_token_dispatcher_type": "alltoall", **options,
    }  # fmt: skip
    with on_a_cpu():
        router_of_release = TopKRouter(config=TransformerConfig(**settings))
    router_of_release.set_layer_number(1)
    return router_of_release


def on_a_cpu() -> ExitStack:
    """The CPU for the current CUDA device."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
    stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda x, *_, **__: x))
    return stack


def tracked() -> float:
    """The balancing loss in the release's tracker, over its coefficient."""
    try:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker as tracker
    except ImportError:
        from megatron.core.parallel_state import get_moe_layer_wise_logging_tracker as tracker
    return float(tracker()["load_balancing_loss"]["values"][0])


LOGITS = torch.tensor([[2.0, -1, 0.5, 0], [-3, 1, 0, 4], [0.25, 0, 2, -2]])


def loss_of(score: str) -> float:
    """The reference's loss of LOGITS, over its coefficient."""
    scored = moe_ref.aux_loss_scores(LOGITS, topk=2, score_function=score)
    counts = scored.routing_map.sum(0)
    return float(
        moe_ref.load_balancing_loss(scored.scores, counts, total_num_tokens=3, topk=2, num_experts=4, coeff=1.0)
    )


def compared(what: str, got: float, expected: float) -> str:
    """A float32 number and the reference's."""
    return (
        "" if abs(got - expected) <= 1e-5 * abs(expected) else f"{what} is {got:.6g}; the reference has {expected:.6g}"
    )


@check
def r05() -> str:
    """Groups are ranked by as many experts as each contributes."""
    from conformance.families.router.cases import LogitsCase

    logits = (72, 8, 0, 0, 40, 36, 35, 34)  # eighths
    case = LogitsCase(function="topk_routing", tokens=1, experts=8, topk=4, groups=2, group_topk=1, logits=logits)
    return judged(releases(), case)


@check
def r10() -> str:
    """Jitter keeps the dtype."""
    from conformance.families.router.cases import GateCase

    return judged(releases(), GateCase(function="jitter", tokens=2, hidden=3, dtype="bfloat16"))


@check
def r09() -> str:
    """Scores of bfloat16 logits are float32."""
    from conformance.families.router.cases import LogitsCase

    return judged(
        releases(), LogitsCase(function="aux_loss_scores", tokens=1, experts=2, dtype="bfloat16", score="sigmoid")
    )


@check
def d05() -> str:
    """A multiple that cannot be reached is reported: 90 of 100 tokens, multiples of 128."""
    routing_map = (torch.arange(100) < 90)[:, None]
    count = int(releases().pad_routing_map(routing_map, align=128).routing_map.sum())
    if count % 128 == 0:
        return ""
    expected = moe_ref.pad_routing_map(routing_map, align=128).unreached.tolist()
    return f"{count} tokens, no multiple of 128, and no report; the reference has unreached={expected}"


@check
def a09() -> str:
    """The loss of sigmoid scores is made of sigmoid scores."""
    sigmoid_router = router(
        moe_router_score_function="sigmoid", moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0
    ).train()
    with on_a_cpu():
        sigmoid_router.routing(LOGITS.clone().requires_grad_()[:, None])
    return compared("the tracked loss", tracked(), loss_of("sigmoid"))


@check
def a10() -> str:
    """A forward that is run again for its gradient is recorded once."""
    recomputing_router = router(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0).train()
    with on_a_cpu():
        with torch.no_grad():
            recomputing_router.routing(LOGITS[:, None])
        recomputing_router.routing(LOGITS.clone().requires_grad_()[:, None])
    return compared("the tracked loss of a recomputed forward", tracked(), loss_of("softmax"))


@check
def r08() -> str:
    """The expert bias is float32 in a module of bfloat16, once it has run."""
    biased_router = router(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
                  moe_router_load_balancing_type="none")  # fmt: skip
    biased_router = biased_router.bfloat16()
    with on_a_cpu():
        biased_router(torch.zeros(2, 1, 4, dtype=torch.bfloat16))
    kind = biased_router.expert_bias.dtype
    if kind == torch.float32:
        return ""
    bias, counts = torch.tensor([0.5, 0.5], dtype=kind), torch.tensor([0, 8])
    new_bias = bias + (counts.float().mean() - counts).sign() * 1e-3
    return f"the bias is {kind}: after a step of 0.001 a bias of 0.5 is {float(new_bias.to(kind)[0])}"


@check
def l05() -> str:
    """Upcycling with two chunks gives the dense chunk for the dense chunk."""
    from megatron.core.transformer.moe import upcycling_utils

    dense, sparse = [SimpleNamespace(name="dense", state_dict=dict)] * 2, [SimpleNamespace(name="moe")] * 2
    calls: list[Any] = []
    with mock.patch.object(upcycling_utils, "_convert_to_moe_state_dict", lambda *arguments: calls.append(arguments)):
        upcycling_utils.upcycle_state_dict(sparse, dense)
    message = "with two chunks the converter is given (dense's state, MoE model), not (MoE model, dense model)"
    return "" if calls[0][0] is sparse[0] else message


def transformer_engine() -> Any:
    """Transformer Engine's own permutation kernels, in Triton's interpreter."""
    from examples.te_kernels_on_a_cpu import alone

    return alone


@check
def p01() -> str:
    """Rows of the input whose addresses pass 2^31 elements."""
    from conformance.families.permutation.cases import RoutingCase

    fields: dict[str, Any] = {"tokens": 3, "experts": 3, "hidden": 3, "routing": (5, 2, 7)}
    case = RoutingCase(function="permute", layout="wide_rows", layout_of="tokens", **fields)
    return judged(transformer_engine(), case)


@check
def p04() -> str:
    """Routed tokens of probability 0, in memory that is poisoned."""
    return _zero_probs(grads="")


@check
def p13() -> str:
    """The gradient of a probability that is 0."""
    return _zero_probs(grads="probs")


def _zero_probs(grads: str) -> str:
    from conformance.families.permutation.cases import RoutingCase

    fields: dict[str, Any] = {
        "tokens": 3,
        "experts": 2,
        "hidden": 4,
        "probs": "float32",
        "zero_probs": True,
        "grads": grads,
    }
    return judged(transformer_engine(), RoutingCase(function="permute", **fields))


@check
def p12() -> str:
    """Bringing back no rows to tokens that exist."""
    from conformance.families.permutation.cases import RoutingCase

    return judged(transformer_engine(), RoutingCase(function="unpermute", tokens=2, hidden=4, routing=(0, 0)))


def answer() -> None:
    """Run the check that the command line names, and end the process: some releases leave threads
    and process groups behind.
    """
    warnings.simplefilter("ignore")
    finding = CHECKS[sys.argv[1]]()
    print("\nFOUND " + " ".join(finding.split()), flush=True)
    os._exit(0)


@check
def p06() -> str:
    """Without a number of rows `moe_permute` makes those routed, or an error names the argument."""
    from examples.te_kernels_on_a_cpu import te

    try:
        rows = te.pytorch.moe_permute(torch.ones(2, 4), torch.ones(2, 1, dtype=torch.int32))[0]
    except Exception as error:
        message = str(error).splitlines()[0]
        return "" if "num_out_tokens" in message else f"a call without num_out_tokens raises: {message}"
    return "" if len(rows) == 2 else f"a call without num_out_tokens makes {len(rows)} rows of 2"


@check
def d02() -> str:
    """A padding module aligns by the recipe in force when it runs, not when it was made."""
    in_force = [SimpleNamespace(mxfp8=lambda: False)]
    module = padding_module(lambda: in_force[-1])(1)
    in_force.append(SimpleNamespace(mxfp8=lambda: True))
    _, (padded,) = module(torch.zeros(5, 4), [5])
    return "" if padded == 32 else f"5 rows are padded to {padded} under MXFP8, which needs a multiple of 32"


def padding_module(recipe: Callable[[], Any]) -> Any:
    """`Fp8Padding` of the release, without its kernel; `recipe` gives the one in force."""
    package = "transformer_engine.pytorch"
    stubs: dict[str, dict[str, Any]] = {
        "transformer_engine_torch": {"fused_multi_row_padding": lambda *_: None},
        f"{package}.fp8": {"FP8GlobalStateManager": SimpleNamespace(get_fp8_recipe=recipe)},
        f"{package}.jit": {"no_torch_dynamo": lambda: lambda function: function},
        **{name: {"__path__": []} for name in ("transformer_engine", package, f"{package}.module")},
    }
    for name, content in stubs.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    file = Path(os.environ["TE_WHEEL"], *package.split("."), "module", "fp8_padding.py")
    spec = spec_from_file_location(f"{package}.module.fp8_padding", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Fp8Padding


if __name__ == "__main__":
    answer()
