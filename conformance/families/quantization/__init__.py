"""Low precision: formats, recipes, quantisers."""

from conformance.core.family import Family, by_function
from conformance.families.quantization import (
    defects,
    defects_combined,
    defects_edges,
    defects_inputs,
    defects_kernels,
    defects_reported,
    defects_rewritten,
    defects_shortcuts,
    golden,
    illegal,
    laws,
    machine,
    space,
)
from conformance.families.quantization.quantize import Quantize

FAMILY = Family(
    contracts=(Quantize(),),
    golden=by_function(golden),
    illegal=by_function(illegal),
    laws=by_function(laws),
    space=by_function(space),
    machines=by_function(machine),
    defects=defects.DEFECTS
    + defects_inputs.DEFECTS
    + defects_edges.DEFECTS
    + defects_kernels.DEFECTS
    + defects_combined.DEFECTS
    + defects_reported.DEFECTS
    + defects_rewritten.DEFECTS
    + defects_shortcuts.DEFECTS,
)
