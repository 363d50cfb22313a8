"""Planted defects of parameters."""

from conformance.core.defect import Defect

DEFECTS: tuple[Defect, ...] = ()
