"""Values of every kind can be made without rows, because some drawn cases have no tokens."""

import pytest

from conformance.catalogue import CONTRACTS
from conformance.families.quantization.cases import MORE_VALUES, VALUES


@pytest.mark.parametrize("values", [*VALUES, *MORE_VALUES])
@pytest.mark.parametrize("function", ["quantize", "permute_and_quantize"])
def test_a_tensor_without_rows_has_values_of_every_kind(function, values):
    case = CONTRACTS[function].case_type(function=function, tokens=0, scaling="block", values=values)
    problem = CONTRACTS[function].problem(case)
    tensors = [x for x in problem.tensors.values() if x.dim() == 2]
    assert tensors and all(x.numel() == 0 for x in tensors)
