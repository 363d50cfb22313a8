"""The plan: which copy of which token goes to which row of which rank, in integers. All dispatchers
share it.

A dispatcher is a layout (where rows are), a mover (how bytes get there) and a reduction tree (how
rows are added on the way back). The layout is a pure function of the routing of all ranks and is
computed here; `moe_ref.dispatch` adds movers and trees.

The world has W ranks. Rank r brings T_r tokens, any number, 0 included. Tokens are numbered over
all ranks: token t of rank r is number g = T_0 + … + T_{r-1} + t of G. Rank w holds the experts w·L
… w·L + L - 1 of E = W·L.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ref.config import PerRank, check_expert_split, check_index_values, check_map, require
from moe_ref.permutation.rows import PADDING


@dataclass(frozen=True)
class Layout:
    """The order of copies in a rank's buffer: by expert, then by source rank, then by token and
    slot.

    Expert 0 of two ranks; copies of the tokens 0, 1 come from rank 0, of 2 from rank 1; 3 on rank 1
    is not routed:

        Layout()                 0 1 2
        Layout(sources=(1, 0))   2 0 1
        Layout(chunk=2)          0 1 2 3        a chunk is filled by unrouted tokens
        Layout(chunk=1)          0 2            and copies past it are dropped
        Layout(align=4)          0 1 2 -1
        Layout(segment=5)        0 1 2 -1 -1
        Layout(num_rows=2)       0 1            the buffer ends here
    """

    sources: tuple[int, ...] | None = None  # order of the sources in a segment; None: ascending
    chunk: int | None = None  # rows per (expert, source): drop and pad; None: as many as were routed
    align: int | None = None  # each segment's length is a multiple of it; None: 1
    segment: int | None = None  # rows per segment: a slab; None: the rows of its chunks, aligned
    num_rows: int | None = None  # rows of the buffer: a budget; None: the rows of its segments


@dataclass(frozen=True)
class RoutePlan:
    """Every copy of a token that some expert asks for, and its row; R copies in all.

    Copies ascend by (token, slot); copies that only fill chunks follow. Two ranks of two tokens and
    two experts each, Layout(align=2), the experts of the tokens 0 … 3 being 0 2, 0, 0 3, 2:

        token_R  = 0 0 1 2 2 3      count_WE  = 2 0 1 0, 1 0 1 1
        slot_R   = 0 1 0 0 1 0      start_WL  = 0 4, 0 2
        expert_R = 0 2 0 0 3 2      kept_WL   = 3 0, 2 1
        row_R    = 0 0 1 2 2 1      length_WL = 4 0, 2 2      num_rows = 4 4

    Its `row_tokens` are 0 1 2 -1 on rank 0 and 0 3 2 -1 on rank 1.
    """

    tokens: tuple[int, ...]  # T of each rank
    local_experts: int  # L
    token_R: Tensor  # number of the token, over all ranks
    slot_R: Tensor  # the token's slot that asked
    expert_R: Tensor  # of W·L
    routed_R: Tensor  # bool: False for a copy that only fills a chunk
    row_R: Tensor  # row in the buffer of rank expert // L, or PADDING for a dropped copy
    count_WE: Tensor  # copies that each source was asked to send to each expert
    start_WL: Tensor  # first row of each expert's segment
    kept_WL: Tensor  # copies of each expert that have a row, fillers of chunks included
    length_WL: Tensor  # rows of each expert's segment inside the buffer, padding included
    overflow_W: Tensor  # bool: some routed copy has no row on that rank
    num_rows: tuple[int, ...]  # P of each rank

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def copies(self, rank: int) -> Tensor:
        """[P]: the copy in each row of the rank's buffer, or PADDING."""
        local_copies = ((self.row_R != PADDING) & (self.expert_R // self.local_experts == rank)).nonzero().flatten()
        copy_P = torch.full((self.num_rows[rank],), PADDING, device=local_copies.device)
        return copy_P.index_copy(0, self.row_R[local_copies], local_copies)

    def row_tokens(self, rank: int) -> Tensor:
        """[P]: the token in each row of the rank's buffer, or PADDING."""
        return _look_up(self.token_R, self.copies(rank))

    def row_tokens_of_ranks(self) -> tuple[Tensor, ...]:
        """`row_tokens` of every rank."""
        return tuple(self.row_tokens(rank) for rank in range(self.ranks))

    def row_cells(self, rank: int) -> Tensor:
        """[P]: token · E + expert of each row of the rank's buffer, or PADDING: its entry of the
        flattened probs.
        """
        return _look_up(self.token_R * self.ranks * self.local_experts + self.expert_R, self.copies(rank))

    def provenance(self, rank: int) -> Tensor:
        """[P,3]: source rank, token on that rank, and expert of each row of the rank's buffer, or
        PADDING.
        """
        source_G, local_G = owners(self.tokens, self.token_R.device)
        copy_P, columns = self.copies(rank), (source_G[self.token_R], local_G[self.token_R], self.expert_R)
        return torch.stack([_look_up(column, copy_P) for column in columns], dim=1)

    def distinct_tokens(self, rank: int) -> Tensor:
        """[D]: the tokens that some expert of the rank asks for, once each, ascending."""
        return self.token_R[self.routed_R & (self.expert_R // self.local_experts == rank)].unique()


def plan_of_maps(routing_maps: PerRank[Tensor], layout: Layout | None = None) -> RoutePlan:
    """The plan for the routing maps [T_r,E] of all ranks; a token's slots are its experts,
    ascending.

    With `layout.chunk` every unrouted (token, expert) is a copy too, after the routed ones: it
    fills a chunk that has too few of those.
    """
    for routing_map in routing_maps:
        check_map(routing_map)
    layout = layout or Layout()
    routed_GE = torch.cat([routing_map != 0 for routing_map in routing_maps])
    token_R, expert_R = routed_GE.nonzero().unbind(1)
    slot_R = (routed_GE.cumsum(1) - 1)[token_R, expert_R]
    routed_R = torch.ones_like(token_R, dtype=torch.bool)
    if layout.chunk is not None:
        filler_token, filler_expert = (~routed_GE).nonzero().unbind(1)
        token_R, expert_R = torch.cat([token_R, filler_token]), torch.cat([expert_R, filler_expert])
        slot_R = torch.cat([slot_R, torch.full_like(filler_token, PADDING)])
        routed_R = torch.cat([routed_R, torch.zeros_like(filler_token, dtype=torch.bool)])
    tokens = tuple(len(routing_map) for routing_map in routing_maps)
    return _plan(tokens, routed_GE.shape[1], token_R, slot_R, expert_R, routed_R, layout)


def plan_of_indices(indices: PerRank[Tensor], num_experts: int, layout: Layout | None = None) -> RoutePlan:
    """The plan for the expert indices [T_r,K] of all ranks; -1 is no expert, and a repeated expert
    gets two copies.
    """
    index_GK = torch.cat(list(indices)).long()
    check_index_values(index_GK, num_experts)
    token_R, slot_R = (index_GK != PADDING).nonzero().unbind(1)
    routed_R = torch.ones_like(token_R, dtype=torch.bool)
    tokens = tuple(len(rank_indices) for rank_indices in indices)
    return _plan(tokens, num_experts, token_R, slot_R, index_GK[token_R, slot_R], routed_R, layout or Layout())


def _plan(
    tokens: tuple[int, ...],
    num_experts: int,
    token_R: Tensor,
    slot_R: Tensor,
    expert_R: Tensor,
    routed_R: Tensor,
    layout: Layout,
) -> RoutePlan:
    """Give each copy its row.

        chunk[e,s]  = copies from source s to expert e               (or the layout's)
        whole[e]    = Σ_s chunk[e,s], rounded up to `align`          (or the layout's)
        start[e]    = Σ whole[e']   over the experts e' before e on the same rank
        row(copy)   = start[e] + Σ chunk[e,s'] of sources s' before s + copies from s to e before it

    A copy past its chunk, or whose row is past the buffer, is dropped. The starts do not depend on
    dropped copies: of a budget that is too small the last experts lose first, and of an expert the
    last sources and tokens.
    """
    ranks = len(tokens)
    check_expert_split(num_experts, ranks)
    sources = tuple(range(ranks)) if layout.sources is None else layout.sources
    require(sorted(sources) == list(range(ranks)), "sources", sources, f"an order of the ranks 0 … {ranks - 1}")
    source_G, _ = owners(tokens, token_R.device)
    turn_W = torch.tensor(sources, device=token_R.device).argsort()  # each source's place in the order
    group_R = expert_R * ranks + turn_W[source_G[token_R]]  # copies of one (expert, source) are neighbours
    groups = num_experts * ranks

    count_EW = torch.bincount(group_R[routed_R], minlength=groups).reshape(num_experts, ranks)
    chunk_EW = count_EW if layout.chunk is None else torch.full_like(count_EW, layout.chunk)
    whole_E = chunk_EW.sum(1) if layout.segment is None else torch.full_like(chunk_EW[:, 0], layout.segment)
    fullest = int(chunk_EW.sum(1).max())
    requirement = f"at least {fullest}, the copies that one expert gets"
    require(layout.segment is None or fullest <= layout.segment, "segment", layout.segment, requirement)
    whole_WL = round_up(whole_E, layout.align).reshape(ranks, -1)
    start_WL = exclusive_sum(whole_WL)

    nth_R = _number_in_group(group_R, groups)
    row_R = (start_WL.reshape(-1, 1) + exclusive_sum(chunk_EW)).flatten()[group_R] + nth_R
    limit_W = whole_WL.sum(1) if layout.num_rows is None else torch.full_like(whole_WL[:, 0], layout.num_rows)
    fits_R = (nth_R < chunk_EW.flatten()[group_R]) & (row_R < limit_W[expert_R // whole_WL.shape[1]])
    lost_E = torch.bincount(expert_R[routed_R & ~fits_R], minlength=num_experts)
    return RoutePlan(
        tokens=tokens,
        local_experts=whole_WL.shape[1],
        token_R=token_R,
        slot_R=slot_R,
        expert_R=expert_R,
        routed_R=routed_R,
        row_R=torch.where(fits_R, row_R, PADDING),
        count_WE=count_EW.T[turn_W],
        start_WL=start_WL,
        kept_WL=torch.bincount(expert_R[fits_R], minlength=num_experts).reshape(ranks, -1),
        length_WL=torch.clamp(limit_W[:, None] - start_WL, min=torch.zeros_like(whole_WL), max=whole_WL),
        overflow_W=lost_E.reshape(ranks, -1).sum(1) > 0,
        num_rows=tuple(limit_W.tolist()),
    )


def owners(tokens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rank that brings each of the G tokens, and the token's number on it."""
    sizes = torch.tensor(tokens, device=device)
    source_G = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)
    return source_G, torch.arange(len(source_G), device=device) - exclusive_sum(sizes)[source_G]


def round_up(count: Tensor, align: int | None) -> Tensor:
    """The smallest multiple of `align` that is no less."""
    return count if align is None else -(-count // align) * align


def exclusive_sum(x: Tensor) -> Tensor:
    """out[…, i] = Σ_{j<i} x[…, j]."""
    return x.cumsum(-1) - x


def _number_in_group(group_R: Tensor, groups: int) -> Tensor:
    """The number of copies of the same group before each copy."""
    order = group_R.argsort(stable=True)
    first = exclusive_sum(torch.bincount(group_R, minlength=groups))
    number = torch.arange(len(group_R), device=group_R.device) - first[group_R[order]]
    return torch.empty_like(number).index_copy(0, order, number)  # written whole: `order` is a permutation


def _look_up(values_R: Tensor, copy_P: Tensor) -> Tensor:
    """values[copy], or PADDING where the row holds no copy."""
    real = copy_P != PADDING
    return torch.full_like(copy_P, PADDING).masked_scatter(real, values_R[copy_P[real]])
