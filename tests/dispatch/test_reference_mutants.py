"""The tests of the tests: mistakes that real dispatchers have had, planted in the reference, are
caught by the same claims.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import moe_ref
from tests.dispatch.worlds import CLAIMS, FIXED, fields, names

FILES = [
    "permutation.rows",
    *(
        f"dispatch.{name}"
        for name in (
            "plan",
            "exchange",
            "trees",
            "indices",
            "allgather",
            "alltoall",
            "deepep",
            "low_latency",
            "hybridep",
        )
    ),
]
FUNCTIONS = [name for name in moe_ref.__all__ if moe_ref._HOME[name].startswith("dispatch.")]


class Mistake(NamedTuple):
    file: str
    right: str
    wrong: str


MISTAKES = {
    "a prefix that is one too many": Mistake("dispatch.plan", "+ nth_R\n", "+ nth_R + (nth_R > 0)\n"),
    "an inclusive sum for an exclusive one": Mistake("dispatch.plan", "return x.cumsum(-1) - x", "return x.cumsum(-1)"),
    "sources in the order of the ranks for shards": Mistake(
        "dispatch.alltoall", "Layout(sources=sources, chunk", "Layout(chunk"
    ),
    "tokens before sources": Mistake(
        "dispatch.plan", "group_R.argsort(stable=True)", "group_R.flip(0).argsort(stable=True)"
    ),
    "duplicates that are not removed": Mistake("dispatch.plan", "== rank)].unique()", "== rank)].sort().values"),
    "a flag from clamped starts": Mistake(
        "dispatch.plan",
        "overflow_W=lost_E.reshape(ranks, -1).sum(1) > 0",
        "overflow_W=torch.minimum(start_WL[:, -1], limit_W) + count_EW.sum(1).reshape(ranks, -1)[:, -1] > limit_W",
    ),
    "starts without the padding": Mistake(
        "dispatch.plan", "start_WL = exclusive_sum(whole_WL)", "start_WL = exclusive_sum(whole_E.reshape(ranks, -1))"
    ),
    "one row past the budget": Mistake("dispatch.plan", "(row_R < limit_W", "(row_R <= limit_W"),
    "one row short of the budget": Mistake("dispatch.plan", "(row_R < limit_W", "(row_R + 1 < limit_W"),
    "one copy past the capacity": Mistake("dispatch.plan", "(nth_R < chunk_EW", "(nth_R <= chunk_EW"),
    "a flag on the last rank only": Mistake(
        "dispatch.plan", ".sum(1) > 0,", ".sum(1).mul(torch.arange(ranks) == ranks - 1) > 0,"
    ),
    "a flag for a full buffer": Mistake(
        "dispatch.plan", "overflow_W=lost_E.reshape(ranks, -1).sum(1) > 0", "overflow_W=whole_WL.sum(1) >= limit_W"
    ),
    "counts without padding": Mistake("dispatch.plan", "max=whole_WL)", "max=count_EW.sum(1).reshape(ranks, -1))"),
    "fillers that count as drops": Mistake("dispatch.plan", "expert_R[routed_R & ~fits_R]", "expert_R[~fits_R]"),
    "padding that is not zero": Mistake(
        "permutation.rows", "bits.new_zeros((len(source)", "bits.new_ones((len(source)"
    ),
    "probs of the wrong token": Mistake(
        "dispatch.plan", "self.local_experts + self.expert_R", "self.local_experts + self.slot_R"
    ),
    "a gradient that goes to the wrong rank": Mistake(
        "permutation.rows", "return ctx.transpose(dout), None", "return ctx.transpose(dout).flip(0), None"
    ),
    "a padding row that is read": Mistake(
        "dispatch.trees", "torch.cat(list(row_tokens))", "torch.cat(list(row_tokens)).clamp(min=0)"
    ),
    "ranks from the last to the first": Mistake(
        "dispatch.trees",
        "= round_to(partial_sums[0], between)\n",
        "= round_to((partial_sums := partial_sums[::-1])[0], between)\n",
    ),
    "a sum over ranks that is not rounded in between": Mistake(
        "dispatch.trees",
        "round_to(partial_sum, between)",
        "round_to(partial_sum, between).to(torch.float32 if between == torch.bfloat16 else between)",
    ),
    "all ranks in one flat sum": Mistake(
        "dispatch.trees",
        "partial_sums = [sum_rows(rows_P,",
        "partial_sums = [sum_rows(rows_P.float() if rows_P.dtype == torch.bfloat16 else rows_P,",
    ),
    "shards that are not added": Mistake(
        "dispatch.alltoall", "rows[first : first + shards], between", "rows[first : first + 1], between"
    ),
    "gradients of shards in the dtype of the probs": Mistake(
        "dispatch.alltoall",
        "partial(tree, between=tokens[0].dtype)",
        "partial(tree, between=(tokens if probs is None else probs)[0].dtype)",
    ),
    "gradients between ranks in float32": Mistake(
        "dispatch.allgather", "between=tokens[0].dtype)", "between=accumulator_dtype(tokens[0].dtype))"
    ),
    "columns of probs that are swapped": Mistake(
        "dispatch.deepep", "torch.where(i_DK >= 0, p_DK,", "torch.where(i_DK >= 0, p_DK.flip(1),"
    ),
    "probs of other ranks' experts": Mistake(
        "dispatch.deepep", "torch.where(i_DK >= 0, p_DK,", "torch.where(i_DK >= -1, p_DK,"
    ),
    "experts that keep their global number": Mistake(
        "dispatch.deepep", "torch.where(mine, index_DK - first,", "torch.where(mine, index_DK,"
    ),
    "a tail that looks like expert 0": Mistake("dispatch.deepep", " & (row_token != PADDING)[:, None]", ""),
    "a tail that is read": Mistake(
        "permutation.rows",
        "    real = source != PADDING\n    total",
        "    real = source >= PADDING\n    total",
    ),
    "biases behind the sum": Mistake(
        "permutation.rows",
        "round_to(total.index_add(",
        "round_to(total + torch.zeros_like(total).index_add(",
    ),
    "counts that are not rounded": Mistake(
        "dispatch.deepep", "round_up(plan.kept_WL, expert_alignment)", "round_up(plan.kept_WL, 1)"
    ),
    "weights applied twice": Mistake(
        "dispatch.low_latency", "weight_G[:, None] * take_rows", "weight_G[:, None] ** 2 * take_rows"
    ),
    "slots from the last to the first": Mistake(
        "dispatch.low_latency",
        "row_GK.unbind(1), prob_GK.unbind(1)",
        "row_GK.flip(1).unbind(1), prob_GK.flip(1).unbind(1)",
    ),
    "slots in another order": Mistake(
        "dispatch.low_latency", "slots + plan.slot_R", "slots + plan.slot_R.sort().values"
    ),
    "weights of empty slots that are read": Mistake(
        "dispatch.low_latency", "torch.zeros_like(prob_G), prob_G)", "prob_G, prob_G)"
    ),
    "a count where the begin belongs": Mistake("dispatch.low_latency", "exclusive_sum(count_LW) *", "count_LW *"),
    "tokens counted over all ranks": Mistake("dispatch.low_latency", "take_rows(local_G, token_P)", "token_P"),
    "probs that come back to the wrong expert": Mistake(
        "dispatch.hybridep", "torch.cat([plan.row_cells(rank)", "torch.cat([plan.row_cells(rank).flip(0)"
    ),
    "a gradient in one flat sum": Mistake(
        "dispatch.hybridep",
        "move(tokens, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))",
        "move(tokens, row_tokens)",
    ),
}


def with_mistake(mistake: Mistake | None) -> Any:
    """The dispatchers once more, made from their sources with the mistake in one of them."""
    modules = [f"moe_ref.{name}" for name in FILES]
    kept = {name: import_module(name) for name in modules}
    try:
        for name in modules:
            fresh = type(sys)(name)
            source = Path(str(kept[name].__file__)).read_text()
            if mistake is not None and name == f"moe_ref.{mistake.file}":
                assert source.count(mistake.right) >= 1, "the reference no longer has this line"
                source = source.replace(mistake.right, mistake.wrong, 1)
            sys.modules[name] = fresh
            exec(compile(source, f"{name} with a mistake", "exec"), fresh.__dict__)
        functions = {name: getattr(sys.modules[f"moe_ref.{moe_ref._HOME[name]}"], name) for name in FUNCTIONS}
        return SimpleNamespace(**functions, plan=sys.modules["moe_ref.dispatch.plan"])
    finally:
        sys.modules.update(kept)


def caught(namespace: Any, file: str = "") -> str | None:
    """The first claim that fails, in the order in which the file's own come first. Torch may also
    notice the mistake by itself.
    """
    own = file.removeprefix("dispatch.").replace("_", " ")
    for name, claim in sorted(CLAIMS.items(), key=lambda item: own not in item[0]):
        for w in FIXED:
            try:
                claim(namespace, w)
            except (AssertionError, IndexError, RuntimeError):
                return name
    return None


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_caught(mistake):
    assert caught(with_mistake(mistake), mistake.file) is not None


def test_without_a_mistake_nothing_is_caught():
    assert caught(with_mistake(None)) is None


def test_rows_that_are_numbered_in_32_bits_are_caught():
    line = "row_R = (start_WL.reshape(-1, 1) + exclusive_sum(chunk_EW)).flatten()[group_R] + nth_R"
    right, wrong = (
        with_mistake(mistake).plan
        for mistake in (None, Mistake("dispatch.plan", line, f"{line}.int()\n    row_R = row_R.int()"))
    )
    rows = [
        plan.plan_of_indices([torch.tensor([[0, 1]])], 2, plan.Layout(segment=2**32)).row_R.tolist()
        for plan in (right, wrong)
    ]
    assert rows == [[0, 2**32], [0, 0]]


def test_a_stale_handle_is_refused():
    w = FIXED[0]
    old, new = (moe_ref.alltoall_dispatch(names(w), w.maps) for _ in range(2))
    with pytest.raises(ValueError, match="AllToAllHandle of another call"):
        moe_ref.alltoall_combine([own.rows.float() for own in new], [new[0].handle, *fields(old, "handle")[1:]])
