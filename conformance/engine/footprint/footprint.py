"""Footprints: for each function of an implementation, digests of what its result depends on."""

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import conformance
import fast_interpreter
import moe_ref
from conformance.catalogue import CONTRACTS, MODULES
from conformance.engine.child.child import import_implementation
from conformance.engine.footprint.closure import Closure
from conformance.engine.footprint.companions import companions
from conformance.engine.footprint.packages import Packages, files_digest
from conformance.engine.footprint.source import digest
from conformance.engine.options import ChildOptions
from conformance.interface import Implementation

# variables that compilers and libraries read; folders of caches do not matter
ENVIRONMENT = ("TRITON", "TORCH", "PYTORCH", "CUDA", "CUBLAS", "NCCL", "NVTE", "MOE_")
QUESTIONS = ("supports", "declares", "transport", "configurations", "configured")  # about a function by name
IGNORED = ("DIR", "HOME", "PATH", "VISIBLE_DEVICES")


@dataclass(frozen=True)
class Footprints:
    """What the results of all functions depend on.

    conditions: by name, digests of everything that all functions share: suite, packages, device
    functions: by function, the digest of each part, by label: "kernels.permutation", a module
    """

    conditions: dict[str, str]
    functions: dict[str, dict[str, str]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON: each part once, and by function its digest and the numbers of its parts."""
        pairs = sorted({pair for entries in self.functions.values() for pair in entries.items()})
        numbers = {pair: number for number, pair in enumerate(pairs)}
        functions = {
            name: {
                "digest": digest(*(f"{label} {value}" for label, value in sorted(entries.items()))),
                "parts": " ".join(str(numbers[pair]) for pair in sorted(entries.items())),
            }
            for name, entries in self.functions.items()
        }
        parts = [f"{label} {value}" for label, value in pairs]
        return {"conditions": self.conditions, "parts": parts, "functions": functions}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Footprints":
        """The footprints that `record` has written."""
        pairs = [tuple(text.rsplit(" ", 1)) for text in record["parts"]]
        functions = {
            name: dict(pairs[int(number)] for number in entry["parts"].split())
            for name, entry in record["functions"].items()
        }
        return cls(dict(record["conditions"]), functions)


def serve_footprints(connection: Connection, options: ChildOptions, log_path: str) -> None:
    """In a process of its own: import the implementation and send ("footprints", a record)."""
    implementation = import_implementation(connection, options, log_path)
    if implementation is None:
        return
    try:
        record_of_all = footprints(implementation)
        roots = Packages(implementation.name, suite_folders()).roots()
    except Exception as error:
        connection.send(("unknown", f"{type(error).__name__}: {error}"))
    else:
        connection.send(
            ("footprints", record_of_all.record() | {"roots": {name: str(path) for name, path in roots.items()}})
        )


def suite_folders() -> tuple[Path, ...]:
    """The folders of the suite, of the reference and of the interpreter that the suite uses."""
    return tuple(Path(str(package.__file__)).parent for package in (conformance, moe_ref, fast_interpreter))


def suite_digest(folders: Iterable[Path]) -> str:
    return digest(*map(files_digest, folders))


def footprints(implementation: Implementation) -> Footprints:
    """The footprints of all functions that an imported implementation offers."""
    packages = Packages(implementation.name, suite_folders())
    closure = Closure(packages)
    offered = [name for name in CONTRACTS if implementation.offers(name)]
    called = {name: sorted(x for x in companions(name) if implementation.offers(x)) for name in offered}
    homes = {x: _homes(x, implementation, closure) for name in offered for x in (name, *called[name])}
    # at last: looking at functions may import more modules
    acting, files = closure.acting(), packages.files()
    functions = {}
    for name in offered:
        modules = acting.union(homes[name], *(homes[x] for x in called[name]))
        functions[name] = closure.digests(modules) | files | {f"{name} (calls)": digest(*called[name])}
        for x in (name, *called[name]):
            functions[name] |= _declared(x, implementation)
    return Footprints(conditions(packages), functions)


def _homes(name: str, implementation: Implementation, closure: Closure) -> set[str]:
    """The modules of one function, and of what the suite asks the namespace about it."""
    namespace = implementation.namespace
    questions = [x for x in QUESTIONS if hasattr(namespace, x)]
    return closure.homes(namespace, name).union(*(closure.homes(namespace, x, name) for x in questions))


def _declared(name: str, implementation: Implementation) -> dict[str, str]:
    """What the implementation declares about a function of the contracts, and about no helper."""
    if name not in CONTRACTS:
        return {}
    declared, lacked = implementation.declares(name), implementation.lacks(name, {"group": None})
    return {f"{name} (declared)": digest(json.dumps([declared, lacked], sort_keys=True, default=repr))}


def conditions(packages: Packages) -> dict[str, str]:
    """Digests of what all functions share: suite, packages, variables."""
    out = {"the suite": suite_digest(suite_folders())}
    for family in sorted({name.partition(".")[0] for name in MODULES} - {"conformance"}):
        out[f"the family {family}"] = files_digest(Path(str(sys.modules[family].__file__)).parent)
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT) and not name.endswith(IGNORED):
            out[f"the variable {name}"] = digest(value)
    return out | _installed(set(packages.roots()))


def _installed(followed: set[str]) -> dict[str, str]:
    """A digest of each installed package, but of those whose code is followed."""
    out = {}
    for package in importlib.metadata.distributions():
        lines = [line for line in (package.read_text("RECORD") or "").splitlines() if ",sha256=" in line]
        files = sorted(line for line in lines if not line.startswith("..") and ".dist-info/" not in line)
        if not followed & {line.partition("/")[0].removesuffix(".py") for line in files}:
            content = hashlib.sha256("\n".join([package.version, *files]).encode()).hexdigest()[:16]
            out[f"the package {package.metadata['Name']}"] = content
    return out
