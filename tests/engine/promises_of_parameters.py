"""What the draws of the functions on parameters must reach."""

from moe_ref.config import GATED
from tests.engine.promises import each

SIZES = {"one expert": lambda c: c.experts == 1, "more than ten experts": lambda c: c.experts > 10}
EXPERTS = SIZES | {"parameters without elements": lambda c: c.rows * c.columns == 0}
CUTS = {
    "a member without elements": lambda c: 0 in c.sizes,
    "no shard": lambda c: not c.given,
    "an empty shard": lambda c: c.given and c.count == 0,
    "a shard that begins within the members": lambda c: c.given and c.count and c.offset > 0,
    "one parameter": lambda c: not c.grouped,
    "ten members": lambda c: len(c.sizes) > 9,
}
PARAMETERS = {
    "normalize_parameters": EXPERTS | {"flat rows, one per expert": lambda c: c.weights == "flat" and c.rows == 1},
    "normalize_master_parameters": EXPERTS,
    "convert_experts": EXPERTS | {"layers in different layouts": lambda c: c.fc1 != c.fc2},
    "shard_parameters": {
        "one expert of a rank": SIZES["one expert"],
        "the last of several ranks": lambda c: c.rank == c.ranks - 1 > 0,
        "the last of several tensor ranks": lambda c: c.tensor_rank == c.tensor_ranks - 1 > 0,
        "biases that another tensor rank writes": lambda c: c.has_bias and c.tensor_rank > 0,
    },
    "expand_shard": CUTS,
    "split_extra_state": SIZES,
    "merge_extra_state": SIZES,
    "upcycle": each("kind", *GATED[1:]) | {"a copy of several slices": lambda c: c.granularity > 1 and c.copies > 1},
}
