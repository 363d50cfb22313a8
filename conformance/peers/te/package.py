"""The installed Transformer Engine."""

import importlib
from typing import Any

SUBMODULES = ("pytorch", "pytorch.router", "pytorch.ops", "pytorch.fp8", "common.recipe")  # router since 2.6


def installed() -> Any:
    """The module `transformer_engine`, with the submodules that it has.

    Raises:
        ImportError: it cannot be imported; the message says what to install.
    """
    try:
        te = importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its shared libraries fail in their own ways
        raise ImportError(
            f"transformer_engine cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'moe-conformance[te]' where there is a CUDA toolkit"
        ) from error
    for name in SUBMODULES[1:]:
        try:
            importlib.import_module(f"transformer_engine.{name}")
        except ImportError:
            continue  # a release without it: `features` reports its functions as missing
    return te
