"""A search for failing cases, from its options to what it has found."""

import tempfile
from contextlib import closing
from pathlib import Path

from conformance.engine.options import Options
from conformance.engine.run import interrupt
from conformance.engine.run.pool import Lost
from conformance.engine.run.search import Search, Searched
from conformance.engine.run.session import Session
from conformance.interface import UsageError


def fuzz(options: Options, minutes: float) -> Searched:
    """Search the chosen functions, or all offered ones, each for an equal share of the time.

    Failures are confirmed and reduced after the search. A signal, or the loss of the device, ends
    it with what was found.

    Raises:
        UsageError: an unknown function, one that is not offered, or an unusable implementation.
        CaseError: a kept file is no case.
    """
    searched = Searched()
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-") as folder,
        closing(Session(options, Path(folder), search=True)) as session,
    ):
        search = None
        try:
            with interrupt.interruptible():
                session.start()
                search = Search(session, _offered(session), 60 * minutes, searched)
                search.run()
        except KeyboardInterrupt:
            searched.ended_by = interrupt.reason() or "SIGINT"
        except Lost as error:
            searched.ended_by = f"the loss of the device ({error})"
        if search:
            search.end()
    return searched


def _offered(session: Session) -> list[str]:
    """The chosen functions that the implementation offers.

    Raises:
        UsageError: there is none.
    """
    functions = session.description["functions"]
    offered = [function for function in session.choice.functions if functions[function]["offered"]]
    if not offered:
        raise UsageError(f"{session.options.implementation} offers no function that can be judged")
    return offered
