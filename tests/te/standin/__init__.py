"""Stand-ins for Transformer Engine, one for each release, computed by the reference.

    te = standin("2.12")                       a release of that bucket
    te = standin("2.20", without=("moe_permute_and_pad_with_probs",))
    te = standin("2.20", changed={"moe_unpermute": "inp, row_id_map, merging_probs=None, new=0"})

Names, parameters and behaviour follow `matrix`; no module imports Transformer Engine. `te.calls`
lists the symbols called, in order, `te.symbols` are those that it has, and `te.behaviour` the rows
of `matrix.BEHAVIOUR`.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from tests.te.standin import padding
from tests.te.standin.experts import Experts, activations, signature_from
from tests.te.standin.indices import IndexPermutation
from tests.te.standin.matrix import BUCKETS as BUCKETS
from tests.te.standin.matrix import behaviour_of, parameters_of
from tests.te.standin.permutation import Permutation
from tests.te.standin.quantized import Quantisers
from tests.te.standin.recipes import Format, Recipes
from tests.te.standin.router import Router

NOTHING: Mapping[str, str] = MappingProxyType({})


def standin(bucket: str, without: Collection[str] = (), changed: Mapping[str, str] = NOTHING) -> Any:
    """A namespace like the module `transformer_engine` of a release.

    Args:
        bucket: a key of `matrix.BUCKETS`.
        without: symbols that are left out.
        changed: parameters by symbol, in place of the release's. New ones are accepted and unused.
    """
    version, rocm = BUCKETS[bucket]
    behaviour = SimpleNamespace(**behaviour_of(version))
    all_parameters = parameters_of(version, rocm) | dict(changed)
    calls: list[str] = []
    te = SimpleNamespace(__version__=".".join(map(str, version)), pytorch=SimpleNamespace())
    te.common = SimpleNamespace(recipe=SimpleNamespace(Format=Format))
    te.behaviour, te.calls, te.symbols = (
        behaviour,
        calls,
        {symbol.rpartition(".")[2] for symbol in all_parameters} - {*without},
    )
    te.pytorch.router, te.pytorch.ops, te.pytorch.fp8 = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()
    te.pytorch.tensor = SimpleNamespace(float8_blockwise_tensor=SimpleNamespace(), mxfp8_tensor=SimpleNamespace())
    permutation = Permutation(behaviour) if behaviour.mask_maps else IndexPermutation(behaviour)
    recipes = Recipes()
    experts = Experts(behaviour, all_parameters["GroupedLinear.forward"], recipes)
    makers = (permutation, Router(behaviour), experts, padding, recipes, Quantisers(), activations(behaviour))
    for symbol, text in all_parameters.items():
        if symbol.rpartition(".")[2] in te.symbols:
            *modules, name = symbol.split(".")
            below = functools.reduce(getattr, modules, te if modules[:1] == ["common"] else te.pytorch)
            qualified_name = f"{modules[0]}_{name}" if modules == ["ops"] else name  # two classes have one name
            body = next(getattr(x, word) for word in (qualified_name, name) for x in makers if hasattr(x, word))
            setattr(below, name, signed(name, body, text, calls))
    return te


def signed(symbol: str, body: Callable[..., Any], text: str, calls: list[str]) -> Callable[..., Any]:
    """The function or class `body`, with these parameters alone; a call is added to `calls`."""
    signature = signature_from(text)
    taken = inspect.signature(body).parameters

    @functools.wraps(body, updated=())
    def call(*args: Any, **settings: Any) -> Any:
        bound = signature.bind(*args, **settings)
        bound.apply_defaults()
        calls.append(symbol)
        named = {name: value for name, value in bound.arguments.items() if name in taken and name != "args"}
        return body(*bound.arguments.get("args", ()), **named)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
