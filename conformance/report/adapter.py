"""Lists the offered and the missing functions of a namespace."""

import inspect
import re
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.interface import imported


def described(description: dict[str, Any]) -> tuple[int, str]:
    """The number of offered functions, and the listing, from a child's description."""
    functions, versions = description["functions"], description["versions"].items()
    lines = [f"on {description['device_name']}, {', '.join(f'{name} {version}' for name, version in versions)}", ""]
    for name, contract in CONTRACTS.items():
        function = functions[name]
        if not function["offered"]:
            call = f"It would be called as {_call(name)} and return {', '.join(contract.outputs)}"
            lines.append(f"  --   {name}: not offered. {call}")
            continue
        lines.append(f"  ok   {name}")
        if function["without"]:
            lines.append(f"         without {', '.join(function['without'])}: cases that need them are left out")
        if function.get("scope"):
            lines.append(f"         scope {function['scope']}: other cases are left out")
        lines += [f"         declares {key} = {value}" for key, value in function["declares"].items()]
    offered = [name for name in CONTRACTS if functions[name]["offered"]]
    hint = "" if offered else " Name a function like one of these, at the top of the namespace."
    lines += ["", f"{len(offered)} of {len(CONTRACTS)} functions can be judged.{hint}"]
    for name in offered:
        calls = [call for call, _ in CONTRACTS[name].golden.values()]
        producers = (
            {call.producer.function for call in calls if call.producer} if all(c.producer for c in calls) else ()
        )
        for producer in producers:
            if not functions[producer]["offered"]:
                reason = f"takes results of this namespace's own {producer}, which is missing"
                lines.append(f"{name} {reason}: none of its cases will run.")
    return len(offered), "\n".join(lines)


def _call(name: str) -> str:
    """The reference's signature without module names; a collective's with one rank's arguments."""
    text = f"{name}{inspect.signature(getattr(imported('moe_ref'), name))}"
    text = re.sub(r"collections\.abc\.Sequence\[([^\[\]]*)\]", r"\1", text)
    text = re.sub(r": moe_ref\.dispatch\.\w+\.\w*Handle", "", text)
    return re.sub(r"\b(?:torch|moe_ref)\.(?:[a-z_]+\.)*", "", text)
