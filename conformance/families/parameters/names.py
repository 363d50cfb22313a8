"""normalize_parameters, normalize_master_parameters and convert_experts."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from conformance.core.case import Case
from conformance.core.contract import Contract, Problem
from conformance.core.law import upside_down
from conformance.core.signature import Input, Output, Signature
from conformance.families.parameters.cases import PREFIX, ConvertCase, MasterCase, StateCase, stacked
from conformance.families.parameters.states import (
    Build,
    Given,
    entries,
    expected_of,
    key_explained,
    spelled,
    state_call,
)
from conformance.judge import Expectation
from moe_ref.parameters import names as reference

OUTPUTS = (Output("keys"), Output("state"), Output("given"))
MASTER = "linear_fc1.weight"  # the parameter of MasterCase
# of its keys; the first has a name of the parameter inside
STEMS = (f"a.{MASTER}1.experts.", "", "b.experts.", "a.experts.shared_")
LINEARS = {"fc1": "linear_fc1", "fc2": "linear_fc2"}

C = TypeVar("C", bound=Case)


class OfState(Contract[C], Generic[C]):
    """A function from one state dict to another.

    Keys and values are compared bit by bit, and the argument must stay as it was.
    """

    reference: Callable[..., Any]

    @abstractmethod
    def tensors(self, case: C) -> dict[str, Tensor]:
        """The call's tensors by key."""

    @abstractmethod
    def settings(self, case: C) -> dict[str, Any]:
        """The call's other arguments."""

    @abstractmethod
    def build(self, case: C) -> Build:
        """The function that makes the state of the tensors."""

    @abstractmethod
    def universe(self, settings: Mapping[str, Any]) -> set[str]:
        """Keys that the result may have."""

    def legal(self, case: C) -> Problem:
        tensors, settings = self.tensors(case), self.settings(case)
        call = state_call(self.function, tensors, settings, self.build(case), self.universe(settings))
        return Problem(self.function, layouts={case.layout_of: case.layout}, **call)

    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        universe = self.universe(problem.settings)
        return expected_of(type(self).reference, problem, self.build(case), universe)

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        return key_explained(self.universe(problem.settings), output, index, observed)


def _prefix(case: Any) -> dict[str, Any]:
    return {"prefix": PREFIX} if case.prefixed else {}


class NormalizeParameters(OfState[StateCase]):
    """`normalize_parameters`: one layer's keys, in every combination of what a state may have."""

    function = "normalize_parameters"
    case_type = StateCase
    reference = reference.normalize_parameters
    signature = Signature(
        inputs=[
            Input("weight", "LMN", part_of="state"),
            Input("biases", "LM", optional="has_bias", part_of="state"),
        ],
        outputs=OUTPUTS,
        settings=("prefix", "bias"),
        required=("state", "num_experts", "packed"),
    )

    def tensors(self, case: StateCase) -> dict[str, Tensor]:
        weight = {"weight": stacked(case, "weight", case.experts, case.rows, case.columns)}
        return weight | ({"biases": stacked(case, "biases", case.experts, case.rows)} if case.has_bias else {})

    def settings(self, case: StateCase) -> dict[str, Any]:
        call_settings = {"num_experts": case.experts, "packed": case.packed} | _prefix(case)
        return call_settings | ({"bias": True} if case.bias else {})

    def build(self, case: StateCase) -> Build:
        prefix = _prefix(case).get("prefix", "")

        def state(arguments: Given) -> dict[str, Any]:
            state_dict = entries(f"other.{prefix}weight", upside_down(arguments["weight"]), case.others)
            if case.has_bias:
                state_dict |= entries(f"{prefix}bias", arguments["biases"], case.biases)
            return state_dict | entries(f"{prefix}weight", arguments["weight"], case.weights)

        return state

    def universe(self, settings: Mapping[str, Any]) -> set[str]:
        layers = [f"{layer_prefix}{settings.get('prefix', '')}" for layer_prefix in ("", "other.")]
        stems = [f"{layer}{name}" for layer in layers for name in ("weight", "bias")]
        return {key for stem in stems for key in spelled(stem, settings["num_experts"])}


