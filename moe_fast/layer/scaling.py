"""Delayed scaling of a grouped linear layer: its states, in buffers and in checkpoints."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.layer.weights import GroupedLinear, KeepsDtypes
from moe_fast.quantization.group_scales import update_scales
from moe_ref.config import LinearAmax, LinearState, QuantizerState, Recipe, require
from moe_ref.config.parameters import EXTRA_STATE, check_extra_state
from moe_ref.config.state import new_quantizer_state

UNUSED = None  # of Transformer Engine's columns, the output and the gradient of the input are not quantised
COLUMNS = {"fwd": ("input", "weight", UNUSED), "bwd": ("grad_output", UNUSED)}  # by the name of the extra state


class ScaledGroupedLinear(KeepsDtypes, GroupedLinear):
    """`GroupedLinear`, with the state of delayed scaling for each expert's rows, weight and
    gradient.

    A checkpoint has these states under the key and the names of Transformer Engine, but without its
    recipe object. The buffers keep their dtype when the module is cast.
    """

    def __init__(self, experts: int, out: int, into: int, *, recipe: Recipe, **options: Any) -> None:
        super().__init__(experts, out, into, **options)
        self.recipe = recipe
        for role in LinearState._fields:
            for name, x in self._fresh()._asdict().items():
                self.register_buffer(f"{role}_{name}", x, persistent=False)

    def _fresh(self) -> QuantizerState:
        state = new_quantizer_state(self.recipe, num_groups=len(self.weight), device=self.weight.device)
        assert state is not None
        return state

    @property
    def state(self) -> LinearState:
        """The states: the buffers themselves, not copies."""
        names = QuantizerState._fields
        states = ([getattr(self, f"{role}_{name}") for name in names] for role in LinearState._fields)
        return LinearState(*(QuantizerState(*tensors) for tensors in states))

    @property
    def amaxes(self) -> LinearAmax:
        """The first columns of the histories, which the products raise in place."""
        return LinearAmax(*(quantizer_state.amax_history[:, 0] for quantizer_state in self.state))

    @torch.no_grad()
    def update_scales(self) -> None:
        """End a step, as `update_scales` does, but in place, so that captured graphs read the new
        scales.
        """
        for role, quantizer_state in self.state._asdict().items():
            for x, new in zip(quantizer_state, update_scales(quantizer_state, self.recipe, role=role), strict=True):
                x.copy_(new)

    def get_extra_state(self) -> dict[str, Any]:
        extra_state: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": len(self.weight)}}
        for end, roles in COLUMNS.items():
            states: list[Any] = [self._fresh() if role is UNUSED else getattr(self.state, role) for role in roles]
            extra_state[f"scale_{end}"] = torch.cat([quantizer_state.scale for quantizer_state in states])
            extra_state[f"amax_history_{end}"] = torch.cat(
                [quantizer_state.amax_history.T for quantizer_state in states], 1
            )
        return extra_state

    def set_extra_state(self, state: Any) -> None:
        """Load what `get_extra_state` returns, for all experts together or per expert, see
        `merge_extra_state`.
        """
        require(isinstance(state, dict), EXTRA_STATE, type(state).__name__, "a dict, as Transformer Engine's unpickled")
        check_extra_state(EXTRA_STATE, state, len(self.weight))
        for end, roles in COLUMNS.items():
            scales = state[f"scale_{end}"].chunk(len(roles))
            histories = state[f"amax_history_{end}"].chunk(len(roles), 1)
            for role, scale, history in zip(roles, scales, histories, strict=True):
                if role is not UNUSED:
                    self._load(getattr(self.state, role), scale, history.T)

    def _load(self, quantizer_state: QuantizerState, scale: Tensor, history: Tensor) -> None:
        expected = f"of {quantizer_state.amax_history.shape[1]} steps, as the recipe says"
        require(
            history.shape == quantizer_state.amax_history.shape,
            "amax_history",
            f"of {history.shape[1]} steps",
            expected,
        )
        quantizer_state.scale.copy_(scale)
        quantizer_state.amax_history.copy_(history)
