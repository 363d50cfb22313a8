"""Decides what a run judges, from --function, --where and the namespace's own scope."""

from dataclasses import dataclass, field
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.where import EVERYWHERE, Where, parsed
from conformance.engine.child.relations import judged_where
from conformance.engine.options import Options
from conformance.usage import UsageError, check_known


def asked(options: Options) -> Where:
    """The predicate of --where.

    Raises:
        UsageError: it is none, or --function names an unknown function.
    """
    check_known("--function", options.functions, CONTRACTS)
    return parsed(options.where, "--where")


def must_compare(baseline: dict[str, Any], options: Options) -> None:
    """Compare the options of the baseline with those of this run.

    Raises UsageError if the baseline was judged on other cases.
    """
    for flag, now in (("where", asked(options).text), ("sanitize", options.sanitize)):
        baseline_choice = baseline.get(flag, "")
        if baseline_choice != now:
            problem = (
                f"--baseline {options.baseline}: was judged with --{flag} {baseline_choice!r}, this run with {now!r}"
            )
            raise UsageError(f"{problem}; such runs cannot be compared")


def _algebraic(named: tuple[str, ...]) -> dict[str, Where]:
    """The cases of each function that identities can judge.

    Raises:
        UsageError: of a function that --function names there is none.
    """
    judged = {name: where for name, contract in CONTRACTS.items() if (where := judged_where(contract))}
    for name in named:
        if name not in judged:
            problem = f"--function {name} has no algebraic law, by which --sanitize fpsan judges"
            raise UsageError(f"{problem}; these have one: {', '.join(judged)}")
    return judged


@dataclass(frozen=True)
class Choice:
    """What is judged.

    functions: in the suite's order; without --function and --where all, also those not offered
    where: the predicate of each
    """

    functions: list[str] = field(default_factory=list)
    where: dict[str, Where] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, description: dict[str, Any]) -> "Choice":
        """The choice for an implementation, from a child's description.

        Raises:
            UsageError: a named function is not offered, or no case can match --where.
        """
        offered = [name for name in CONTRACTS if description["functions"][name]["offered"]]
        for name in options.functions:
            if name not in offered:
                problem = f"--function {name} is not offered by {options.implementation}"
                raise UsageError(f"{problem}, which offers {', '.join(offered) or 'no function that can be judged'}")
        functions = [name for name in CONTRACTS if not options.functions or name in options.functions]
        kinds = _algebraic(options.functions) if options.sanitize == "fpsan" else dict.fromkeys(CONTRACTS, EVERYWHERE)
        functions = [name for name in functions if name in kinds]
        where = asked(options)
        if where.terms:
            functions = where.applies([CONTRACTS[name] for name in functions if name in offered], "--where")
        scopes = {name: parsed(description["functions"][name].get("scope", ""), "scope") for name in functions}
        return cls(functions, {name: scope & where & kinds[name] for name, scope in scopes.items()})

    def holds(self, case: Case) -> bool:
        """Whether the case is judged, provided that its function is."""
        return self.where.get(case.function, EVERYWHERE).holds(case)
