"""The grouped linear layers of experts, with the names and shapes of Megatron's state dicts.

Packed, a weight is [L,out,in] under the key `weight`, and a bias [L,out] under `bias`; by expert,
[out,in] under `weight0` … and [out] under `bias0` …
"""

from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]


class GroupedLinear(nn.Module):
    """One weight [L,out,in] of a rank's experts, and a bias [L,out] or None; saved packed or by
    expert, loaded from both.
    """

    def __init__(
        self, experts: int, out: int, into: int, *, bias: bool = False, packed: bool = True, **tensor: Any
    ) -> None:
        super().__init__()
        self.packed = packed
        self.weight = nn.Parameter(torch.empty(experts, out, into, **tensor))
        self.bias = nn.Parameter(torch.empty(experts, out, **tensor)) if bias else None
        self.register_load_state_dict_pre_hook(_pack)
        self.register_state_dict_post_hook(_unpack)

    def extra_repr(self) -> str:
        shape, bias = tuple(self.weight.shape[1:]), self.bias is not None
        return f"experts={len(self.weight)}, shape={shape}, bias={bias}, packed={self.packed}"


def _pack(module: GroupedLinear, state: State, prefix: str, *_: Any) -> None:
    """Before loading: all of weight0 … become weight; a packed key stays as it is. So for bias."""
    for key, whole in module.named_parameters():
        names = [f"{prefix}{key}{i}" for i in range(len(whole))]
        if f"{prefix}{key}" not in state and all(name in state for name in names):
            state[f"{prefix}{key}"] = torch.stack([state.pop(name) for name in names])


def _unpack(module: GroupedLinear, state: State, prefix: str, _: Any) -> None:
    """After saving: weight becomes weight0 …, views of it, unless the module is packed. So bias."""
    if not module.packed:
        for key in dict(module.named_parameters()):
            whole: Tensor = state.pop(f"{prefix}{key}")
            state.update({f"{prefix}{key}{i}": part for i, part in enumerate(whole)})
