"""Laws of the layer: those of every function.

Without gradients a router is not trained: results in inference mode differ.
"""

from conformance.core import universal_laws as universal
from conformance.core.shared_out_laws import of_one_process

_ALONE = (
    *(
        law
        for law in universal.EVERYWHERE
        if law not in (universal.HISTORY, universal.DETERMINISM, universal.INFERENCE_MODE)
    ),
    *universal.STATIC,
)
MOE_LAYER = (universal.HISTORY, universal.DETERMINISM, *of_one_process(*_ALONE))
