"""Laws of parameters: round trips, shards that make up the whole, and halves and copies."""

from dataclasses import replace
from typing import Any

import torch

from conformance.core import universal_laws as universal
from conformance.core.autocast import AUTOCAST
from conformance.core.law import Law, Trial, plain
from conformance.families.parameters.shards import FIELDS, members_of, parameters_of, settings_of, tensors_of
from conformance.families.parameters.states import Given, read
from conformance.interface import named_outputs
from conformance.judge import Exact, Expectation, Finding

WORLDS = range(1, 7)


def _round_trip(trial: Trial, turns: list[tuple[str, dict[str, Any]]]) -> Finding | None:
    """These calls, one after the other, give back the initial state."""
    problem = trial.problem
    build = trial.contract.build(trial.case)  # type: ignore[attr-defined]

    def script(implementation: Any, arguments: Given) -> dict[str, Any]:
        state = build(arguments)
        for function, changes in turns:
            settings = {name: arguments[name] for name in problem.settings} | changes
            state = implementation.call(function, state, **settings)
        return read(state, [])

    initial_state = read(build(problem.required), [])
    expectations: dict[str, Expectation] = {
        name: Exact(x, "integers" if x.dtype == torch.int64 else "bits") for name, x in initial_state.items()
    }
    return trial.judged("round_trip", expectations, trial.run(replace(problem, script=script)))


def _there_and_back(trial: Trial) -> Finding | None:
    """Into the other layout and back again."""
    packed = trial.case.packed
    turns = [(trial.case.function, {"packed": packed}), (trial.case.function, {"packed": not packed})]
    return _round_trip(trial, turns)


def _between_modules(trial: Trial) -> Finding | None:
    turns = [("convert_experts", {"layout": layout}) for layout in (trial.case.layout_to, _OTHER[trial.case.layout_to])]
    return _round_trip(trial, turns)


_OTHER = {"sequential": "grouped", "grouped": "sequential"}


def _split_and_merged(trial: Trial) -> Finding | None:
    return _round_trip(trial, [("split_extra_state", {}), ("merge_extra_state", {})])


def _in_other_layout(case: Any) -> bool:
    """Whether all of the layer's parameters are in the layout that is not asked for."""
    second_layout = "indexed" if case.packed else "packed"
    return plain(case) and case.weights == second_layout and (not case.bias or case.biases in ("none", second_layout))


def _one_master(case: Any) -> bool:
    second_layout = "indexed" if case.packed else "packed"
    return plain(case) and (case.first, case.second) == (second_layout, "none")


def _whole_and_told(case: Any) -> bool:
    """Whether the state is whole, and has its variables: merging adds them where there are none."""
    return plain(case) and case.kept == "whole" and not case.no_variables


def _one_layout(case: Any) -> bool:
    words = {case.fc1, case.fc2, case.biases} - {"none"}
    return plain(case) and words <= {"indexed" if case.layout_to == "sequential" else "sequential"}


def _whole_again(trial: Trial) -> Finding | None:
    """The shards of all ranks fill the checkpoint, each element once. A world of another size reads
    it.
    """
    case = trial.case
    world = [replace(case, place=position, layout="contiguous") for position in range(case.ranks * case.tensor_ranks)]
    calls = [(settings_of(rank_case), tensors_of(rank_case)) for rank_case in world]

    def script(implementation: Any, arguments: Given) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {}
        for rank_case, (settings, tensors) in zip(world, calls, strict=True):
            for shard in implementation.call("shard_parameters", parameters_of(rank_case, tensors), **settings):
                x = named_outputs(shard, FIELDS)
                if x["writes"]:
                    count, _ = checkpoint.setdefault(x["key"], (torch.zeros(x["shape"], dtype=torch.int64), x["shape"]))
                    count[tuple(slice(o, o + n) for o, n in zip(x["offset"], x["values"].shape, strict=True))] += 1
        return {name: count for name, (count, _) in checkpoint.items()}

    outputs = trial.run(replace(trial.problem, script=script, layouts={}))
    for name, count in outputs.items():
        if bool((count != 1).any()):
            index = tuple(int(i) for i in (count != 1).nonzero()[0])
            return Finding(name, "whole_again", f"{list(index)} is written {int(count[index])} times by all ranks")
    return None


def _reassembled(trial: Trial) -> Finding | None:
    """Split over W ranks, for every W: each rank has as many entries, and together they make up the
    master.
    """
    case, problem = trial.case, trial.problem
    total = sum(case.sizes)
    master = torch.arange(total, dtype=torch.float32)

    def script(implementation: Any, arguments: Given) -> dict[str, Any]:
        members, full_master = members_of(case, arguments["members"]), master.to(arguments["members"].device)
        outputs: dict[str, Any] = {}
        for ranks in WORLDS:
            out, length = torch.full_like(full_master, -1), -(-total // ranks)
            begins = [sum(case.sizes[:i]) for i in range(len(case.sizes))]
            for rank in range(ranks):
                first = min(rank * length, total)
                shard = full_master[first : first + length]
                entries = implementation.call("expand_shard", members, shard, **({"offset": first} if first else {}))
                outputs[f"entries.{ranks}.{rank}"] = torch.tensor([len(entries)])
                for begin, entry in zip(begins, entries, strict=False):
                    x = named_outputs(entry, ("member", "values", "start"))
                    if x["values"] is not None:
                        out[begin + x["start"] :][: len(x["values"])] = x["values"]
            outputs[f"master.{ranks}"] = out
        return outputs

    outputs = trial.run(replace(problem, script=script, layouts={}))
    entries = Exact(torch.tensor([len(case.sizes)]), "integers")
    expectations: dict[str, Expectation] = dict.fromkeys(
        (name for name in outputs if name.startswith("entries")), entries
    )
    expectations |= {f"master.{ranks}": Exact(master) for ranks in WORLDS}
    return trial.judged("reassembled", expectations, outputs)


def _copies(trial: Trial) -> Finding | None:
    """All copies of the dense layer are equal, and a router's row is that of its copy."""
    granularity, first = trial.case.granularity, trial.first
    for name, x in first.items():
        if name in trial.expected and name != "router_weight":
            first_copies = x[:granularity].repeat(trial.case.copies, *[1] * (x.dim() - 1))
            finding = trial.judged("copies", {name: Exact(first_copies)}, {name: x})
            if finding:
                return finding
    return None


ROUND_TRIP = Law("round_trip", _there_and_back, _in_other_layout)
_MOVES = universal.CALLS  # results may be views, so their inputs are not overwritten
_STATES = tuple(law for law in _MOVES if law is not AUTOCAST)  # their cases name no dtype
NORMALIZE_PARAMETERS = (*_MOVES, ROUND_TRIP)
NORMALIZE_MASTER_PARAMETERS = (*_MOVES, replace(ROUND_TRIP, applies=_one_master))
CONVERT_EXPERTS = (*_MOVES, Law("round_trip", _between_modules, _one_layout))
SHARD_PARAMETERS = (*_MOVES, Law("whole_again", _whole_again, plain))
EXPAND_SHARD = (*_MOVES, Law("reassembled", _reassembled, lambda case: plain(case) and case.grouped))
SPLIT_EXTRA_STATE = (*_STATES, Law("round_trip", _split_and_merged, _whole_and_told))
MERGE_EXTRA_STATE = _STATES
UPCYCLE = (*universal.EVERYWHERE, *universal.STATIC, Law("copies", _copies, plain))
