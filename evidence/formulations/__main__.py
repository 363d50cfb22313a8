"""Compares thousands of drawn cases; ends with 1 if the formulations differ on one."""

import argparse
import sys

import moe_ref
from conformance.catalogue import CONTRACTS
from evidence.formulations import everything
from evidence.formulations.agreement import cases, difference, played


def main() -> int:
    """Print the number of cases of each function, and of those on which the formulations differ."""
    parser = argparse.ArgumentParser(prog="python -m evidence.formulations", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each function (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn cases (default: 0)")
    parser.add_argument("--function", choices=CONTRACTS, help="this function alone")
    options = parser.parse_args()
    total = num_differing = 0
    for function in [options.function] if options.function else CONTRACTS:
        drawn = cases(function, options.cases, options.seed)
        differences = {case.text: difference(case, played(moe_ref, case), played(everything, case)) for case in drawn}
        differing = {text: reason for text, reason in differences.items() if reason}
        total, num_differing = total + len(drawn), num_differing + len(differing)
        print(f"{function:34}{len(drawn):8} cases{len(differing):6} differ", flush=True)
        for text, reason in differing.items():
            print(f"    {reason}\n    moe-conformance replay '{text}'", flush=True)
    print(f"{total} cases, {num_differing} differ")
    return 1 if num_differing else 0


if __name__ == "__main__":
    sys.exit(main())
