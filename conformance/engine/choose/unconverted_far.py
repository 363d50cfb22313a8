"""Cases whose addresses pass 2³¹ elements: every input and cotangent once with far rows and once
with far columns.

The far tensors are strided views of a few rows whose storage is almost all unmapped, so they cost
no memory on a CPU. Outputs are allocated by the implementation and cannot be made far without the
memory; on a GPU one case has it.
"""

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.space import far_dispatch
from conformance.families.experts.axes_mlp import AXES as AXES_MLP
from conformance.families.experts.space_mlp import far_mlp
from conformance.families.fused.space import far_permuted_quantization
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import far_quantized_activations


def far_cases(function: str, space: Space) -> list[Case]:
    """All far cases of a function that the implementation can be asked for."""
    if function in space.contiguous_only:
        return []
    if function in ACTIVATED_AND_QUANTIZED:
        return far_quantized_activations(function, space)
    if function in AXES_MLP:
        return far_mlp(function, space)
    if function in COLLECTIVES:
        return far_dispatch(function, space)
    if function == "permute_and_quantize":
        return far_permuted_quantization(space)
    return []
