"""Namespaces to judge, and files, for the tests of the command line."""

import datetime
from pathlib import Path

NAMESPACES = {
    "two": "from moe_ref import permute, unpermute\n",
    "consuming": "from moe_ref import unpermute\n",
    "good": "import moe_ref\npermute = moe_ref.permute\n",
    # the rows of the third expert come in the opposite order
    "wrong": """
import moe_ref
import torch

def permute(tokens, routing_map, *, probs=None):
    out = moe_ref.permute(tokens, routing_map, probs=probs)
    third = (out.row_map.expert_P == 2).nonzero().flatten()
    order = torch.arange(len(out.rows))
    order[third] = third.flip(0)
    raw = out.rows.view(torch.uint8) if out.rows.element_size() == 1 else out.rows
    rows = raw[order].view(out.rows.dtype) if out.rows.element_size() == 1 else raw[order]
    return out._replace(rows=rows)
""",
    "raising": """
import moe_ref

def permute(tokens, routing_map, *, probs=None):
    if tokens.shape[1] > 3:
        raise RuntimeError("no kernel for so many columns")
    return moe_ref.permute(tokens, routing_map, probs=probs)
""",
    "refusing": """
import moe_ref
permute = moe_ref.permute

def supports(function, **arguments):
    return 1 / 0
""",
    "sleeping": """
import os, pathlib, time

def permute(tokens, routing_map):
    with pathlib.Path("asleep").open("a") as sessions:
        sessions.write(f"{os.getsid(0)} ")
    time.sleep(3600)
""",
    # MXFP8 alone
    "specialist": """
import moe_ref
from moe_ref import amax, codes, dequantize, permute, scales

scope = "scaling=mxfp8"

def quantize(x, recipe, **settings):
    if recipe.scaling != "mxfp8":
        raise RuntimeError("no such kernel")
    return moe_ref.quantize(x, recipe, **settings)
""",
    "nothing": "x = 1\n",
    "broken": "raise RuntimeError('no such card')\n",
    "leaving": "raise SystemExit(3)\n",
    "dying": "import os\nos._exit(3)\n",
    "unshaped": """
import moe_ref
permute = moe_ref.permute

def unpermute(rows, row_map, *, probs=None):
    return moe_ref.unpermute(rows, row_map, probs=probs)
""",
}
WAIVER = '[[waiver]]\nfunction = "permute"\nowner = "me"\nreason = "known"\nexpires = {}\n'
FILES = {
    "text.txt": "hello",
    "text.json": "hello",
    "list.json": "[1]",
    "number.json": '{"functions": 3}',
    "empty.json": '{"functions": {"permute": {}}}',
    "expired.toml": WAIVER.format("2020-01-01"),
    "bad.toml": "[[waiver]",
    "unused.toml": WAIVER.format(datetime.date.today() + datetime.timedelta(days=9)),
    "case_field.json": '{"case": {"function": "permute", "tokenz": 1}}',
    "case_type.json": '{"case": {"function": "permute", "tokens": "two"}}',
}


def smoke(implementation: str, *options: str) -> tuple[str, ...]:
    return ("run", "--impl", implementation, "--profile", "smoke", *options)


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    path.chmod(0o755)
