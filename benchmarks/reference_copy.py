"""A copy of the reference under another name, so that its own automatic mutants can be judged.

python -m benchmarks.reference_copy FOLDER
PYTHONPATH=FOLDER moe-conformance mutants --impl moe_copy --kind automatic --sample 140

A mutant of `moe_ref` itself would change the oracle as well, and only golden cases and laws could
kill it. The copy has all its functions, and its collectives for one rank as in
`conformance.peers.reference_world`. Settings and rules (`moe_ref.config`) stay the reference's.
"""

import re
import shutil
import sys
from pathlib import Path

import conformance
import moe_ref

NAME = "moe_copy"
PEERS = {"reference_world": "__init__", "reference_layer": "peer_layer"}


def write(folder: Path) -> Path:
    """Write the package `moe_copy` into the folder; returns the package's folder.

    Raises:
        FileExistsError: there is one.
    """
    out, reference = folder / NAME, Path(str(moe_ref.__file__)).parent
    shutil.copytree(reference, out / "whole", ignore=shutil.ignore_patterns("__pycache__", "config"))
    for path in out.rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    for peer, name in PEERS.items():
        source = (Path(str(conformance.__file__)).parent / "peers" / f"{peer}.py").read_text()
        (out / f"{name}.py").write_text(renamed(source))
    for path in (reference / "config").glob("*.py"):
        module = f"moe_ref.config.{path.stem}".removesuffix(".__init__")
        target = out / "whole" / "config" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(f"from {module} import *\n")
    return out


def renamed(source: str) -> str:
    """The source with the copy in the place of the reference and its peers."""
    for peer, name in PEERS.items():
        source = source.replace(f"conformance.peers.{peer}", f"{NAME}.{name}".removesuffix(".__init__"))
    source = source.replace("import moe_ref\n", f"import {NAME}.whole as moe_ref\n")
    source = source.replace('f"moe_ref.{_HOME', f'f"{NAME}.whole.{{_HOME')
    return re.sub(r"\bfrom moe_ref\b(?!\.config)", f"from {NAME}.whole", source)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder to write into")
    print(write(Path(sys.argv[1])))
