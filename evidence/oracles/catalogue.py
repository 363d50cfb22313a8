"""All oracles, and what each needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from evidence.oracles.compare import Comparison


@dataclass(frozen=True)
class Oracle:
    """One peer."""

    name: str
    peer: str
    packages: tuple[str, ...]
    source: str | None
    comparisons: Callable[[Path | None], Iterator[Comparison]]
    dependencies: bool = False  # its packages need others


def _formats(package: str, peer: str, *packages: str) -> Oracle:
    module = import_module("evidence.oracles.formats")
    by = getattr(module, f"by_{package}")
    return Oracle(package, peer, packages, None, lambda source: by(), dependencies=package == "gfloat")


def _peer(name: str, dependencies: bool = False) -> Oracle:
    module = import_module(f"evidence.oracles.{name}")
    return Oracle(name, module.PEER, module.PACKAGES, module.SOURCE, module.comparisons, dependencies)


def oracles() -> dict[str, Oracle]:
    """By name, in the order of the page."""
    all_oracles = (
        _formats("torch", "torch's float8 types"),
        _formats("ml_dtypes", "ml_dtypes", "ml_dtypes==0.6.0"),
        _formats("gfloat", "gfloat", "gfloat==0.5.2"),
        _peer("torchao_mx"),
        _peer("te_quantization"),
        _peer("te_gemm"),
        _peer("te_router"),
        _peer("deepgemm"),
        _peer("deepep"),
        _peer("megatron_core"),
        _peer("hf_moe", dependencies=True),
    )
    return {oracle.name: oracle for oracle in all_oracles}
