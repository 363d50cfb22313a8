"""moe_fast with large blocks: most problems fit into one."""

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other sizes)
from tests.honest.sizes import LARGE, LARGE_ON_GPU, use

__all__ = moe_fast.__all__

use(LARGE, LARGE_ON_GPU)
