"""The conformance suite: any namespace that offers the reference's functions is compared with the
reference.

    moe-conformance run --impl my_kernels.moe

`interface` defines an implementation, `core` the parts that `families` of functions are written
from: cases, contracts, laws. `judge` compares, `analysis` bounds honest results. `engine` chooses
cases, runs each in a child process that may crash or hang, reduces failures and adds up the
verdict; `report` prints it. `cli` calls the run, `plugin` shows it as pytest items.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """The `__version__` of the installed package. A checkout that runs in place has none."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("moe-conformance")
    except PackageNotFoundError:
        return "not installed"
