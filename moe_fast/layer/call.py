"""The arguments of one call of the layer, as one record that all its stages read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.experts.delayed import Waiting
from moe_fast.launch.legal import Key, key_of, unless_known
from moe_ref.config import LayerConfig, LayerParameters, LinearAmax, LinearState, RouterState, check_layer


@dataclass(frozen=True)
class Call:
    """The arguments of `moe_layer` without the tokens; `moe_layer` describes them."""

    parameters: LayerParameters
    config: LayerConfig
    state: RouterState
    training: bool = True
    batch_size: int = 1
    group: Any = None
    padding_mask: Tensor | None = None
    noise: Tensor | None = None
    recompute: str | Sequence[str] | None = None
    wgrads: Waiting | None = None
    linear_states: tuple[LinearState, LinearState] | None = None
    amaxes: tuple[LinearAmax, LinearAmax] | None = None
    overlap_shared: bool = False
    in_dispatch_backward: Callable[[], None] | None = None
    shared_memory: bool = False

    def key(self, x_TH: Tensor) -> Key | None:
        """What the checks of the call read, as a key; None if they read anything else."""
        unchecked = (self.wgrads, self.linear_states, self.amaxes)
        if self.group is not None or self.state.replay_queue or any(argument is not None for argument in unchecked):
            return None
        recompute = self.recompute if isinstance(self.recompute, str | None) else tuple(self.recompute)
        settings = {"training": self.training, "batch_size": self.batch_size, "recompute": recompute}
        tensors = (x_TH, *self.parameters, *self.state[:-1], self.padding_mask, self.noise)
        return key_of(self.config, *tensors, **settings, grad=torch.is_grad_enabled())

    @unless_known
    def check(self, x_TH: Tensor) -> None:
        """Raise `ValueError` for arguments that `check_layer` refuses."""
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        optional = (self.padding_mask, self.noise, self.linear_states)
        of_ranks: list[Any] = [None if argument is None else [argument] * ranks for argument in optional]
        check_layer([x_TH] * ranks, [self.parameters] * ranks, self.config, [self.state] * ranks, *of_ranks)
