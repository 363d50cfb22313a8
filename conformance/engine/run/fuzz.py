"""A search for failing cases, from its options to what it has found."""

import tempfile
from contextlib import closing
from pathlib import Path

from conformance.catalogue import CONTRACTS
from conformance.engine.options import Options
from conformance.engine.run import interrupt
from conformance.engine.run.pool import Lost
from conformance.engine.run.search import Search, Searched
from conformance.engine.run.session import Session
from conformance.interface import UsageError


def fuzz(options: Options, functions: list[str], minutes: float) -> Searched:
    """Search each function, all offered ones if none is named, for an equal share of the time.

    Failures are confirmed and reduced after the search. A signal, or the loss of the device, ends
    it with what was found.

    Raises:
        UsageError: an unknown function, one that is not offered, or an unusable implementation.
        CaseError: a kept file is no case.
    """
    for function in functions:
        if function not in CONTRACTS:
            raise UsageError(f"--function is {function!r}; known are {', '.join(CONTRACTS)}")
    searched = Searched()
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-") as folder,
        closing(Session(options, Path(folder), scores=True)) as session,
    ):
        search = None
        try:
            with interrupt.interruptible():
                session.start()
                search = Search(session, _offered(session, functions), 60 * minutes, searched)
                search.run()
        except KeyboardInterrupt:
            searched.ended_by = interrupt.reason() or "SIGINT"
        except Lost as error:
            searched.ended_by = f"the loss of the device ({error})"
        if search:
            search.end()
    return searched


def _offered(session: Session, functions: list[str]) -> list[str]:
    """The named functions, or all that the implementation offers.

    Raises:
        UsageError: there is none, or a named one is not offered.
    """
    known = session.description["functions"]
    offered = [function for function in CONTRACTS if known[function]["offered"]]
    for function in functions:
        if function not in offered:
            raise UsageError(f"--function {function} is not offered by {session.options.implementation}")
    if not offered:
        raise UsageError(f"{session.options.implementation} offers no function that can be judged")
    return functions or offered
