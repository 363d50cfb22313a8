"""Names that other families' tables of axes still take from here. It goes away with the last of them."""

from conformance.families.experts.cases import COUNTS, CURVES, GATES

PLAIN = CURVES
__all__ = ("COUNTS", "GATES", "PLAIN")
