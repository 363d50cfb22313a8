"""Checks the machine: versions, devices, and the detection of a dying process."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator

import torch

import fast_interpreter
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.interface import UsageError

NEEDED = ("torch", "numpy", "hypothesis", "pytest")
OPTIONAL = ("triton", "pytest-xdist", "libcst")
PEERS = ("megatron-core", "transformer-engine")


def checkup() -> Iterator[tuple[bool, str]]:
    """(fine, sentence) for each check."""
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield True, f"python {platform.python_version()} on {system}"
    for packages, absence in (
        (NEEDED, "is not installed"),
        (OPTIONAL, "is not installed (optional)"),
        (PEERS, "is not installed (only needed to judge it)"),
    ):
        for package in packages:
            version = _version(package)
            yield bool(version) or packages is not NEEDED, f"{package} {version or absence}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    absence = "no GPU: kernels run in Triton's interpreter where the implementation does so"
    yield True, f"{gpus} × {torch.cuda.get_device_name(0)}" if gpus else absence
    if fast_interpreter.sentence():
        yield True, fast_interpreter.sentence()
    yield from _children()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _children() -> Iterator[tuple[bool, str]]:
    """A child must start, pass the reference, and be noticed when it dies."""
    function, contract = next((name, contract) for name, contract in CONTRACTS.items() if contract.golden)
    case = Case.family[function](function=function, golden=next(iter(contract.golden)))
    try:
        started = time.monotonic()
        with Pool(ChildOptions("moe_ref")) as pool:
            pool.start()
            seconds = time.monotonic() - started
            outcome = pool.run_alone(case)
            observed = outcome.status if outcome.status == "PASS" else f"{outcome.status} {outcome.reason}"
            yield (
                outcome.status == "PASS",
                f"a child starts in {seconds:.2f} s and finds the reference right: {observed}",
            )
        with Pool(ChildOptions("conformance.engine.child.crashing")) as pool:
            pool.start()
            outcome = pool.run_alone(case)
            observed = outcome.status if outcome.status == "CRASH" else f"{outcome.status} {outcome.reason}"
            yield outcome.status == "CRASH", f"a kernel that kills its process is noticed: {observed}"
    except UsageError as error:
        yield False, str(error)