class NormalizeMasterParameters(OfState[MasterCase]):
    """`normalize_master_parameters`: none, one or several keys that match, and longer names."""

    function = "normalize_master_parameters"
    case_type = MasterCase
    reference = reference.normalize_master_parameters
    signature = Signature(
        inputs=[Input("weight", "LMN", part_of="state")],
        outputs=OUTPUTS,
        required=("state", "name", "num_experts", "packed"),
    )

    def tensors(self, case: MasterCase) -> dict[str, Tensor]:
        return {"weight": stacked(case, "weight", case.experts, case.rows, case.columns)}

    def settings(self, case: MasterCase) -> dict[str, Any]:
        return {"name": MASTER, "num_experts": case.experts, "packed": case.packed}

    def build(self, case: MasterCase) -> Build:
        stems = (STEMS[1] if case.bare else STEMS[0], *STEMS[2:])

        def state(arguments: Given) -> dict[str, Any]:
            weight: Tensor = arguments["weight"]
            state_dict: dict[str, Any] = {}
            values = (weight, weight.flip(0), weight.flip(1))
            for stem, storage, value in zip(stems, (case.first, case.second, case.longer), values, strict=True):
                state_dict |= entries(f"{stem}{MASTER}", value, storage)
            return state_dict

        return state

    def universe(self, settings: Mapping[str, Any]) -> set[str]:
        return {key for stem in STEMS for key in spelled(f"{stem}{MASTER}", settings["num_experts"])}


class ConvertExperts(OfState[ConvertCase]):
    """`convert_experts`: either layout of each linear layer, into either."""

    function = "convert_experts"
    case_type = ConvertCase
    reference = reference.convert_experts
    signature = Signature(
        inputs=[
            Input("fc1_weight", "LMN", part_of="state"),
            Input("fc2_weight", "LNM", part_of="state"),
            Input("fc1_bias", "LM", optional="has_bias", part_of="state"),
            Input("fc2_bias", "LN", optional="has_bias", part_of="state"),
        ],
        outputs=OUTPUTS,
        settings=("prefix",),
        required=("state", "num_experts", "layout"),
    )

    def tensors(self, case: ConvertCase) -> dict[str, Tensor]:
        count, rows, columns = case.experts, case.rows, case.columns
        tensors_by_name = {"fc1_weight": stacked(case, "fc1", count, rows, columns)}
        tensors_by_name |= {"fc2_weight": stacked(case, "fc2", count, columns, rows)}
        if case.has_bias:
            tensors_by_name |= {
                "fc1_bias": stacked(case, "b1", count, rows),
                "fc2_bias": stacked(case, "b2", count, columns),
            }
        return tensors_by_name

    def settings(self, case: ConvertCase) -> dict[str, Any]:
        return {"num_experts": case.experts, "layout": case.layout_to} | _prefix(case)

    def build(self, case: ConvertCase) -> Build:
        prefix = _prefix(case).get("prefix", "")

        def state(arguments: Given) -> dict[str, Any]:
            state_dict = {
                "router.weight": arguments["fc1_weight"][0],
                f"{prefix}linear_fc1.scale0": arguments["fc2_weight"][0],
            }
            for layer, storage in (("fc1", case.fc1), ("fc2", case.fc2)):
                state_dict |= _entries(prefix, f"{LINEARS[layer]}.weight", arguments[f"{layer}_weight"], storage)
                if case.has_bias:
                    state_dict |= _entries(prefix, f"{LINEARS[layer]}.bias", arguments[f"{layer}_bias"], case.biases)
            return state_dict

        return state

    def universe(self, settings: Mapping[str, Any]) -> set[str]:
        prefix, count = settings.get("prefix", ""), settings["num_experts"]
        names = [f"{linear}.{name}" for linear in LINEARS.values() for name in ("weight", "bias")]
        grouped = {key for name in names for key in spelled(f"{prefix}{name}", count)}
        modules = {f"{prefix}local_experts.{e}.{name}" for name in names for e in range(count)}
        return {"router.weight", f"{prefix}linear_fc1.scale0"} | grouped | modules


def _entries(prefix: str, name: str, parameter: Tensor, storage: str) -> dict[str, Any]:
    if storage == "sequential":
        return {f"{prefix}local_experts.{e}.{name}": x for e, x in enumerate(parameter)}
    return entries(f"{prefix}{name}", parameter, storage)
