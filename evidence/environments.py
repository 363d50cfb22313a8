"""Environments under `.evidence`, which are kept.

Each has its own packages, and all have the caller's torch. Sources of repositories are read where
they lie.
"""

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".evidence"


class Unavailable(Exception):
    """Something that is not available on this machine, with the reason in one sentence."""


def environment(name: str) -> Path:
    """The Python of an environment, which finds the caller's packages after its own."""
    folder = FOLDER / "environments" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    paths = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (packages / "callers.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


def install(python: Path, *requirements: str, dependencies: bool = False) -> None:
    """Install packages, with their dependencies or without, once: what is installed is kept.

    Raises:
        Unavailable: the index does not have one of them, or it cannot be built here.
    """
    done = python.parents[1] / "installed"
    if not requirements or (done.exists() and done.read_text().split() == list(requirements)):
        return
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *requirements]
    command += [] if dependencies else ["--no-deps"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = [line.removeprefix("ERROR: ") for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable(f"pip cannot install {' '.join(requirements)}: {(errors or ['no reason given'])[-1]}")
    done.write_text("\n".join(requirements))


def install_source(python: Path, repository: str, revision: str, folder: str) -> None:
    """Put one folder of a repository's revision among the packages, once.

    Raises:
        Unavailable: the repository or the revision cannot be fetched.
    """
    done, made_of = python.parents[1] / "installed", f"{repository} {revision}"
    if done.exists() and done.read_text() == made_of:
        return
    where = ["git", "-C", str(source(repository))]
    if subprocess.run([*where, "rev-parse", "-q", "--verify", revision], capture_output=True).returncode:
        subprocess.run([*where, "fetch", "-q", "--depth", "1", "origin", "tag", revision], capture_output=True)
    packed = subprocess.run([*where, "archive", revision, folder], capture_output=True)
    if packed.returncode:
        raise Unavailable(f"{repository} has no revision {revision}")
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(packages, filter="data")
    done.write_text(made_of)


def run(python: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, with this checkout first on its path."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )


def source(repository: str) -> Path:
    """The folder of a repository on GitHub. A folder in `.evidence/sources` is used as it is.

    Raises:
        Unavailable: it cannot be fetched.
    """
    folder = FOLDER / "sources" / repository.split("/")[1]
    if not folder.exists():
        address = f"https://github.com/{repository}"
        command = ["git", "clone", "-q", "--depth", "1", address, str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"GIT_TERMINAL_PROMPT": "0"})
        if result.returncode:
            raise Unavailable(f"the source of {repository} cannot be fetched")
    return folder


def revision(folder: Path) -> str:
    """The commit of a source, shortened."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
