"""The defects of the toy family."""

from conformance.mutants.defect import Defect
from conformance.mutants.kinds.addresses import in_32_bits

DEFECTS = (Defect("TOY01", "32-bit row · stride", "a test", {"reverse": in_32_bits()}),)
