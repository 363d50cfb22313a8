"""Every 16-bit number through every activation: outputs and gradients, judged as in the gate.

    PYTHONPATH=. python3 -m benchmarks.exhaustive [--impl moe_fast] [--seeds 8]

A case has each of the 65,536 bit patterns of its dtype once, in another order for each seed: of a
gated activation as gates, whose second operands also differ with the seed. The contract's own bound
judges every element of the output and of the gradient of h, NaN and infinities included.
`benchmarks.quantization --exact N` does the same for casts and quantisers.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import fast_interpreter
from conformance.engine.child import poison
from conformance.engine.child.child import chosen_device
from conformance.engine.child.evaluate import evaluate
from conformance.engine.run.explain import told
from conformance.families.experts.cases import ActivationCase
from conformance.interface import Implementation, load
from moe_ref.config import GATED, PLAIN

KINDS = {"glu": GATED, "activation": PLAIN}
EVERY: dict[str, Any] = {"tokens": 64, "width": 1024, "values": "every", "grads": "h"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"probs": "float32"},
    {"probs": "bfloat16", "early": True},
    {"clamp": 56},
    {"clamp": 56, "alpha": 1702, "offset": 8},
    {"interleave": 8},
    {"stored": True},
)
GATED_ONLY = ("clamp", "interleave", "stored")


def cases(function: str, kind: str, seeds: int) -> Iterator[ActivationCase]:
    """Both 16-bit dtypes with every setting that the kind has, `seeds` times each."""
    for settings in SETTINGS:
        if function == "activation" and any(name in settings for name in GATED_ONLY):
            continue
        for dtype in ("bfloat16", "float16"):
            for seed in range(seeds):
                case = ActivationCase(function=function, kind=kind, dtype=dtype, seed=seed, **EVERY, **settings)
                if case.clash() is None:
                    yield case


def judge(implementation: Implementation, function: str, kind: str, seeds: int, device: str) -> list[str]:
    """Judge an activation and print a line; returns the findings."""
    started, count, findings = time.perf_counter(), 0, []
    for case in cases(function, kind, seeds):
        outcome = evaluate(case, implementation, device)
        count += 1
        if outcome.status != "PASS":
            findings.append(f"{told(outcome)}\n  case {case.text}")
    numbers = count * EVERY["tokens"] * EVERY["width"]
    seconds = time.perf_counter() - started
    print(f"{function} {kind}: {count} cases, {numbers:,} numbers, {len(findings)} wrong, {seconds:.1f} s", flush=True)
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", default="moe_fast")
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    implementation, device = load(options.impl), chosen_device("auto")
    poison.install()
    fast_interpreter.install()
    findings = [
        finding
        for function, kinds in KINDS.items()
        for kind in kinds
        for finding in judge(implementation, function, kind, options.seeds, device)
    ]
    print("\n".join(findings) or f"{options.impl} on {device}: every result is right")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
