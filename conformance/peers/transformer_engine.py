"""The installed Transformer Engine: transformer_engine.pytorch on a GPU.

    pip install 'moe-conformance[te]'
    moe-conformance run --impl conformance.peers.transformer_engine             # nothing else
    moe-conformance run --impl conformance.peers.transformer_engine:completed   # and moe_fast

Functions, settings and dtypes that it lacks are not offered or declared unsupported; results and
errors pass through unchanged. What it does in its own way is declared: `zero_prob_rows` is found
by a call, and no `tie_rule` is promised. Calls are checked by the rules of `moe_ref.config` first,
because its kernels write out of bounds where counts and maps disagree.

`completed` gives `moe_fast` what Transformer Engine lacks, and the calls that it does wrongly.
"""

from typing import Any

from conformance.interface import imported
from conformance.peers.te import Adapter
from conformance.peers.te.package import installed

OURS = "moe_fast"
alone = Adapter(installed())
supports, declares = alone.supports, alone.declares
globals().update({name: getattr(alone, name) for name in alone.offered})


def __getattr__(name: str) -> Any:
    """`completed`, which imports the implementation that completes Transformer Engine."""
    if name != "completed":
        raise AttributeError(name)
    return Adapter(installed(), ours=imported(OURS))
