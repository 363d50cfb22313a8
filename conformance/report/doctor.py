"""Looks at the machine: versions, devices, and whether the suite's own safety nets hold."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator

import torch

from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import UsageError

PACKAGES = {
    "torch": True,
    "numpy": True,
    "hypothesis": True,
    "pytest": True,
    "triton": False,
    "pytest-xdist": False,
    "libcst": False,
}
OPTIONAL_PEERS = ("megatron-core", "transformer-engine")


def checkup() -> Iterator[tuple[bool, str]]:
    """(fine, sentence) for each thing that was looked at."""
    yield (
        True,
        f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    )
    for package, needed in PACKAGES.items():
        version = _version(package)
        yield (
            bool(version) or not needed,
            f"{package} {version or 'is not installed' + ('' if needed else ' (optional)')}",
        )
    for package in OPTIONAL_PEERS:
        yield True, f"{package} {_version(package) or 'is not installed (only needed to judge it)'}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield (
        True,
        f"{gpus} × {torch.cuda.get_device_name(0)}"
        if gpus
        else "no GPU: kernels run in Triton's interpreter where the implementation does so",
    )
    yield from _children()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _children() -> Iterator[tuple[bool, str]]:
    """A child must start, judge the reference right, and tell a dead child from a passing one."""
    case = RoutingCase(function="permute", tokens=5, experts=3, hidden=2, topk=2, spread="uniform")
    try:
        started = time.monotonic()
        with Pool(ChildOptions("moe_ref")) as pool:
            pool.start()
            ready = time.monotonic()
            status = pool.run_alone(case).status
            yield status == "PASS", f"a child starts in {ready - started:.2f} s and finds the reference right: {status}"
        with Pool(ChildOptions("conformance.engine.child.misbehaving:Segfaults")) as pool:
            pool.start()
            status = pool.run_alone(case).status
            yield status == "CRASH", f"a kernel that kills its process is noticed: {status}"
    except UsageError as error:
        yield False, str(error)
