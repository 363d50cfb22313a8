"""Cases whose addresses pass 2³¹ elements: every input and cotangent once with far rows and once
with far columns.

The far tensors are strided views of a few rows whose storage is almost all unmapped, so they cost
no memory on a CPU. Outputs are allocated by the implementation and cannot be made far without the
memory; on a GPU one case has it.
"""

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.experts.axes_mlp import AXES as AXES_MLP
from conformance.families.experts.space import INPUTS as EXPERT_INPUTS
from conformance.families.experts.space import far_experts
from conformance.families.experts.space_mlp import far_mlp


def far_cases(function: str, space: Space) -> list[Case]:
    """All far cases of a function that the implementation can be asked for."""
    if function in space.contiguous_only:
        return []
    if function in AXES_MLP:
        return far_mlp(function, space)
    if function in EXPERT_INPUTS:
        return far_experts(function, space)
    return []
