"""The layer: all stages together."""

from conformance.core.family import Family, by_function
from conformance.families.layer import (
    defects,
    defects_combined,
    defects_options,
    defects_reported,
    defects_rewritten,
    defects_shortcuts,
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
    defects=(
        *defects.DEFECTS,
        *defects_options.DEFECTS,
        *defects_combined.DEFECTS,
        *defects_reported.DEFECTS,
        *defects_rewritten.DEFECTS,
        *defects_shortcuts.DEFECTS,
    ),
)
