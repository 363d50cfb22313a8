"""The installed Transformer Engine under our names, completed by `moe_fast`.

moe-conformance run --impl moe_fast.te.installed:adapter
"""

import moe_fast
from moe_fast.te.adapter import Adapter
from moe_fast.te.package import installed

adapter = Adapter(installed(), ours=moe_fast)
