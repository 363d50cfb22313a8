"""Dispatch: moving rows between ranks and back."""

from conformance.core import universal_laws as universal
from conformance.core.family import Family
from conformance.families.dispatch import defects, defects_wire
from conformance.families.dispatch.deepep_layout import DeepEPLayout
from conformance.families.dispatch.golden import GOLDEN
from conformance.families.dispatch.illegal import RULES
from conformance.families.permutation.laws import ROW_REVERSAL
from conformance.families.permutation.space import DEEPEP_LAYOUT

FAMILY = Family(
    contracts=(DeepEPLayout(),),
    golden=GOLDEN,
    illegal=RULES,
    laws={"deepep_layout": (*universal.EVERYWHERE, *universal.STATIC, ROW_REVERSAL)},
    space={"deepep_layout": DEEPEP_LAYOUT},
    defects=(*defects.DEFECTS, *defects_wire.DEFECTS),
)
