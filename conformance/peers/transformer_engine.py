"""The installed Transformer Engine, and nothing else: transformer_engine.pytorch on a GPU.

    pip install 'moe-conformance[te]'
    moe-conformance run --impl conformance.peers.transformer_engine

Functions, settings and dtypes that it lacks are not offered or declared unsupported; results and
errors pass through unchanged. What it does in its own way is declared: `zero_prob_rows` is found
by a call, and no `tie_rule` is promised. Calls are checked by the rules of `moe_ref.config` first,
because its kernels write out of bounds where counts and maps disagree.
"""

from moe_fast.te.adapter import Adapter
from moe_fast.te.package import installed

_adapter = Adapter(installed())
supports, declares = _adapter.supports, _adapter.declares
globals().update({name: getattr(_adapter, name) for name in _adapter.offered})
