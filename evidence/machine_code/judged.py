"""Which of the recorded configurations the cases of a gate on a GPU have judged.

    python -m evidence.machine_code.judged REPORT.json

The recording calls the functions at the sizes of four models, the gate draws its own cases. Both
are compared by the kernel, its constants and its warps, without arguments that are None. Warps of a
Gluon kernel are left out: a launch counts those of its partitions too.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before the first import of Triton

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evidence.machine_code.calls import calls
from evidence.machine_code.launches import Configuration, recorded

CONSTANT = re.compile(r"(?:^| )([A-Z][A-Z_0-9]*)=(\S+)")
WARPS = re.compile(r"(\d+) warps")
Chosen = tuple[str, frozenset[tuple[str, str]], str]  # kernel, constants, warps


def of_report(records: Iterable[dict[str, Any]]) -> set[Chosen]:
    """What the cases of a report have judged, from its `configurations`."""
    judged = [record for record in records if record["judged"]]
    return {(x["kernel"], frozenset(CONSTANT.findall(x["constants"])), _warps(x["options"])) for x in judged}


def of_recording(configuration: Configuration) -> Chosen:
    """A recorded configuration in the same form."""
    constants = {k: v.split(" ")[0] for k, v in configuration.named_constants.items() if CONSTANT.match(f"{k}=x")}
    return configuration.name, frozenset(constants.items()), str(configuration.options.get("num_warps"))


def _warps(options: str) -> str:
    match = WARPS.search(options)
    return match[1] if match else ""


def main(path: str) -> int:
    warnings.simplefilter("ignore")
    configurations = recorded(calls())[0]
    gluon = {key.name for key in configurations if key.kernel.is_gluon()}
    judged, chosen = (
        {(name, constants, "" if name in gluon else warps) for name, constants, warps in counts}
        for counts in (
            of_report(json.loads(Path(path).read_text())["configurations"].values()),
            map(of_recording, configurations),
        )
    )
    launched = {name for name, *_ in judged}
    elsewhere = sorted({name for name, *_ in chosen} - launched)  # in another namespace
    chosen = {key for key in chosen if key[0] in launched}
    counts, missing = Counter(x[0] for x in chosen), Counter(x[0] for x in chosen - judged)
    print("| kernel | recorded | judged |\n|---|--:|--:|")
    for kernel, count in sorted(counts.items()):
        print(f"| {kernel.removeprefix('moe_fast.')} | {count} | {count - missing[kernel]} |")
    print(f"\n{len(chosen & judged)} of {len(chosen)} recorded configurations were judged")
    print(f"kernels that no case launched: {', '.join(elsewhere) or 'none'}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
