"""The layer: all stages together."""

from conformance.core.family import Family, by_function
from conformance.families.layer import (
    golden,
    illegal,
    laws,
    space,
)
from conformance.families.layer.layer import MoeLayer

FAMILY = Family(
    contracts=(MoeLayer(),),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws),
    space=by_function(space),
)
