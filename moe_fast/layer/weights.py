"""The weights of grouped linear layers, with the names and shapes of Megatron's state dicts.

Packed, a weight is [L,out,in] under the key `weight`; by expert, [out,in] under `weight0` …
"""

from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class GroupedWeight(nn.Module):
    """One weight [L,out,in] of a rank's experts, saved packed or by expert, loaded from both."""

    def __init__(self, experts: int, out: int, into: int, *, packed: bool = True, **tensor: Any) -> None:
        super().__init__()
        self.packed = packed
        self.weight = nn.Parameter(torch.empty(experts, out, into, **tensor))
        self.register_load_state_dict_pre_hook(_pack)
        self.register_state_dict_post_hook(_unpack)

    def extra_repr(self) -> str:
        return f"experts={len(self.weight)}, shape={tuple(self.weight.shape[1:])}, packed={self.packed}"


def _pack(module: GroupedWeight, state: State, prefix: str, *_: Any) -> None:
    """Before loading: all of weight0 … become weight; a packed key is left as it is."""
    names = [f"{prefix}weight{i}" for i in range(len(module.weight))]
    if f"{prefix}weight" not in state and all(name in state for name in names):
        state[f"{prefix}weight"] = torch.stack([state.pop(name) for name in names])


def _unpack(module: GroupedWeight, state: State, prefix: str, _: Any) -> None:
    """After saving: weight becomes weight0 …, views of it, unless the module is packed."""
    if not module.packed:
        whole: Tensor = state.pop(f"{prefix}weight")
        state.update({f"{prefix}weight{i}": part for i, part in enumerate(whole)})
