"""The contents of the suite: functions with their laws, and what a profile runs."""

from collections.abc import Iterator

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import Collective
from conformance.core.space import Space
from conformance.engine.choose.draw import covering_cases
from conformance.engine.choose.profiles import EVERY, PROFILES
from conformance.usage import check_known


def contents(chosen: tuple[str, ...]) -> Iterator[str]:
    """Lines on every function, and on the profiles; or on the chosen functions, with the size of
    their covering arrays, which takes up to half a second each.

    Raises:
        UsageError: an unknown function.
    """
    check_known("--function", chosen, CONTRACTS)
    for name in chosen or CONTRACTS:
        yield from _function(name)
        if chosen:
            covered = covering_cases(name, Space())
            pairs = f"{covered.pairs} pairs of values; {covered.impossible} pairs are no legal call"
            yield f"  covering {len(covered.cases)} cases for {pairs}"
    if not chosen:
        yield from _profiles()


def _function(name: str) -> Iterator[str]:
    contract = CONTRACTS[name]
    yield f"{name}({', '.join(contract.optional)}) -> {', '.join(contract.outputs)}"
    if isinstance(contract, Collective):
        yield "  ranks    call it together, each with its own part and `group`"
    yield f"  laws     {', '.join(contract.laws)}"
    yield f"  illegal  {', '.join(contract.illegal)}"
    yield f"  golden   {', '.join(contract.golden)}"


def _profiles() -> Iterator[str]:
    for profile in PROFILES.values():
        for device, space in (("a CPU", Space()), ("a GPU", Space(device="cuda"))):
            amounts = {name: profile.amount(name, space) for name in CONTRACTS}
            for amount in dict.fromkeys(amounts.values()):
                rows = {0: "none", EVERY: "all"}.get(amount.rows, f"the first {amount.rows}")
                names = [name for name in CONTRACTS if amounts[name] == amount]
                counts = ", ".join(f"{name} {amount.structures(name)}" for name in names)
                yield f"profile {profile.name} on {device}: {amount.cases} cases per structure; drawn: {counts};"
                yield f"  rows of covering arrays: {rows}"
