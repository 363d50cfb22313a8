"""The packages of the user: which modules are theirs, and the files beside the code."""

import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
SYSTEM = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), "/usr", "/lib", "/lib64", "/bin")
SKIPPED = ("__pycache__",)
# of the files beside a package or a single module, those that its code may load
LOADABLE = {".so", ".pyd", ".cu", ".cuh", ".ptx", ".cubin", ".fatbin", ".hsaco", ".c", ".cc", ".cpp", ".h", ".hpp"}
REPORT = (b'"footprints"', b'"exit_code"')  # in a JSON report of this suite, which is no part of an implementation


def files_digest(files: Path, python: bool = True) -> str:
    """A digest of the files in a folder, or of one file.

    Args:
        python: count Python source too.
    """
    paths = sorted(files.rglob("*")) if files.is_dir() else [files]
    names = [(path, path.relative_to(files)) for path in paths if path.is_file() and (python or path.suffix != ".py")]
    is_visible = lambda name: not any(part in SKIPPED or part.startswith(".") for part in name.parts)  # noqa: E731
    return _digest((path, str(name)) for path, name in names if is_visible(name))


def _digest(files: Iterable[tuple[Path, str]]) -> str:
    out = hashlib.sha256()
    for path, name in files:
        out.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return out.hexdigest()[:16]


def _found(module: str, folders: list[str]) -> ModuleSpec | None:
    """Where a module is in the folders of its package, which need not be loaded."""
    try:
        return PathFinder.find_spec(module, folders)
    except KeyError:  # a folder without `__init__`, for which the finder needs the loaded package
        spec = ModuleSpec(module, None, is_package=True)
        spec.submodule_search_locations = [os.path.join(folder, module.rpartition(".")[2]) for folder in folders]
        return spec


class Packages:
    """The implementation's package, and others that are neither installed nor part of the suite."""

    def __init__(self, implementation: str, suite: tuple[Path, ...]) -> None:
        self.top = implementation.partition(":")[0].partition(".")[0]
        self.suite = tuple(str(folder) + os.sep for folder in suite)
        self.path = cache(self._path)
        self.spec = cache(self._spec)
        self.is_followed = cache(self._is_followed)

    def _path(self, module: str) -> str:
        """The file of a module of the user, loaded or not; empty for any other module."""
        loaded = sys.modules.get(module)
        path = getattr(loaded, "__file__", None) if loaded else getattr(self.spec(module), "origin", None)
        return path if isinstance(path, str) and self.is_followed(path) else ""

    def _spec(self, module: str) -> ModuleSpec | None:
        """Where a module is that is not loaded; imports nothing."""
        parent = module.rpartition(".")[0]
        try:
            if not parent:
                return importlib.util.find_spec(module)
            loaded = sys.modules.get(parent)
            spec = None if loaded else self.spec(parent)
            folders = getattr(loaded, "__path__", None) or (spec and spec.submodule_search_locations)
            return _found(module, list(folders)) if folders else None
        except (ImportError, ValueError, AttributeError):
            return None

    def _is_followed(self, path: str) -> bool:
        is_main = path == getattr(sys.modules["__main__"], "__file__", "")
        if path.startswith(self.suite) or not os.path.isabs(path) or is_main:
            return False
        top = sys.modules.get(self.top)
        folders = tuple(folder + os.sep for folder in getattr(top, "__path__", ()))
        if path == getattr(top, "__file__", None) or path.startswith(folders or ("\0",)):
            return True
        is_foreign = path.startswith(str(SYSTEM[2]) + os.sep) or _is_installed(path)
        return path.endswith((".py", ".so", ".pyc")) and not is_foreign

    def loaded(self) -> list[str]:
        """The modules of the user that are loaded."""
        return sorted(name for name, module in list(sys.modules.items()) if module is not None and self.path(name))

    def roots(self) -> dict[str, Path]:
        """The folder of each package, or the file of a module that is in none."""
        out: dict[str, Path] = {}
        for name in self.loaded():
            top = name.partition(".")[0]
            folders = list(getattr(sys.modules.get(top), "__path__", []))
            out[top] = Path(folders[0] if folders else str(sys.modules[name].__file__))
        return out

    def files(self) -> dict[str, str]:
        """Digests of the files that are no Python source: in the packages, beside them, and shared
        libraries that this process has loaded from elsewhere.
        """
        roots = self.roots()
        out = {f"{name} (files)": files_digest(path, python=False) for name, path in roots.items()}
        for name, path in roots.items():
            if not _is_installed(f"{path.parent}{os.sep}"):
                out[f"{name} (files beside)"] = _digest(
                    (x, x.name) for x in sorted(path.parent.iterdir()) if _is_loadable(x)
                )
        for path in map(Path, _mapped()):
            if not any(path.is_relative_to(folder) for folder in (*map(str, roots.values()), *self.suite)):
                out[f"{path.name} (library)"] = files_digest(path)
        return out


def _is_installed(path: str) -> bool:
    return any(f"{os.sep}{name}{os.sep}" in path for name in INSTALLED)


def _is_loadable(path: Path) -> bool:
    if path.suffix == ".json" and path.is_file():
        content = path.read_bytes()
        return not all(key in content for key in REPORT)
    return path.suffix in LOADABLE and path.is_file()


def _mapped() -> set[str]:
    """The shared libraries in the memory of this process that no installation owns."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.partition("/")[2] for line in lines if re.search(r"/.*\.so(\.\d+)*$", line)}
    files = {f"/{path}" for path in paths}
    return {x for x in files if not x.startswith(tuple(f"{p}{os.sep}" for p in SYSTEM)) and not _is_installed(x)}
