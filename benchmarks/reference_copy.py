"""A copy of the reference under another name, so that its own automatic mutants can be judged.

python -m benchmarks.reference_copy FOLDER
PYTHONPATH=FOLDER moe-conformance mutants --impl moe_copy --kind automatic --sample 140

A mutant of `moe_ref` itself would change the oracle as well, and only golden cases and laws could
kill it. The copy has all its functions, and its collectives for one rank as in
`conformance.peers.reference_world`. Settings and rules (`moe_ref.config`) stay the reference's.
"""

import shutil
import sys
from pathlib import Path

import conformance
import moe_ref
from conformance.mutants.copies import of_copy

NAME = "moe_copy"
REFERENCE = f"{NAME}.whole"
PEERS = {"reference_world": NAME, "reference_layer": f"{NAME}.peer_layer"}


def write(folder: Path) -> Path:
    """Write the package `moe_copy` into the folder; returns the package's folder.

    Raises:
        FileExistsError: there is one.
    """
    out, reference = folder / NAME, Path(str(moe_ref.__file__)).parent
    shutil.copytree(reference, out / "whole", ignore=shutil.ignore_patterns("__pycache__", "config"))
    for path in out.rglob("*.py"):
        path.write_text(of_copy(path.read_text(), REFERENCE, PEERS))
    for peer, module in PEERS.items():
        source = (Path(str(conformance.__file__)).parent / "peers" / f"{peer}.py").read_text()
        file = module.removeprefix(f"{NAME}.") if module != NAME else "__init__"
        (out / f"{file}.py").write_text(of_copy(source, REFERENCE, PEERS))
    for path in (reference / "config").glob("*.py"):
        module = f"moe_ref.config.{path.stem}".removesuffix(".__init__")
        target = out / "whole" / "config" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_text(f"from {module} import *\n")
    return out


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder to write into")
    print(write(Path(sys.argv[1])))
