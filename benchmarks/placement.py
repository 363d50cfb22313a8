"""Where the tensors of a layer are over the ranks: docs/placement.md from the plans.

python -m benchmarks.placement > docs/placement.md
"""

import textwrap
from collections.abc import Iterator

from moe_ref.config import DISPATCHERS
from moe_ref.config.placement import OF_RANKS, PARTIAL, PLANS, REPLICATED, Plan

WORDS = {"T": "by token", "E": "by expert", "F": "by width", "": "whole", PARTIAL: "**partial sum**"}
INPUTS = ("x", *REPLICATED, *OF_RANKS)
BETWEEN = ("rows", "expert_rows", "combined", "counts", "output")
GRADIENTS = ("d_x", *(f"d_{name}" for name in (*REPLICATED, *OF_RANKS)), "d_expert_rows", "d_rows", "d_probs")
INTRODUCTION = """# Where tensors are

Which part of a layer's inputs, weights, results and gradients each rank has, by dispatcher and by
the axes of ranks: `ep` share the experts, `tp` cut each expert's width, `dp` repeat the experts.
Every rank has tokens of its own. The page is written from the plans in
`moe_ref/config/placement.py`:

    python -m benchmarks.placement > docs/placement.md

- *Whole*: the tensor is the same on all ranks of the axis.
- *By token*, *by expert*, *by width*: each rank of the axis has its part.
- *Partial sum*: the tensor is the sum over the ranks of the axis.

`moe_ref.layer` and `moe_fast.layer` have the axes `ep` and `tp`
(`LayerConfig.expert_tensor_parallel`). The axis `dp` is for a stage alone: `route` takes the ranks
that share a batch.

A plan is the layer as a list of steps with the letters of their operands, so `Plan.places()` finds
where every tensor is without computing any number. It raises if a step that is not linear reads a
partial sum, if a sum is added twice, and if a partial sum is left at the end that is not named as
the caller's. For example, it finds a layer that is right forward and has partial gradients. An
implementation may write a plan of its own (`Plan`, `Step`) and check it in the same way.
"""


def document() -> str:
    """docs/placement.md: dispatchers with equal tables share one section."""
    sections: dict[str, list[str]] = {}
    for dispatcher in DISPATCHERS:
        sections.setdefault("\n".join(_table(dispatcher)), []).append(dispatcher)
    sections_of_page = [INTRODUCTION]
    for table, dispatchers in sections.items():
        sums = "\n".join(f"{_sums(dispatcher)}\n" for dispatcher in dispatchers)
        sections_of_page.append(f"## {', '.join(dispatchers)}\n\n{table}\n\n{sums}")
    return "\n".join(sections_of_page)


def _plans(dispatcher: str) -> list[Plan]:
    return [plan for (name, axes), plan in PLANS.items() if name == dispatcher and axes]


def _table(dispatcher: str) -> Iterator[str]:
    """A table with one row for all tensors that are in the same places."""
    plans = _plans(dispatcher)
    yield f"| tensors | {' | '.join(' × '.join(plan.axes) for plan in plans)} |"
    yield "|---|" + "---|" * len(plans)
    rows: dict[str, list[str]] = {}
    for name in (*INPUTS, *BETWEEN, *GRADIENTS):
        rows.setdefault(" | ".join(_place(plan, name) for plan in plans), []).append(f"`{name}`")
    yield from (f"| {', '.join(names)} | {cells} |" for cells, names in rows.items())


def _sums(dispatcher: str) -> str:
    """The sums over ranks that the layer adds, and those that it leaves to the caller."""
    plan = _plans(dispatcher)[-1]
    added = ", ".join(map(_told, _added(plan)))
    open_sums = ", ".join(f"`{name}`" for name in plan.open_sums)
    text = f"With {dispatcher} the layer adds {added}. It leaves to the caller: {open_sums}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _place(plan: Plan, name: str) -> str:
    placement = plan.places()[name]
    return (
        WORDS[placement["ep"]]
        if len(set(placement.values())) == 1
        else " · ".join(f"{axis}: {WORDS[at]}" for axis, at in placement.items())
    )


def _added(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The sums over ranks that some rank adds."""
    yield from ((step.out, step.axes) for step in plan.steps if step.rule == "reduce" and step.axes)


def _told(added: tuple[str, tuple[str, ...]]) -> str:
    name, axes = added
    return f"`{name}` over {' and '.join(axes)}"


if __name__ == "__main__":
    print(document(), end="")
