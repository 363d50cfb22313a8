"""The counts of a dispatch on the host, for a grouped GEMM that takes its sizes there."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.overlap import side_stream


class CountsOnHost:
    """The counts of a dispatch on the host and on the device, as (host, device).

        counts = CountsOnHost(dispatched.tokens_per_expert)
        y = grouped_gemm(rows, counts.host.tolist())       # waits here, and only for the copy
        z = grouped_mlp(rows, counts.device, fc1, fc2)     # reads nothing

    `host` is a copy of the counts at the time of the call. From a GPU it is made on a separate
    stream, into pinned memory: the host waits for it at the first read of `host`, and the GPU's
    other work never does.

    Args:
        device: [L] integers, on any device.

    Source: the copies to the host of megatron.core.transformer.moe.token_dispatcher.
    """

    def __init__(self, device: Tensor) -> None:
        self.device = device
        self._copied: Any = None  # the event after a copy that nothing has waited for
        if device.device.type != "cuda":
            self._host = device.detach().clone()
            return
        self._host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
        stream, then = side_stream(device.device), device.detach().clone()  # later work may overwrite the counts
        stream.wait_stream(torch.cuda.current_stream(device.device))
        with torch.cuda.stream(stream):
            self._host.copy_(then, non_blocking=True)
            self._copied = stream.record_event()
        then.record_stream(stream)  # its memory stays until the copy is made

    @property
    def host(self) -> Tensor:
        """[L] on the CPU; the first read waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._host
