"""Cases of parameters: the keys of a state, the way in which experts are split, and the tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.core.axes import choice, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.lists import parts
from conformance.core.tensors import payload
from moe_ref.config.experts import GATED, PLAIN

FLOATS = ("float32", "bfloat16", "float16", "float64")
PREFIX = "layers.0.experts."  # the prefix of a case that is `prefixed`
KEPT = ("none", "indexed", "packed", "some")  # some: the last expert's key is missing


@dataclass(frozen=True, kw_only=True)
class NearCase(Case):
    """A case without far tensors, because views have no addresses of their own."""

    def clash(self) -> str | None:
        return "parameters are never far" if self.layout.startswith("wide") else None


@dataclass(frozen=True, kw_only=True)
class StateCase(NearCase):
    """A state dict: of L experts, weights [M,N] and biases [M], by key."""

    experts: int = size("L", at_least=1, most=40, pairs=(1, 3))
    rows: int = size("M", most=20)
    columns: int = size("N", most=20)
    dtype: str = dtypes("float32", "bfloat16", "float8_e4m3fn", also=("float16", "float8_e5m2", "uint8", "float64"))
    packed: bool = flag(argument="packed")
    prefixed: bool = flag(argument="prefix")
    # of the layer; flat: [L·M,N]; members: a list; others: under a longer key, not the layer's
    weights: str = choice("indexed", "packed", "both", "some", "none", "flat", "members", of=("weight",))
    biases: str = choice("none", "indexed", "packed", "both", "some", "flat", of=("biases",))
    others: str = choice("none", "indexed", "packed", of=("weight",))
    bias: bool = flag(argument="bias")

    @property
    def has_bias(self) -> bool:
        return self.biases != "none"


@dataclass(frozen=True, kw_only=True)
class MasterCase(NearCase):
    """An optimizer's masters: the parameter under two prefixes, and one whose name is longer."""

    experts: int = size("L", at_least=1, most=40, pairs=(1, 3))
    rows: int = size("M", most=20)
    columns: int = size("N", most=20)
    dtype: str = dtypes("float32", "bfloat16", also=("float16", "float64"))
    packed: bool = flag(argument="packed")
    bare: bool = flag()  # the first prefix is empty
    first: str = choice("indexed", "packed", "some", "none")
    second: str = choice("none", "indexed", "packed", "rest")  # rest: the last expert's key alone
    longer: str = choice("none", "indexed", "packed")


@dataclass(frozen=True, kw_only=True)
class ConvertCase(NearCase):
    """A rank's experts: fc1 [M,N], fc2 [N,M], with or without biases, under these keys."""

    experts: int = size("L", at_least=1, most=40, pairs=(1, 3))
    rows: int = size("M", most=20)
    columns: int = size("N", most=20)
    dtype: str = dtypes("float32", "bfloat16", "float8_e4m3fn", also=("float16", "float64"))
    layout_to: str = choice("sequential", "grouped", argument="layout")
    prefixed: bool = flag(argument="prefix")
    fc1: str = choice("indexed", "packed", "sequential", "none", "flat", "members")
    fc2: str = choice("indexed", "packed", "sequential", "none", "flat")
    biases: str = choice("none", "indexed", "packed", "sequential", "flat")

    @property
    def has_bias(self) -> bool:
        return self.biases != "none"

    def clash(self) -> str | None:
        if self.layout_to == "grouped" and {"packed", "flat", "members"} & {self.fc1, self.fc2, self.biases}:
            return "packed parameters are grouped"
        return super().clash()


@dataclass(frozen=True, kw_only=True)
class ShardCase(NearCase):
    """A rank's experts: fc1 [M,N] or two halves of it, fc2 [N,M], M of one tensor rank."""

    experts: int = size("L", at_least=1, most=12, pairs=(1, 3))  # of a rank
    rows: int = size("M", most=20)
    columns: int = size("N", most=20)
    dtype: str = dtypes("float32", "bfloat16", "float8_e4m3fn", also=("float16", "float64"))
    ranks: int = size(at_least=1, most=5, pairs=(1, 3))
    tensor_ranks: int = size(at_least=1, most=4, pairs=(1, 2), argument="tensor_ranks")
    place: int = number(0, *range(1, 20), pairs=(5,), data=True)  # among all ranks, modulo their number
    names: str = choice("packed", "indexed", "flat")
    gated: bool = flag(argument="gated")
    singleton: bool = flag(argument="singleton")
    prefixed: bool = flag(argument="prefix")
    has_bias: bool = flag()

    @property
    def rank(self) -> int:
        return self.place % self.ranks

    @property
    def tensor_rank(self) -> int:
        return self.place // self.ranks % self.tensor_ranks

    @property
    def fc1_rows(self) -> int:
        return self.rows * (2 if self.gated else 1)

    def arguments(self) -> tuple[str, ...]:
        return ("tensor_rank",) if self.tensor_ranks > 1 else ()

    def clash(self) -> str | None:
        if self.names == "flat" and 1 in (self.fc1_rows, self.columns):
            return "a flat weight of one row for each expert has an entry for each"
        return super().clash()


