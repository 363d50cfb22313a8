"""moe_fast with the largest tactic of each table for problems of every size."""

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other choices)
from moe_fast.experts import hopper
from moe_fast.launch import tuning
from tests.honest.sizes import use, with_one_tactic

__all__ = moe_fast.__all__

use(with_one_tactic(tuning.INTERPRETER, -1), with_one_tactic(tuning.GPU, -1))
hopper.LARGE = 0  # rows of an expert from which tiles of codes are large
