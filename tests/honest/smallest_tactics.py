"""moe_fast with the smallest tactic of each table for problems of every size."""

import math

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other choices)
from moe_fast.experts import hopper
from moe_fast.launch import tuning
from tests.honest.sizes import use, with_one_tactic

__all__ = moe_fast.__all__

use(with_one_tactic(tuning.INTERPRETER, 0), with_one_tactic(tuning.GPU, 0))
hopper.LARGE = math.inf  # rows of an expert from which tiles of codes are large
