"""Laws of dispatchers find what passes as values, in worlds of real ranks.

Broken namespaces share one world: the width of its tokens says which of them a case has to do with.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import parent_process
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.contract import Problem
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.runner import Runner
from conformance.engine.choose.draw import scope_of
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.dispatch.cases import FUNCTIONS, DispatchCase
from conformance.mutants.kinds.calls import right_once_per_handle
from conformance.peers import reference_world

poison.install()

Wrapper = Callable[..., Any]


def two_ranks(function: str, **fields: Any) -> DispatchCase:
    """Four tokens each; the laws cut off the first token of rank 0 and the first two of rank 1, and
    give all of them to rank 1.
    """
    probs = "" if function == "deepep_low_latency_dispatch" else "float32"
    return DispatchCase(
        function=function,
        **{"counts": (4, 4), "local_experts": 2, "topk": 2, "probs": probs, "values": "integers", "seed": 1} | fields,
    )


# ---- defects


def turned(x: torch.Tensor) -> torch.Tensor:
    """Other rows."""
    return x.roll(1, 0)


def wrong_for(count: int) -> Wrapper:
    """A dispatch that gives a rank the wrong rows if it has so many tokens."""

    def dispatch(original: Wrapper, tokens: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        out = original(tokens, *arguments, **settings)
        return out._replace(rows=out.rows.flip(-1) + 1) if len(tokens) == count else out

    return dispatch


def wrong_slots_for(count: int) -> Wrapper:
    """A dispatch that names the experts of other slots if its rank has so many tokens."""

    def dispatch(original: Wrapper, tokens: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        out = original(tokens, *arguments, **settings)
        return out._replace(indices=turned(out.indices)) if len(tokens) == count else out

    return dispatch


def wrong_tokens_for(count: int) -> Wrapper:
    """A combine that gives a rank too much if it has so many tokens."""

    def combine(original: Wrapper, *arguments: Any, **settings: Any) -> Any:
        out = original(*arguments, **settings)
        tokens = out if isinstance(out, torch.Tensor) else out.tokens
        if len(tokens) != count:
            return out
        return tokens + 1 if isinstance(out, torch.Tensor) else out._replace(tokens=tokens + 1)

    return combine


def wrong_where_the_first_token_wants_the_first_expert(
    original: Wrapper, tokens: torch.Tensor, routing_map: torch.Tensor, **settings: Any
) -> Any:
    out = original(tokens, routing_map, **settings)
    return out._replace(rows=out.rows + 1) if len(tokens) and routing_map[0, 0] else out


def wrong_rows(original: Wrapper, *arguments: Any, **settings: Any) -> Any:
    out = original(*arguments, **settings)
    return out._replace(rows=turned(out.rows))


def wrong_probs(original: Wrapper, *arguments: Any, **settings: Any) -> Any:
    out = original(*arguments, **settings)
    return out._replace(probs=out.probs + 1)


def never_overflows(original: Wrapper, *arguments: Any, **settings: Any) -> Any:
    out = original(*arguments, **settings)
    return out._replace(overflow=torch.zeros_like(out.overflow))


_captured_with: dict[tuple[Any, ...], Any] = {}


def stale(output: str) -> Wrapper:
    """A dispatch that keeps its first output in the graph: the same for every routing."""

    def dispatch(original: Wrapper, tokens: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        out = original(tokens, *arguments, **settings)
        return out._replace(
            **{
                output: _captured_with.setdefault(
                    (original.__name__, output, tokens.shape), getattr(out, output)
                ).clone()
            }
        )

    return dispatch


def replayed(
    self: Runner, problem: Problem, replay: Problem, placed: dict[str, torch.Tensor], opaque: dict[str, Any] | None
) -> dict[str, Any]:
    """What a graph would give, on a CPU: the call once more, on what then stands in the inputs."""
    self._call(problem, placed, opaque)
    for name, master in replay.tensors.items():
        placed[name].copy_(master)
    return self._call(problem, placed, opaque)


if parent_process() is not None:  # in a rank
    Runner._captured = replayed  # type: ignore[method-assign]


HYBRID = two_ranks("hybridep_dispatch", align=4)
SLOTS = (2, 1, 3, 1)  # no first token goes to expert 0; upside down and in reverse, both do
TWINS: list[tuple[str, DispatchCase, str, dict[str, Wrapper]]] = [  # law, case, finding, mistakes
    *(
        ("concatenation", two_ranks(f"{name}_dispatch"), "rows", {f"{name}_dispatch": wrong_for(1)})
        for name in ("allgather", "alltoall", "hybridep")
    ),
    ("concatenation", two_ranks("deepep_dispatch"), "rows", {"deepep_dispatch": wrong_for(3)}),
    ("concatenation", two_ranks("deepep_dispatch"), "copies", {"deepep_dispatch": wrong_slots_for(3)}),
    ("concatenation", two_ranks("deepep_low_latency_dispatch"), "rows", {"deepep_low_latency_dispatch": wrong_for(3)}),
    *(
        ("concatenation", two_ranks(f"{name}_combine"), "layer", {f"{name}_combine": wrong_tokens_for(3)})
        for name in ("allgather", "alltoall", "deepep", "deepep_low_latency", "hybridep")
    ),
    *(
        ("refinement", two_ranks(f"{name}_dispatch"), "rows", {f"{name}_dispatch": wrong_for(8)})
        for name in ("allgather", "alltoall", "deepep", "deepep_low_latency", "hybridep")
    ),
    (
        "refinement",
        two_ranks("alltoall_dispatch", counts=(1, 3, 2, 2), shards=2),
        "rows",
        {"alltoall_dispatch": wrong_for(8)},
    ),
    ("refinement", two_ranks("deepep_combine"), "layer", {"deepep_combine": wrong_tokens_for(8)}),
    ("fused", HYBRID, "rows", {"permute": wrong_rows}),
    ("fused", HYBRID, "probs", {"permute": wrong_probs}),
    ("fused", replace(HYBRID, slack=-1), "overflow", {"permute": never_overflows}),
    ("fused", HYBRID, "rows", {"deepep_dispatch": wrong_rows}),
    ("dense", two_ranks("alltoall_dispatch"), "layer", {"alltoall_combine": wrong_tokens_for(4)}),
    ("dense", two_ranks("alltoall_dispatch"), "layer", {"deepep_combine": wrong_tokens_for(4)}),
    *(
        (
            "relabelling",
            two_ranks(f"{name}_dispatch", counts=(2, 2), topk=1, slots=SLOTS),
            "rows",
            {f"{name}_dispatch": broken},
        )
        for name in ("allgather", "alltoall", "hybridep")
        for broken in [wrong_where_the_first_token_wants_the_first_expert]
    ),
    *(
        ("handle_again", two_ranks(f"{name}_combine"), "tokens", {f"{name}_combine": right_once_per_handle()})
        for name in ("alltoall", "deepep")
    ),
    (
        "sequence",
        two_ranks("alltoall_dispatch", journey="send+back+first"),
        "2.tokens",
        {"alltoall_combine": right_once_per_handle()},
    ),
    (
        "sequence",
        two_ranks("deepep_dispatch", journey="send+again"),
        "1.rows",
        {"deepep_cached_dispatch": lambda original, *arguments, **settings: turned(original(*arguments, **settings))},
    ),
    (
        "graph_capture",
        two_ranks("alltoall_dispatch", capacity=2, counts=(4, 3)),
        "overflow",
        {"alltoall_dispatch": stale("overflow")},
    ),
    (
        "graph_capture",
        two_ranks("hybridep_dispatch", slack=0),
        "tokens_per_expert",
        {"hybridep_dispatch": stale("tokens_per_expert")},
    ),
    (
        "graph_capture",
        two_ranks("hybridep_dispatch", slack=-1, seed=2),
        "overflow",
        {"hybridep_dispatch": stale("overflow")},
    ),
    ("graph_capture", two_ranks("deepep_dispatch", slack=2), "indices", {"deepep_dispatch": stale("indices")}),
    (
        "graph_capture",
        two_ranks("deepep_low_latency_dispatch"),
        "tokens_per_expert",
        {"deepep_low_latency_dispatch": stale("tokens_per_expert")},
    ),
]
NARROWEST = 11


def of_its_width(name: str) -> Callable[..., Any]:
    """The reference's function; for tokens of a twin's width, what is broken there."""
    reference = getattr(reference_world, name)

    def call(payload: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        broken = TWINS[payload.shape[-1] - NARROWEST][3].get(name) if payload.shape[-1] >= NARROWEST else None
        return (
            broken(reference, payload, *arguments, **settings) if broken else reference(payload, *arguments, **settings)
        )

    return call


BROKEN = SimpleNamespace(
    **{name: of_its_width(name) for name in (*FUNCTIONS, "permute")},
    declares=lambda function: {"graph_capturable": True},
)


@pytest.fixture(scope="module")
def broken_world() -> Iterator[Pool]:
    with Pool(ChildOptions("tests.dispatch.test_laws:BROKEN", "cpu")) as pool:
        pool.start()
        yield pool


@pytest.mark.parametrize("twin", range(len(TWINS)), ids=lambda i: f"{TWINS[i][0]}-{TWINS[i][1].function}-{i}")
def test_what_breaks_a_law_passes_as_values_and_is_found_by_that_law(twin, broken_world):
    law, case, output, _ = TWINS[twin]
    case = replace(case, hidden=NARROWEST + twin)
    assert CONTRACTS[case.function].laws[law].applies(case)
    ((_, by_values),) = broken_world.run([case])
    assert (by_values.status, by_values.finding, by_values.reason) == ("PASS", None, "")
    ((_, by_law),) = broken_world.run([replace(case, law=law)])
    assert (by_law.status, by_law.finding and (by_law.finding["check"], by_law.finding["output"])) == (
        "FAIL",
        (law, output),
    ), by_law


def test_a_dispatcher_whose_graph_reads_its_inputs_again_keeps_the_law(broken_world):
    of_laws = (case for function in FUNCTIONS for case in scope_of(function, Space("cuda")).more([]))
    cases = [case for case in of_laws if case.law == "graph_capture"]
    outcomes = {
        case.function: (outcome.status, outcome.evaluations, outcome.finding)
        for case, outcome in broken_world.run(cases)
    }
    assert outcomes == dict.fromkeys(FUNCTIONS, ("PASS", 2, None))


def test_every_law_of_dispatchers_alone_has_a_twin():
    usual = {"history", "determinism", "buffer_reuse", "in_flight"}
    laws = {law.name for function in FUNCTIONS for law in CONTRACTS[function].laws.values() if not law.device} | {
        "graph_capture"
    }
    assert {law for law, *_ in TWINS} | {"adjointness"} == laws - usual
