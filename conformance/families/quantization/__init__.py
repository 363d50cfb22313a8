"""Low precision: formats, recipes, quantisers."""

from conformance.core.family import Family, by_function
from conformance.families.quantization import (
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
)
