"""The rows of each expert on the device, and on the host where the caller has them there."""

from typing import NamedTuple

from torch import Tensor

from moe_ref.config import require


class Counts(NamedTuple):
    """The pair (host, device). That both are equal is not checked, because this would be a wait.

    counts = Counts.of((tokens_per_expert.cpu(), tokens_per_expert))
    counts.tolist()                          # reads the host's copy, without a wait for the GPU
    Counts.of(tokens_per_expert).tolist()    # waits
    """

    host: Tensor | None
    device: Tensor

    @classmethod
    def of(cls, tokens_per_expert: Tensor | tuple[Tensor | None, Tensor]) -> "Counts":
        """The counts of a tensor on the device, or of a pair.

        Raises:
            ValueError: the host's copy is on another device, or of another shape.
        """
        if not isinstance(tokens_per_expert, tuple):
            return cls(None, tokens_per_expert)
        counts = cls(*tokens_per_expert)
        if counts.host is not None:
            is_copy = counts.host.device.type == "cpu" and counts.host.shape == counts.device.shape
            value = f"{tuple(counts.host.shape)} on {counts.host.device}"
            require(is_copy, "tokens_per_expert", value, f"{tuple(counts.device.shape)} on the CPU")
        return counts

    def tolist(self) -> list[int]:
        """The counts as integers; without a copy on the host this waits for the device."""
        counts: list[int] = (self.device if self.host is None else self.host).tolist()
        return counts
