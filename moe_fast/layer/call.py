"""The arguments of one call of the layer, as one record that all its stages read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_fast.experts.delayed import Waiting
from moe_fast.launch.legal import Key, unless_known
from moe_fast.launch.operators import has_memory
from moe_ref.config import LayerConfig, LayerParameters, LinearAmax, LinearState, RouterState, check_layer


class Call(NamedTuple):
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
        """Everything that the checks of the call may read, as a key; None if that is more, or if
        the tensors have no memory, so that their sizes may be symbols.

        The configuration is recognised by its identity, and must not change.
        """
        unchecked = (self.wgrads, self.linear_states, self.amaxes)
        if self.group is not None or self.state.replay_queue or any(argument is not None for argument in unchecked):
            return None
        if not has_memory():
            return None
        recompute = self.recompute if isinstance(self.recompute, str | None) else tuple(self.recompute)
        tensors = (x_TH, *self.parameters, *self.state[:-1], self.padding_mask, self.noise)
        read = [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
        return id(self.config), *read, self.training, self.batch_size, recompute, torch.is_grad_enabled()

    @unless_known
    def check(self, x_TH: Tensor) -> None:
        """Raise `ValueError` for arguments that `check_layer` refuses."""
        ranks = 1 if self.group is None else dist.get_world_size(self.group)
        optional = (self.padding_mask, self.noise, self.linear_states)
        of_ranks: list[Any] = [None if argument is None else [argument] * ranks for argument in optional]
        check_layer([x_TH] * ranks, [self.parameters] * ranks, self.config, [self.state] * ranks, *of_ranks)
