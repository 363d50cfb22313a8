"""Functions by kind, and cases drawn of them once."""

import functools

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.covering import Covered
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases, drawn, strategy

FUNCTIONS = tuple(CONTRACTS)
OF_EACH_FAMILY = tuple({type(contract).__module__.split(".")[2]: name for name, contract in CONTRACTS.items()}.values())
WIDE = ("wide_rows", "wide_columns")
FAR = (*WIDE, "wide_depth")
BATCH = 50
DRAWS = {  # what is promised of these is rare; of others 200 reach it
    **dict.fromkeys(("unpermute", "activation_and_quantize", "glu_backward_and_quantize", "glu"), 300),
    **dict.fromkeys(("grouped_dgrad", "shared_experts", "hybridep_dispatch", "moe_layer"), 300),
    **dict.fromkeys(("topk_indices", "topk_routing", "load_balancing_loss", "permute"), 400),
    **dict.fromkeys(("aux_loss_scores", "route", "sort_chunks", "deepep_low_latency_dispatch"), 500),
    **dict.fromkeys(("quantize", "permute_and_quantize"), 1200),
}
CHOOSE = ("topk_indices", "topk_routing")
BACK_AND_QUANTIZED = ("glu_backward_and_quantize", "activation_backward_and_quantize")
ACTIVATED_AND_QUANTIZED = ("glu_and_quantize", "activation_and_quantize", *BACK_AND_QUANTIZED)
MLPS = ("grouped_mlp", "sequential_mlp")
PARAMETERS = (
    *("normalize_parameters", "normalize_master_parameters", "convert_experts", "shard_parameters", "expand_shard"),
    *("split_extra_state", "merge_extra_state", "upcycle"),
)
STEPPED = ("route", "moe_layer")  # made of the other functions: their inputs never lie far
NEAR = (*STEPPED, *PARAMETERS)  # nor do parameters, of which the results are views


@functools.cache
def draws(function: str, batch: int = 0) -> list[Case]:
    """A batch of cases, each drawn from a seed of its own."""
    return drawn(strategy(function, Space()), batch, BATCH)


def most_draws(function: str) -> int:
    """The draws within which all that is promised must be reached."""
    return DRAWS.get(function, 200)


@functools.cache
def covered(function: str) -> Covered:
    return covering_cases(function, Space())
