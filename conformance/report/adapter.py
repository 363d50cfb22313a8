"""Says what of a namespace is offered, what is missing, and what that means for a run."""

from typing import Any

from conformance.catalogue import CONTRACTS


def described(known: dict[str, Any]) -> tuple[int, str]:
    """How many functions are offered, and the whole story in lines."""
    lines, offered = (
        [
            f"on {known['device_name']}, {', '.join(f'{name} {version}' for name, version in known['versions'].items())}",
            "",
        ],
        0,
    )
    for name, contract in CONTRACTS.items():
        function = known["functions"][name]
        if not function["offered"]:
            lines.append(
                f"  --   {name}: not offered. It would be called as {_call(name)} and return {', '.join(contract.outputs)}"
            )
            continue
        offered += 1
        lines.append(f"  ok   {name}")
        if function["without"]:
            lines.append(f"         without {', '.join(function['without'])}: cases that need them are left out")
        for key, value in function["declares"].items():
            lines.append(f"         declares {key} = {value}")
    hint = "" if offered else " Name a function like one of these, at the top of the namespace."
    lines += ["", f"{offered} of {len(CONTRACTS)} functions can be judged.{hint}"]
    if known["functions"]["unpermute"]["offered"] and not known["functions"]["permute"]["offered"]:
        lines.append(
            "unpermute is judged through the row_map of this namespace's own permute, which is missing: none of its cases will run."
        )
    return offered, "\n".join(lines)


def _call(name: str) -> str:
    """The signature, of what one rank calls where the reference is called with lists over the ranks."""
    import inspect
    import re

    from conformance.interface import imported

    text = re.sub(
        r"collections\.abc\.Sequence\[([^\[\]]*)\]",
        r"\1",
        f"{name}{inspect.signature(getattr(imported('moe_ref'), name))}",
    )
    return (
        re.sub(r": moe_ref\.dispatch\.\w+\.\w+Handle", "", text)
        .replace("torch.", "")
        .replace("moe_ref.config.", "")
        .replace("moe_ref.permutation.", "")
    )
