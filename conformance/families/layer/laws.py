"""Laws of the layer: the laws that every function has.

Without gradients a router is not trained: results in inference mode differ. Products by a recipe
are slow where they are emulated, and have all laws in their own families: here they have one.
"""

from dataclasses import replace

from conformance.core import universal_laws as universal
from conformance.core.law import Law
from conformance.core.shared_out_laws import of_one_process

_ELSEWHERE = (universal.HISTORY, universal.DETERMINISM, universal.INFERENCE_MODE)
_ALONE = (*(law for law in universal.EVERYWHERE if law not in _ELSEWHERE), *universal.STATIC)


def _unquantised(*laws: Law) -> tuple[Law, ...]:
    """The laws, for cases without a recipe."""
    return tuple(replace(law, applies=lambda case, law=law: not case.recipe and law.applies(case)) for law in laws)  # type: ignore[misc]


MOE_LAYER = (universal.DETERMINISM, *_unquantised(universal.HISTORY, *of_one_process(*_ALONE)))
