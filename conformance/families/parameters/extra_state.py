"""split_extra_state and merge_extra_state."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from conformance.core.signature import Input, Signature
from conformance.families.parameters.cases import PREFIX, ExtraStateCase, columns_of
from conformance.families.parameters.names import OUTPUTS, OfState
from conformance.families.parameters.states import Build, Given
from moe_ref.parameters import extra_state as reference

COLUMNS = {"scale_fwd": 3, "amax_history_fwd": 3, "scale_bwd": 2, "amax_history_bwd": 2}
NAME = "_extra_state"


class SplitExtraState(OfState[ExtraStateCase]):
    """`split_extra_state`: each expert's columns; a state that is split, or without FP8, stays."""

    function = "split_extra_state"
    case_type = ExtraStateCase
    reference = reference.split_extra_state
    signature = Signature(
        inputs=[
            Input(name, f"A{letter}" if name.startswith("amax") else letter, ("float32",), field="", part_of="state")
            for name, letter in zip(COLUMNS, "CCDD", strict=True)
        ],
        outputs=OUTPUTS,
        settings=("prefix",),
        required=("state", "num_experts"),
    )

    def tensors(self, case: ExtraStateCase) -> dict[str, Tensor]:
        return {name: columns_of(case, name, columns) for name, columns in COLUMNS.items()}

    def settings(self, case: ExtraStateCase) -> dict[str, Any]:
        return {"num_experts": case.experts} | ({"prefix": PREFIX} if case.prefixed else {})

    def build(self, case: ExtraStateCase) -> Build:
        prefix = self.settings(case).get("prefix", "")

        def state(tensors_given: Given) -> dict[str, Any]:
            tensors = {name: tensors_given[name] for name in COLUMNS}
            state_dict = entries_of(case, prefix, tensors)
            return state_dict | ({f"other.{NAME}": tensors["scale_fwd"], f"{prefix}weight1": 7} if case.others else {})

        return state

    def universe(self, settings: Mapping[str, Any]) -> set[str]:
        prefix = settings.get("prefix", "")
        return {f"other.{NAME}", f"{prefix}weight1"} | set(keys_of(prefix, settings["num_experts"]))


class MergeExtraState(SplitExtraState):
    """`merge_extra_state`: the inverse; every state that lacks a part stays as it is."""

    function = "merge_extra_state"
    signature = SplitExtraState.signature
    reference = reference.merge_extra_state


def keys_of(prefix: str, experts: int) -> list[str]:
    return [f"{prefix}{NAME}", *(f"{prefix}{NAME}{e}" for e in range(1, experts))]


def entries_of(case: ExtraStateCase, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The extra state as the case keeps it."""
    keys = keys_of(prefix, case.experts)

    def told(recipe: int, experts: int) -> dict[str, Any]:
        variables = {} if case.no_variables else {"extra_fp8_variables": {"num_gemms": experts, "other": 5}}
        return {"recipe": recipe} | variables

    if case.kept == "whole":
        return {keys[0]: tensors | told(3, case.experts)}
    if case.kept == "plain":
        return {key: {"recipe": 3} for key in keys}
    state_dict: dict[str, Any] = {}
    for e, key in enumerate(keys):
        expert_columns = {
            name: x[..., [c * case.experts + e for c in range(COLUMNS[name])]] for name, x in tensors.items()
        }
        state_dict[key] = expert_columns | told(3 + e, 1)
    if case.kept == "gap":
        state_dict.pop(keys[-1])
    if case.kept == "first":
        state_dict.pop(keys[0])
    malformed: dict[str, Any] = {"empty": {}, "listed": [], "bytes": torch.tensor([128, 4, 46], dtype=torch.uint8)}
    if case.kept in malformed:
        state_dict[keys[-1]] = malformed[case.kept]
    if case.kept == "empty_first":
        state_dict[keys[0]] = {}
    return state_dict
