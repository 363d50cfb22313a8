"""What each family promises beyond the reference's contract, and which legal calls it has no kernel
for.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

Promises = dict[str, Any] | Callable[[], dict[str, Any]]
Check = Callable[[str, Tensor, dict[str, Any]], None]

COPY: dict[str, Any] = {"deterministic": True, "host_sync_free": True, "graph_capturable": True, "noncontiguous": True}
READ = COPY | {"host_sync_free": False, "graph_capturable": False}  # the host reads a number of rows
# over ranks: a static size is one that gives or bounds what travels; no graph has been captured
TRAVELS = COPY | {"graph_capturable": False}
COMPUTED = COPY | {"accumulator": "float32"}
SUM = COMPUTED | {"reduction_order": "ascending experts"}


class Family:
    """The functions of a namespace, with `declares` and `supports` as `conformance.interface`
    describes them.
    """

    def __init__(
        self,
        promises: Mapping[Callable[..., Any], Promises],
        check: Check | None = None,
        readers: Mapping[ModuleType, Sequence[Callable[..., Any]]] = MappingProxyType({}),
    ) -> None:
        """`check` raises ValueError for a payload (the first argument) that has no kernel.
        `readers` are functions of other families that read the results of this one; those families
        declare and support them.
        """
        self.promises = {function.__name__: promised for function, promised in promises.items()}
        self.check = check
        self.readers = {function.__name__: family for family, functions in readers.items() for function in functions}
        self.names = [*self.promises, *self.readers, "declares", "supports"]

    def declares(self, function: str) -> dict[str, Any]:
        """What this implementation promises about a function, beyond the reference's contract."""
        if function in self.readers:
            return dict(self.readers[function].declares(function))
        promised = self.promises[function]
        return dict(promised() if callable(promised) else promised)

    def supports(self, function: str, *arguments: Any, **settings: Any) -> str | None:
        """Why a call is not supported, or None; by shapes, dtypes and settings alone."""
        if function in self.readers:
            reason: str | None = self.readers[function].supports(function, *arguments, **settings)
            return reason
        payload = next(iter((*arguments, *settings.values())), None)
        if self.check is None or not isinstance(payload, Tensor):
            return None
        try:
            self.check(function, payload, settings)
        except ValueError as error:
            return str(error)
        return None


def combine(*families: ModuleType) -> tuple[Callable[..., dict[str, Any]], Callable[..., str | None], list[str]]:
    """(declares, supports, names) of all families' functions."""
    home: dict[str, ModuleType] = {}
    for family in families:
        for name in family.__all__:
            home.setdefault(name, family)  # a reader is answered for by its own family, which comes first

    def declares(function: str) -> dict[str, Any]:
        """What this implementation promises about a function, beyond the reference's contract."""
        return home[function].declares(function)

    def supports(function: str, *arguments: Any, **settings: Any) -> str | None:
        """Why a call is not supported, or None; by shapes, dtypes and settings alone."""
        return home[function].supports(function, *arguments, **settings)

    return declares, supports, list(home)
