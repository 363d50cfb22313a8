"""The functions and records that a compiled graph knows of this package; `operators` collects them,
`tracing` reads them.
"""

from collections.abc import Callable
from typing import Any

__reaches__ = ()  # see `operators`
PUBLIC: list[Callable[..., Any]] = []  # the functions that a graph has as one call
RECORDS: list[type] = []  # dataclasses among their arguments and results
