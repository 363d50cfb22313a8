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

What each rank has of a layer's inputs, weights, results and gradients, by dispatcher and by the axes
of ranks: `ep` share the experts, `tp` cut each expert's width, `dp` repeat the experts. Every rank has
tokens of its own. The page is written from the plans in `moe_ref/config/placement.py`:

    python -m benchmarks.placement > docs/placement.md

A plan is the layer as a list of steps with the letters of their operands, so `Plan.places()` finds
where every tensor is without computing any number. It raises where a step that is not linear reads a
partial sum, where a sum is added twice, and where a partial sum is left at the end that is not named
as the caller's: a layer that is right forward and partial in its gradients, say. An implementation may
write a plan of its own (`Plan`, `Step`) and ask the same.

*Whole*: the same on all ranks of the axis. *By token*, *by expert*, *by width*: each has its part.
*Partial sum*: the tensor is the sum over the ranks of the axis. `moe_ref.layer` and `moe_fast.layer`
have the axes `ep` and `tp` (`LayerConfig.expert_tensor_parallel`); `dp` is of a stage: `route` takes
the ranks that share a batch.
"""


def document() -> str:
    """docs/placement.md."""
    return "\n".join([INTRODUCTION, *(line for name in DISPATCHERS for line in _of_dispatcher(name))])


def _of_dispatcher(dispatcher: str) -> Iterator[str]:
    plans = [plan for (name, axes), plan in PLANS.items() if name == dispatcher and axes]
    yield f"## {dispatcher}\n"
    yield f"| tensor | {' | '.join(' × '.join(plan.axes) for plan in plans)} |"
    yield "|---|" + "---|" * len(plans)
    for name in (*INPUTS, *BETWEEN, *GRADIENTS):
        yield f"| `{name}` | {' | '.join(_place(plan, name) for plan in plans)} |"
    left = ", ".join(f"`{name}`" for name in plans[-1].left)
    text = f"Added on the way: {', '.join(map(_told, _added(plans[-1])))}. Left to the caller: {left}."
    yield "\n" + textwrap.fill(text, 100, break_on_hyphens=False) + "\n"


def _place(plan: Plan, name: str) -> str:
    place = plan.places()[name]
    return (
        WORDS[place["ep"]]
        if len(set(place.values())) == 1
        else " · ".join(f"{axis}: {WORDS[at]}" for axis, at in place.items())
    )


def _added(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The sums over ranks that some rank adds."""
    yield from ((step.out, step.over) for step in plan.steps if step.how == "reduce" and step.over)


def _told(added: tuple[str, tuple[str, ...]]) -> str:
    name, over = added
    return f"`{name}` over {' and '.join(over)}"


if __name__ == "__main__":
    print(document(), end="")
