"""Permutation: rows by expert, chunks, and forms of the routing map."""

from conformance.core.family import Family, by_function
from conformance.families.permutation import (
    golden,
    illegal,
    laws,
    space,
)
from conformance.families.permutation.chunks import SortChunks
from conformance.families.permutation.permute import Permute, Unpermute
from conformance.families.permutation.routing_map import IndicesToMultihot, MultihotToIndices, PadRoutingMap

FAMILY = Family(
    contracts=(Permute(), Unpermute(), SortChunks(), PadRoutingMap(), IndicesToMultihot(), MultihotToIndices()),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws),
    space=by_function(space),
)
