"""Low precision: formats, recipes, quantisers."""

from conformance.core.family import Family
from conformance.families.quantization.defects import DEFECTS
from conformance.families.quantization.golden import GOLDEN
from conformance.families.quantization.illegal import RULES
from conformance.families.quantization.laws import LAWS
from conformance.families.quantization.quantize import Quantize
from conformance.families.quantization.space import SPACE

FAMILY = Family(contracts=(Quantize(),), golden=GOLDEN, illegal=RULES, laws=LAWS, space=SPACE, defects=DEFECTS)
