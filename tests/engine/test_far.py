"""Far cases lie far in each dimension; worlds with less room have all kinds of cases."""

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.quantization.cases import QuantizeCase
from tests.engine.drawn_cases import ACTIVATED_AND_QUANTIZED, BACK_AND_QUANTIZED, FAR, FUNCTIONS, NEAR, covered

# ---- far cases

FULLEST = {  # the cases of other functions have no further inputs
    "quantize": QuantizeCase(
        function="quantize", scaling="nvfp4", role="grad_output", tokens=2, experts=2, hidden=1, grads="x"
    ),
    "permute_and_quantize": PermutedQuantizationCase(
        function="permute_and_quantize", scaling="delayed", tokens=3, experts=3, hidden=3, probs="float32",
        grads="tokens+probs",
    ),
}  # fmt: skip
for name in ACTIVATED_AND_QUANTIZED:
    grads = "" if name in BACK_AND_QUANTIZED else "h+probs"
    FULLEST[name] = QuantizedActivationCase(function=name, tokens=3, experts=2, width=3, probs="float32", grads=grads)


def dimensions(function: str) -> dict[str, int]:
    """The number of dimensions of each input and cotangent."""
    cases = [FULLEST[function]] if function in FULLEST else covered(function).cases
    problems = [CONTRACTS[function].problem(case) for case in cases]
    inputs = {name: x.dim() for problem in problems for name, x in problem.tensors.items()}
    return inputs | {f"d_{name}": x.dim() for problem in problems for name, x in problem.cotangents.items()}


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name not in NEAR])
def test_every_input_and_cotangent_lies_far_in_each_of_its_dimensions(function):
    first = {"gate_weight": 1}  # it has one row
    far = {name: FAR[first.get(name, 0) : count] for name, count in dimensions(function).items()}
    wanted = {(name, layout) for name, layouts in far.items() for layout in layouts}
    assert {(case.layout_of, case.layout) for case in scope_of(function, Space()).far()} == wanted


def test_only_what_is_made_of_others_has_no_far_cases():
    assert set(NEAR) == {name for name in FUNCTIONS if not scope_of(name, Space()).far()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_lies_far_is_there(function):
    for case in scope_of(function, Space()).far():
        problem = CONTRACTS[function].problem(case)
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        dim = FAR.index(case.layout) if masters[case.layout_of].dim() > 1 else 0
        assert masters[case.layout_of].shape[dim] > 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("function", [*COLLECTIVES, "route", "shared_experts"])
def test_a_world_with_less_room_has_all_kinds_of_cases_and_none_of_more_ranks(function, ranks, device):
    space = Space(device=device, ranks=ranks)
    scope, random = scope_of(function, space), drawn(strategy(function, space), 3, 6)
    cases = [*fixed_cases(function, space), *scope.always(), *scope.far(), *random]
    asked = [ranks_of(CONTRACTS[function], case) for case in cases if not case.golden and not case.illegal]
    assert asked
    assert max(asked) <= ranks
