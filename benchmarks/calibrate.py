"""Measure how far honest kernels differ, and set the limits of `conformance.judge.ratios`.

    python -m benchmarks.calibrate                 # this CPU; replaces its entry
    python -m benchmarks.calibrate --device cuda   # torch's tensor-core, grouped, split-K kernels
    python -m benchmarks.calibrate --runs 3 --dry  # prints only

Each run draws inputs, judges one honest variant of a contraction with another as the reference, and
keeps the largest ratio per rule. Maxima follow a Gumbel distribution, P(max ≤ k) ≈
exp(-exp(-(k - μ)/β)), fitted to their mean and deviation. At β ln(cases/α) above μ, a run rejects
an honest kernel with probability α:

    limit = max(least, largest measured, μ + β ln(cases / α))

over all machines, all kinds of contraction and the worst variant of each. `least` are the limits
without measurements: variants on one CPU differ less than matrix units of different machines.

Each calibration records the judge's numbers (`judged_with`). When one changes, the measurements are
out of date, and a test fails until every calibration is repeated.
"""

import argparse
import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.judge import bound
from conformance.judge import ratios as ratio_rules
from conformance.judge.bound import HOPPER_FP8, Accumulator, accumulating, contraction_bound
from conformance.judge.ratios import CALIBRATION, Limits, RowWise, row_wise
from tests.judge.tolerance_experiment import ORDERS, REGIMES, Kernel, contraction, layer, truth
from tests.judge.tolerance_fp8 import BlockKernel, ScaledFirst, block_truth, blocks

# at most three times the spread of the rounding; bias: in units of its allowance
LEAST = {"row": 2.0, "element": 2.5, "rms": 1.25, "bias": 1.0}
ALPHA, CASES = 1e-6, 100_000
EULER, VARIANCE = 0.5772156649015329, math.pi**2 / 6  # of the standard Gumbel distribution
# rows, terms, columns
SHAPES = ((256, 512, 64), (64, 96, 256), (2048, 256, 4), (8192, 128, 1), (32, 2048, 160), (128, 33, 128))
LONG_SHAPES = ((64, 2048, 64), (64, 16384, 64), (64, 65536, 64))  # of 16 bits into float32
SCALED_SHAPES = ((128, 64, 64), (128, 480, 64), (64, 2048, 64), (64, 7168, 64))  # FP8: 16 | each
WHOLE_PRODUCT = "one product"

Ratios = dict[str, float]
Run = tuple[str, Ratios]  # the variant, its largest ratio per rule


# ---- honest variants


def products(device: str, dtype: torch.dtype, shape: tuple[int, int, int], runs: int) -> Iterator[Run]:
    """One contraction: the reference in one order, the variant in another or by torch."""
    variants = [*ORDERS, "one by one", "native", "shuffled"]
    rows, terms, columns = shape
    for run in range(runs * len(variants)):
        source = np.random.default_rng(run)
        scaled = run // len(variants) % 3 == 0 and dtype != torch.float16
        scale = np.exp2(source.integers(-6, 7, (rows, 1))) if scaled else 1.0
        a = torch.from_numpy(source.standard_normal((rows, terms)) * scale).to(dtype)
        b = torch.from_numpy(source.standard_normal((columns, terms)) / terms**0.5).to(dtype)
        expected = expected_product(a, b, contraction(a.float(), b.float(), WHOLE_PRODUCT).to(dtype))
        order = variants[run % len(variants)]
        yield order, ratios(expected, product(a.to(device), b.to(device), order, source, dtype).cpu())


def long_products(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], one_sign: bool, runs: int
) -> Iterator[Run]:
    """Factors of 16 bits, a float32 result, many terms: the truncation of a matrix unit shows."""
    variants = ["blocks of 32", "split 4", "one by one", "native"]
    rows, terms, columns = shape
    for run in range(runs * len(variants)):
        source = np.random.default_rng(run)
        a, b = (torch.from_numpy(signed(source, n, terms, one_sign)).to(dtype) for n in (rows, columns))
        expected = expected_product(a, b, contraction(a.float(), b.float(), WHOLE_PRODUCT))
        order = variants[run % len(variants)]
        yield order, ratios(expected, product(a.to(device), b.to(device), order, source, torch.float32).cpu())


