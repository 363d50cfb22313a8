"""The top-k kernel of OpenAI's `triton_kernels`, from the folder that a vllm wheel has of it.

    pip download --no-deps vllm==0.33.0          # unpack vllm/third_party into FOLDER
    PYTHONPATH=FOLDER TRITON_INTERPRET=1 moe-conformance run --impl conformance.peers.triton_topk

Its wrapper of a tensor, which Triton's interpreter does not take, is the tensor itself here.
Weights are scattered, and the map is read from its bits: word w of a token has experts 32 w to
32 w + 31.
"""

from typing import Any

import torch
from torch import Tensor
from triton_kernels import topk as package

from moe_ref.config import Routed


class _Plain:
    """The package's wrapper of a tensor."""

    def __new__(cls, x: Any, shape: Any, shape_max: Any) -> Any:
        """The tensor itself, with the attributes that the launch reads of the wrapper."""
        x.shape_max = shape_max
        return x


package.Tensor = _Plain
scope = "score=softmax and dtype!=float64"  # its keys have twice the bits of a logit


def supports(function: str, **arguments: Any) -> str | None:
    """The calls that the kernel supports: `tl.arange` runs over the chosen experts."""
    topk = arguments["topk"]
    return None if topk & (topk - 1) == 0 else f"{topk} experts per token: no power of two"


def declares(function: str) -> dict[str, Any]:
    """The weights are in the dtype of the logits; nothing is checked."""
    return {"accumulator": "storage", "unchecked": ("logits", "topk")}


def topk_routing(logits: Tensor, *, topk: int) -> Routed:
    """`topk` with a softmax over the chosen experts."""
    weights, indices, bits = package.topk(logits, topk, apply_softmax=True)
    probs = torch.zeros_like(logits).scatter(1, indices.long(), weights)
    words = bits.storage.data.to(torch.int64)[: len(logits)]
    chosen = (words[:, :, None] >> torch.arange(32) & 1).flatten(1)[:, : logits.shape[1]]
    return Routed(probs, chosen.bool())
