"""Imports without garbage collection: it walks all that torch has made, and frees nothing."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection inside the block that imports torch; later ones leave out what it has made."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
