"""Judge a function by exported vectors, with numpy alone: a pattern for any language.

    moe-conformance export vectors --function permute
    python examples/read_vectors.py vectors

`docs/vectors.md` describes the files. `permute` below stands for the function to be judged.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WIDTHS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
RAW = {"BF16": "<u2", "BOOL": "u1", "U8": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1"}  # as unsigned words


class Tensor(NamedTuple):
    """An array with the name of its dtype: numpy has no bfloat16 and no 8-bit floats."""

    dtype: str
    words: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """float64; of every dtype but the 8-bit floats, whose codes are judged as bytes."""
        if self.dtype == "BF16":
            return (self.words.astype("<u4") << 16).view("<f4").astype(np.float64)
        return self.words.astype(np.float64)


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: a 64-bit length, a JSON header, the bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, start = json.loads(data[8 : 8 + length]), 8 + length
    out = {}
    for name, x in header.items():
        begin, end = (start + offset for offset in x["data_offsets"])
        kind = WIDTHS.get(x["dtype"]) or RAW[x["dtype"]]
        out[name] = Tensor(x["dtype"], np.frombuffer(data[begin:end], kind).reshape(x["shape"]))
    return out


def wrong(rule: dict[str, Any], tensors: dict[str, Tensor], y: Tensor | None) -> bool:
    """Whether an output breaks its rule."""
    if rule["rule"] == "unstated":
        return False
    if y is None:
        return not rule.get("may_be_absent", False)
    expected = tensors[rule["value"]]
    if rule["rule"] == "integers":
        return y.words.shape != expected.words.shape or bool((y.words.astype(np.int64) != expected.words).any())
    if y.words.shape != expected.words.shape or (rule["dtype"] and y.dtype != rule["dtype"]):
        return True
    if rule["rule"] == "bits":
        return y.words.tobytes() != expected.words.tobytes()
    if rule["rule"] == "equal":
        return not np.array_equal(y.numbers, expected.numbers, equal_nan=True)
    if rule["rule"] == "places":
        position = tensors[rule["places"]].words[y.words]
        return bool(((position < tensors[rule["least"]].words) | (position > tensors[rule["most"]].words)).any())
    if rule["rule"] == "interval":
        value, bound = expected.words, tensors[rule["bound"]].words
        with np.errstate(invalid="ignore"):
            near = (np.abs(y.numbers - value) <= bound) | (bound == np.inf)
        same = (y.numbers == value) | (np.isnan(y.numbers) & np.isnan(value))
        return not np.where(np.isfinite(value), near, same).all()
    raise ValueError(f"rule is {rule['rule']!r}, which this example does not read")


def judge(folder: Path, function: str, call: Any) -> tuple[int, list[str]]:
    """(cases judged, those that are wrong); a call returns outputs by name, or None to leave out a
    case.
    """
    tensors, judged, failed = load(folder / f"{function}.safetensors"), 0, []
    for case in json.loads((folder / f"{function}.json").read_text())["cases"]:
        if "must_raise" in case:
            continue
        arguments = {
            name: tensors[x["tensor"]] if "tensor" in x else x.get("value") for name, x in case["arguments"].items()
        }
        outputs = call(**arguments)
        if outputs is None:
            continue
        judged += 1
        # gradients are named d_…; this function has none
        rules = {name: rule for name, rule in case["outputs"].items() if not name.startswith("d_")}
        if any(wrong(rule, tensors, outputs.get(name)) for name, rule in rules.items()):
            failed.append(f"{case['id']}: {case['shown']}")
    return judged, failed


def permute(tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, **unknown_settings: Any) -> Any:
    """A row per routed token, by expert; without the settings that pad or drop rows."""
    if unknown_settings:
        return None
    expert, token = (routing_map.words != 0).T.nonzero()
    none = Tensor("BOOL", np.zeros((), "u1"))
    counts = Tensor("I64", (routing_map.words != 0).sum(0))
    outputs = {"rows": Tensor(tokens.dtype, tokens.words[token]), "tokens_per_expert": counts, "overflow": none}
    if probs is not None:
        outputs["probs"] = Tensor(probs.dtype, probs.words[token, expert])
    return outputs


if __name__ == "__main__":
    judged, failed = judge(Path(sys.argv[1]), "permute", permute)
    print("\n".join([f"{judged} cases judged, {len(failed)} wrong", *failed]))
    sys.exit(bool(failed) or not judged)
