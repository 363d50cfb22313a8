"""moe_fast with the smallest useful blocks: every problem spans several."""

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other sizes)
from tests.honest.sizes import SMALL, use

__all__ = moe_fast.__all__

use(SMALL, SMALL)