def signed(source: np.random.Generator, rows: int, terms: int, one_sign: bool) -> np.ndarray:
    """Normal numbers; of one sign, the errors of truncated terms add up."""
    x = source.standard_normal((rows, terms))
    return np.abs(x) if one_sign else x


def expected_product(a_MK: Tensor, b_NK: Tensor, reference_MN: Tensor) -> RowWise:
    rows, columns, terms = a_MK.double(), b_NK.double().T, a_MK.shape[1]
    magnitude, accumulator = rows.abs() @ columns.abs(), accumulating(torch.float32, a_MK.dtype)
    bounded = contraction_bound(rows @ columns, magnitude, terms, reference_MN.dtype, accumulator)
    return ratio_judged(
        row_wise(bounded, reference_MN, magnitude, terms, accumulator=accumulator, limits=Limits(**LEAST))
    )


def product(a_MK: Tensor, b_NK: Tensor, order: str, source: np.random.Generator, dtype: torch.dtype) -> Tensor:
    if order == "native" and dtype == a_MK.dtype:
        return a_MK @ b_NK.T
    if order == "native" and a_MK.is_cuda:
        return torch.mm(a_MK, b_NK.T, out_dtype=dtype)
    if order == "native":
        return a_MK.to(dtype) @ b_NK.T.to(dtype)
    if order == "shuffled":
        places = torch.from_numpy(source.permutation(a_MK.shape[1])).to(a_MK.device)
        return contraction(a_MK[:, places].float(), b_NK[:, places].float(), "blocks of 32").to(dtype)
    return contraction(a_MK.float(), b_NK.float(), order).to(dtype)


def grouped(device: str, dtype: torch.dtype, runs: int) -> Iterator[Run]:
    """torch's grouped kernel: four experts of unequal sizes."""
    for run in range(runs):
        source = np.random.default_rng(run)
        ends = torch.tensor([48, 64, 208, 320], dtype=torch.int32)
        terms, columns = int(source.choice([256, 1024, 4096])), 256
        a = torch.from_numpy(source.standard_normal((320, terms))).to(dtype)
        b = torch.from_numpy(source.standard_normal((4, columns, terms)) / terms**0.5).to(dtype)
        result = torch.nn.functional.grouped_mm(a.to(device), b.to(device).mT, offs=ends.to(device)).cpu()
        pieces = torch.tensor_split(torch.arange(320), ends[:-1].long())
        for expert, rows in enumerate(pieces):
            reference = contraction(a[rows].float(), b[expert].float(), WHOLE_PRODUCT).to(dtype)
            yield f"{terms} terms", ratios(expected_product(a[rows], b[expert], reference), result[rows])


