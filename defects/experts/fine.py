"""Defects of activations and products that few values and few experts show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values

OPTION = "a mistake that options read in the dtype of a tensor invite"
RANGE = "a mistake that a saturating conversion invites"
MANY = "a mistake that a table of fixed length invites"
PRODUCTS = ("grouped_linear", "grouped_dgrad", "grouped_wgrad", "latent_projection")
TABLE = 64  # experts in it


def _saturates(activation: Wrapper, h: Tensor, **settings: Any) -> Any:
    out = activation(h, **settings)
    most = torch.finfo(out.dtype).max
    return torch.where(out.isinf() & h.isfinite().all(1, keepdim=True), out.detach().clamp(-most, most), out)


def _product_saturates(product: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    out = product(*tensors, **settings)
    if out.dtype != torch.float16 or not all(bool(x.isfinite().all()) for x in tensors if x.is_floating_point()):
        return out
    most = torch.finfo(out.dtype).max
    return with_values(out, lambda x: x.clamp(-most, most))


def _options_in_the_dtype(glu: Wrapper, h: Tensor, **settings: Any) -> Any:
    given = {name: settings[name] for name in ("clamp", "offset") if settings.get(name) is not None}
    return glu(h, **settings | {name: float(torch.tensor(x).to(h.dtype)) for name, x in given.items()})


def _table_of_weights(linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, **settings: Any) -> Any:
    if weight.dim() == 3 and len(weight) > TABLE:
        weight = weight[torch.arange(len(weight), device=weight.device) % TABLE]
    return linear(rows, weight, counts, **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect("Y44", "what overflows is the largest number", RANGE, dict.fromkeys(("glu", "activation"), _saturates)),
    Defect("Y47", "a product that overflows is the largest number", RANGE, dict.fromkeys(PRODUCTS, _product_saturates)),
    Defect("Y45", "clamp and offset are rounded to the dtype of h", OPTION, {"glu": _options_in_the_dtype}),
    Defect(
        "Y46",
        "experts past 64 have the weight of another",
        MANY,
        dict.fromkeys(("grouped_linear", "grouped_dgrad"), _table_of_weights),
    ),
)
