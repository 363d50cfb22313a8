"""How much is tested: smoke in seconds, gate before a merge, nightly for as long as a night has."""

from dataclasses import dataclass

from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES

# how much of a run a function has: by how much can go wrong in it
WEIGHT = {
    "permute": 3,
    "unpermute": 3,
    "sort_chunks": 2,
    "topk_indices": 2,
    "topk_routing": 2,
    "route": 1.2,  # some of it over ranks
    **dict.fromkeys(("pad_routing_map", "indices_to_multihot", "multihot_to_indices", "deepep_layout"), 1),
    **dict.fromkeys(("drop_tokens", "aux_loss_scores", "load_balancing_loss", "z_loss"), 1),
    **dict.fromkeys(("gate", "jitter", "attach_loss", "update_expert_bias", "sinkhorn_routing"), 1),
    "quantize": 1,
    **dict.fromkeys(
        (
            "glu_and_quantize",
            "activation_and_quantize",
            "glu_backward_and_quantize",
            "activation_backward_and_quantize",
        ),
        0.5,
    ),
    "permute_and_quantize": 1,
    **dict.fromkeys(("glu", "activation", "grouped_linear", "grouped_dgrad", "grouped_wgrad"), 1),
    **dict.fromkeys(("grouped_mlp", "shared_experts"), 0.5),
    **dict.fromkeys(("sequential_mlp", "latent_projection"), 0.2),
    **dict.fromkeys(COLLECTIVES, 0.25),
}


@dataclass(frozen=True)
class Profile:
    """Counts of a profile."""

    name: str
    drawn: int  # drawn cases of a function, times its weight
    shards: int  # parts that the drawn cases of a function are split into, so that they can be spread over workers
    covering: bool  # whether the covering arrays are run
    least: int  # informative cases of an offered function, times its weight, below which too little was tested
    unsupported: float  # share of a function's cases that may be declared unsupported
    reduce_seconds: float  # for the smallest case of one failure

    def count(self, function: str) -> int:
        """Drawn cases of one shard of a function."""
        return int(-(-self.drawn * WEIGHT[function] // self.shards))

    def minimum(self, function: str) -> int:
        return int(self.least * WEIGHT[function])


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("smoke", drawn=6, shards=1, covering=False, least=3, unsupported=0.5, reduce_seconds=5),
        Profile("gate", drawn=60, shards=3, covering=True, least=40, unsupported=0.5, reduce_seconds=12),
        Profile("nightly", drawn=1500, shards=12, covering=True, least=800, unsupported=0.5, reduce_seconds=60),
    )
}