def scaled_products(device: str, shape: tuple[int, int, int], one_sign: bool, runs: int) -> Iterator[Run]:
    """One contraction of E4M3 codes with one scale per factor, by torch and in several orders.

    use_fast_accum stays False: True never promotes, which exceeds HOPPER_FP8 from 128 terms on.
    """
    rows, terms, columns = shape
    variants = {f"native, {name}": (None, dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    variants |= {order: (order, torch.float32) for order in ORDERS}
    for run in range(runs * len(variants)):
        source = np.random.default_rng(run)
        scale = np.exp2(source.integers(-3, 4, (rows, 1))) if run // len(variants) % 3 == 0 else 1.0
        numbers = signed(source, rows, terms, one_sign) * scale, signed(source, columns, terms, one_sign)
        (a, scale_a), (b, scale_b) = (scaled_codes(torch.from_numpy(x).float()) for x in numbers)
        variant, (order, dtype) = list(variants.items())[run % len(variants)]
        expected = expected_scaled_product(a, b, scale_a * scale_b, dtype)
        if order is None:
            scales = scale_a.to(device), scale_b.to(device)
            result = torch._scaled_mm(
                a.to(device), b.to(device).T, *scales, out_dtype=dtype, use_fast_accum=False
            ).cpu()
        else:
            result = contraction(a.float(), b.float(), order) * (scale_a * scale_b)
        yield variant, ratios(expected, result)


def scaled_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and their scale."""
    scale = x.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def expected_scaled_product(
    a_MK: Tensor, b_NK: Tensor, scale: Tensor, dtype: torch.dtype, accumulator: Accumulator = HOPPER_FP8
) -> RowWise:
    rows, columns, terms = a_MK.double() * scale.double(), b_NK.double().T, a_MK.shape[1]
    magnitude = rows.abs() @ columns.abs()
    reference = (contraction(a_MK.float(), b_NK.float(), WHOLE_PRODUCT) * scale).to(dtype)
    bounded = contraction_bound(rows @ columns, magnitude, terms, dtype, accumulator)
    return ratio_judged(row_wise(bounded, reference, magnitude, terms, accumulator=accumulator, limits=Limits(**LEAST)))


def experts(runs: int) -> Iterator[Run]:
    """Two contractions with an activation between, as in `tests/judge/tolerance_experiment.py`."""
    for run in range(runs):
        inputs = layer(1000 + run, list(REGIMES)[run % len(REGIMES)])
        expected = ratio_judged(truth(inputs).expected)
        for order in ORDERS:
            yield order, ratios(expected, Kernel(order)(inputs))


def block_scaled(runs: int) -> Iterator[Run]:
    """FP8 codes with one scale per block, promoted after each block."""
    for run in range(runs):
        inputs = blocks(1000 + run)
        expected = ratio_judged(block_truth(inputs))
        for order in ORDERS:
            yield order, ratios(expected, BlockKernel(order)(inputs))
            yield f"{order}, scaled first", ratios(expected, ScaledFirst(order)(inputs))


def ratio_judged(expected: Any) -> RowWise:
    if not isinstance(expected, RowWise):
        raise TypeError(f"the inputs of a calibration are judged by {type(expected).__name__}; they must be by ratios")
    return expected


def ratios(expected: RowWise, observed: Tensor) -> Ratios:
    return {measure.rule: measure.ratio for measure in expected.measures(observed)}


def kinds(device: str) -> dict[str, Callable[[int], Iterator[Run]]]:
    """The calibrated kinds of contraction."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    out: dict[str, Callable[[int], Iterator[Run]]] = {
        f"{name} {'×'.join(map(str, shape))}": partial(products, device, dtype, shape)
        for name, dtype in names.items()
        for shape in SHAPES
    }
    signs = {"": False, ", one sign": True}
    out |= {
        f"{name} {'×'.join(map(str, shape))} into fp32{sign}": partial(
            long_products, device, names[name], shape, one_sign
        )
        for name in ("bf16", "fp16")
        for shape in LONG_SHAPES
        for sign, one_sign in signs.items()
    }
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        out["bf16 grouped"] = partial(grouped, device, torch.bfloat16)
        if torch.cuda.get_device_capability()[0] == 9:  # HOPPER_FP8 models this one only
            out |= {
                f"fp8 {'×'.join(map(str, shape))}{sign}": partial(scaled_products, device, shape, one_sign)
                for shape in SCALED_SHAPES
                for sign, one_sign in signs.items()
            }
        return out  # the other two are always emulated on the CPU
    return out | {"bf16 experts": experts, "fp8 blocks": block_scaled}


# ---- from maxima to limits


def summary(variant: str, maxima: list[float]) -> dict[str, Any]:
    """The moments of a variant's maxima, from which the Gumbel distribution is fitted."""
    return {
        "variant": variant,
        "runs": len(maxima),
        "mean": float(f"{statistics.fmean(maxima):.6g}"),
        "deviation": float(f"{statistics.stdev(maxima):.6g}"),
        "largest": float(f"{max(maxima):.6g}"),
    }


def worst_variant(rule: str, drawn: list[Run]) -> dict[str, Any]:
    """The summary with the highest limit: variants differ too much to be one distribution."""
    by_variant: dict[str, list[float]] = {}
    for variant, row in drawn:
        by_variant.setdefault(variant, []).append(row[rule])
    summaries = [summary(variant, maxima) for variant, maxima in by_variant.items()]
    return max(summaries, key=lambda summary: limit_of(summary, ALPHA, CASES))


def gumbel(moments: dict[str, Any]) -> tuple[float, float]:
    """μ and β by the method of moments."""
    beta = moments["deviation"] / math.sqrt(VARIANCE)
    return moments["mean"] - EULER * beta, beta


def limit_of(moments: dict[str, Any], alpha: float, cases: int) -> float:
    """The limit that one variant of a contraction needs."""
    mu, beta = gumbel(moments)
    return max(moments["largest"], mu + beta * math.log(cases / alpha))


def limits_of(record: dict[str, Any]) -> dict[str, float]:
    """The limits from all calibrations in a record."""
    wanted = {rule: [least] for rule, least in record["least"].items()}
    for calibration in record["calibrations"]:
        for rules in calibration["maxima"].values():
            for rule, moments in rules.items():
                wanted[rule].append(limit_of(moments, record["alpha"], record["cases"]))
    return {rule: math.ceil(max(values) * 1000) / 1000 for rule, values in wanted.items()}


def judged_with() -> dict[str, Any]:
    """The numbers and accumulators in the ratios' rules."""
    numbers: dict[str, Any] = {
        name: x for name, x in vars(ratio_rules).items() if name.isupper() and isinstance(x, (int, float))
    }
    return numbers | {name: asdict(x) for name, x in vars(bound).items() if isinstance(x, Accumulator)}


def digest(record: dict[str, Any]) -> str:
    """The digest of the record's other entries."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def measured(device: str, runs: int) -> dict[str, Any]:
    """The calibration of this machine: one kind of contraction per process."""
    names = list(kinds(device))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        maxima = dict(zip(names, processes.map(maxima_of, names, repeat(device), repeat(runs)), strict=True))
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {cpu_name()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "command": f"python -m benchmarks.calibrate --device {device} --runs {runs}",
        "date": date.today().isoformat(),
        "judged_with": judged_with(),
        "maxima": maxima,
    }


def maxima_of(kind: str, device: str, runs: int) -> dict[str, Any]:
    """The worst variant of one kind of contraction, per rule."""
    torch.set_num_threads(1)  # the products are small
    drawn = list(kinds(device)[kind](runs))
    maxima = {rule: worst_variant(rule, drawn) for rule in LEAST}
    shown = ", ".join(
        f"{rule} {moments['largest']:.4g} (needs {limit_of(moments, ALPHA, CASES):.4g})"
        for rule, moments in maxima.items()
    )
    print(f"{kind}: worst variants of {len(drawn)} runs: {shown}", flush=True)
    return maxima


def cpu_name() -> str:
    """The name of the processor, or its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=24, help="runs per variant and kind of contraction")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    calibration = measured(options.device, options.runs)
    earlier_calibrations = json.loads(CALIBRATION.read_text())["calibrations"] if CALIBRATION.exists() else []
    other_machines = [entry for entry in earlier_calibrations if entry["hardware"] != calibration["hardware"]]
    calibrations = [*other_machines, calibration]
    record: dict[str, Any] = {"alpha": ALPHA, "cases": CASES, "least": LEAST, "calibrations": calibrations}
    record["limits"] = limits_of(record)
    record["digest"] = digest(record)
    print("limits:", record["limits"])
    if not options.dry:
        CALIBRATION.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
