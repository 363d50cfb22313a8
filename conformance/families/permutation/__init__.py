"""Permutation: rows by expert, chunks, and forms of the routing map."""

from conformance.core.family import Family
from conformance.families.permutation.chunks import SortChunks
from conformance.families.permutation.defects import DEFECTS
from conformance.families.permutation.golden import GOLDEN
from conformance.families.permutation.illegal import RULES
from conformance.families.permutation.laws import LAWS
from conformance.families.permutation.permute import Permute, Unpermute
from conformance.families.permutation.routing_map import IndicesToMultihot, MultihotToIndices, PadRoutingMap
from conformance.families.permutation.space import SPACE

FAMILY = Family(
    contracts=(Permute(), Unpermute(), SortChunks(), PadRoutingMap(), IndicesToMultihot(), MultihotToIndices()),
    golden=GOLDEN,
    illegal=RULES,
    laws=LAWS,
    space=SPACE,
    defects=DEFECTS,
)