@dataclass(frozen=True, kw_only=True)
class ExpandCase(NearCase):
    """Members of these sizes, and a shard of their elements."""

    sizes: tuple[int, ...] = parts(most=40)
    begin: int = number(0, *range(1, 60), pairs=(4,), data=True)  # of the shard, modulo the room that there is
    length: int = number(0, *range(1, 90), pairs=(7,), data=True)
    grouped: bool = choice(True, False)
    shard: str = choice("given", "none")
    dtype: str = dtypes("float32", "bfloat16", also=("float16", "float64"))

    @property
    def given(self) -> bool:
        return self.shard == "given"

    @property
    def offset(self) -> int:
        return self.begin % (sum(self.sizes) + 1)

    def arguments(self) -> tuple[str, ...]:
        return ("offset",) if self.offset else ()

    @property
    def count(self) -> int:
        return min(self.length, sum(self.sizes) - self.offset)


@dataclass(frozen=True, kw_only=True)
class ExtraStateCase(NearCase):
    """A grouped layer's FP8 state of L experts and A steps, whole or per expert."""

    experts: int = size(at_least=1, most=12, pairs=(1, 3))
    history: int = size("A", at_least=1, most=9)
    prefixed: bool = flag(argument="prefix")
    # gap, first: an expert's is missing; empty, empty_first: is {}; listed: is []; bytes: a tensor
    # of bytes; plain: no FP8
    kept: str = choice("whole", "split", "gap", "first", "empty", "empty_first", "listed", "plain", "bytes")
    others: bool = flag()  # keys of another layer
    no_variables: bool = flag()  # states lack extra_fp8_variables

    def clash(self) -> str | None:
        if self.function == "split_extra_state" and self.kept == "gap" and self.experts == 2:
            return "the first of two experts' states alone could be the whole layer's"
        return super().clash()


@dataclass(frozen=True, kw_only=True)
class UpcycleCase(NearCase):
    """A dense layer of width G·F, for X·G experts of width F."""

    copies: int = size(at_least=1, most=6, pairs=(1, 3))
    granularity: int = size(at_least=1, most=5, pairs=(1, 2), argument="granularity")
    width: int = size(most=12)
    hidden: int = size("H", most=20)
    topk: int = number(1, *range(2, 30), pairs=(1, 3), argument="topk")  # at most the number of experts
    kind: str = choice("swiglu", *PLAIN, also=GATED[1:], argument="kind")
    pre_softmax: bool = flag(argument="pre_softmax")
    fc1_bias: bool = flag(of=("fc1_bias",))
    fc2_bias: bool = flag(of=("fc2_bias",))
    dtype: str = dtypes("float32", "bfloat16", "float16", also=("float64",))

    @property
    def experts(self) -> int:
        return self.copies * self.granularity

    @property
    def fc1_rows(self) -> int:
        return self.granularity * self.width * (2 if self.kind in GATED else 1)


def stacked(case: Case, name: str, *shape: int) -> Tensor:
    """A tensor of the case's dtype, whose rows differ."""
    flat: Tensor = payload(case.seed, name, (shape[0] * shape[1], *shape[2:]) if len(shape) == 3 else shape, case.dtype)  # type: ignore[attr-defined]
    return flat.reshape(shape)


def columns_of(case: ExtraStateCase, name: str, columns: int) -> Tensor:
    """float32 [C·L], or [A,C·L] of a history."""
    shape = (case.history, columns * case.experts) if name.startswith("amax") else (columns * case.experts,)
    return payload(case.seed, name, shape, "float32").to(torch.float32)
