"""The 134 features of Megatron's MoE, and what of this project has each: data of docs/coverage.md.

`calls` names judged functions, each with values of axes and with laws: "permute align=256
law:split; unpermute". What is there, judged and drawn is computed from it, and a name that does not
exist is an error.
"""

from dataclasses import dataclass

COLUMNS = ("ref", "fast", "contract", "GPU")
ALL = " ".join(COLUMNS)
# families of the recorded gate on a GPU, and its record in docs/results
GATE_ON_A_GPU = "gate-h200"
GATED_FAMILIES = ("router", "permutation", "quantization", "fused", "experts", "dispatch", "layer", "parameters")


@dataclass(frozen=True)
class Feature:
    """One feature."""

    number: int
    name: str
    calls: str = ""
    ref: str = ""  # names of moe_ref beside the calls
    fast: str = ""  # names of moe_fast beside the calls
    partly: str = ""  # columns in which only part of it is there
    lacks: str = ""  # columns that are no, although the calls would have them
    rule: bool = False  # a rule of the configuration, which needs no twin
    record: str = ""  # in docs/results, of what a GPU ran and no contract judges
    why: str = ""  # where a column is not yes


def feature(number: int, name: str, calls: str = "", why: str = "", **more: str | bool) -> Feature:
    return Feature(number, name, calls, why=why, **more)  # type: ignore[arg-type]


_MODULE = "the reference takes parameters as arguments; the module has tests and a training run, no contract"
_NO_QUANTILE = "`MoEConfig` refuses the name, which would be plain top-k, and `moe_router_quantile_balancing_ema`"
_INFERENCE = "an inference engine is not part of the project"
_NCCL_EP = "the library is not public, and Megatron alone calls it"
_STASH = "memory of the trainer, across layers; it changes no result of a layer"

ROUTER = (
    feature(1, "weight init and cast", why=_MODULE, fast="MoELayer", record="training"),
    feature(2, "router bias", "gate bias=True; moe_layer router_bias=True"),
    feature(3, "input jitter", "jitter eps=1 law:evenly_spread; moe_layer jitter=True"),
    feature(4, "router dtype None, fp32, fp64", "gate router_dtype=; gate router_dtype=fp32; gate router_dtype=fp64"),
    feature(5, "dtypes of the gate, forward and backward", "gate weight_dtype=float32 router_dtype=fp32 grads=x"),
    feature(6, "softmax after the choice", "topk_routing score=softmax topk=2 experts=4"),
    feature(7, "softmax before the choice", "topk_routing score=softmax_pre"),
    feature(8, "sigmoid", "topk_routing score=sigmoid"),
    feature(9, "sqrtsoftplus", "topk_routing score=sqrtsoftplus"),
    feature(10, "K = 1 is not normalised", "topk_routing score=sigmoid topk=1 experts=4"),
    feature(11, "scaling factor", "topk_routing scaling=20"),
    feature(12, "group-limited choice", "topk_routing experts=4 topk=2 groups=2 group_topk=1"),
    feature(13, "device-limited alias", ref="config.MoEConfig.moe_router_topk_limited_devices", rule=True),
    feature(14, "choice with expert bias", "topk_routing score=sigmoid bias=small"),
    feature(15, "bias update", "update_expert_bias; route bias=True steps=train+finish"),
    feature(16, "frozen bias", "route bias=True steps=train+frozen"),
    feature(
        17,
        "float32 buffers when loaded and saved",
        "route bias=True steps=train+reload; route bias=True steps=train+finish+narrow+train",
    ),
    feature(
        18,
        "Sinkhorn, training",
        "sinkhorn_routing evaluation=False",
    ),
    feature(
        19,
        "Sinkhorn, evaluation",
        "sinkhorn_routing evaluation=True",
    ),
    feature(20, "quantile balancing", why=_NO_QUANTILE),
    feature(21, "update of quantile balancing", why=_NO_QUANTILE),
    feature(22, "no balancing loss", "route losses="),
    feature(23, "auxiliary loss", "route losses=aux; load_balancing_loss"),
    feature(24, "auxiliary loss per sequence", "route losses=seq sequences=2 tokens=4"),
    feature(25, "global auxiliary loss, and its reset", "route losses=global steps=train+finish"),
    feature(26, "lists of losses", "route losses=aux+seq+global+z"),
    feature(27, "scores and map of the losses", "aux_loss_scores score=sigmoid topk=2 experts=4 padding=1"),
    feature(28, "z-loss", "z_loss padding=1; route losses=z"),
    feature(29, "losses attached to probs", "attach_loss scale=16 grads=x"),
    feature(
        30,
        "scale of the losses",
        "route scale=16 losses=aux",
        partly=ALL,
        why="the scale is an argument; Megatron's schedule, which sets a global of the process, is the trainer's",
    ),
    feature(31, "loss per token", "route per_token=True losses=aux"),
    feature(32, "repeated MTP layers", "route divisor=2 losses=aux"),
    feature(
        33,
        "metrics",
        "route losses=aux+seq+global+z",
        partly=ALL,
        why="losses are results; slots per layer and their reduction over ranks are the trainer's",
    ),
    feature(34, "padding mask", "route padding=2; moe_layer padding=2"),
    feature(
        35,
        "packed sequences",
        "route sequences=2 tokens=4",
        partly=ALL,
        why="`batch_size` is given by the caller; nothing finds it from a packed batch",
    ),
    feature(36, "capacity", "route capacity=2; moe_layer capacity=2", ref="expert_capacity", fast="expert_capacity"),
    feature(37, "drop by probs", "drop_tokens policy=probs"),
    feature(38, "drop by position", "drop_tokens policy=position"),
    feature(39, "pad to capacity", "drop_tokens pad=True; moe_layer capacity=2 pad=True"),
    feature(
        40, "forced balance", why="an option of benchmarks, refused by name: `route` takes any logits, random ones too"
    ),
    feature(
        41, "forced bias", why="an option of benchmarks, refused by name: `route` takes any logits, biased ones too"
    ),
    feature(42, "fused router", "topk_routing"),
    feature(43, "fused auxiliary loss", "aux_loss_scores; load_balancing_loss"),
    feature(44, "dense output", "topk_indices"),
    feature(45, "precomputed indices", "topk_indices precomputed=True; topk_routing precomputed=True law:replay"),
    feature(46, "replay: record", "route steps=record"),
    feature(47, "replay: forward", "route steps=record+forward"),
    feature(48, "replay: backward", "route steps=record+forward+backward"),
    feature(
        49, "replay from a static buffer", why="indices are results and arguments; where they are kept is the caller's"
    ),
    feature(50, "deterministic scatter", "topk_routing law:determinism; drop_tokens law:determinism"),
    feature(51, "router trace", why="a file of the trainer; `record` returns the indices that it would hold"),
    feature(52, "inference router", why=_INFERENCE),
    feature(
        53,
        "hash router [dev]",
        why="in no release of Megatron-Core, and refused by name; given indices are `precomputed_indices`",
    ),
    feature(54, "padding of the map", "pad_routing_map align=256"),
    feature(55, "padding of the map, fused", "pad_routing_map align=16 map_dtype=int32"),
)

PERMUTATION = (
    feature(56, "permute", "permute"),
    feature(57, "permute with probs", "permute probs=float32"),
    feature(58, "permute, drop and pad", "permute capacity=2"),
    feature(59, "permute and pad", "permute align=256"),
    feature(60, "unpermute", "unpermute"),
    feature(61, "unpermute with probs", "unpermute probs=float32 grads=probs"),
    feature(
        62,
        "pad offsets",
        "permute align=16",
        partly=ALL,
        why="they are a result, and judged; `unpermute` takes none, because the row map of `permute` has them",
    ),
    feature(63, "sort of chunks", "sort_chunks"),
    feature(64, "indices and maps", "indices_to_multihot repeats=True; multihot_to_indices"),
    feature(
        65,
        "batch-invariant map and unpermute",
        why="refused by name: another order of slots; sums of `unpermute` do not depend on the batch",
    ),
    feature(66, "deterministic sums", "unpermute law:determinism"),
)

DISPATCH = (
    feature(67, "all-gather", "allgather_dispatch; allgather_combine; moe_layer dispatcher=allgather counts=2,2"),
    feature(68, "all-to-all", "alltoall_dispatch; alltoall_combine; moe_layer dispatcher=alltoall counts=2,2"),
    feature(69, "all-to-all with tensor-parallel experts", "alltoall_dispatch shards=2; alltoall_combine shards=2"),
    feature(70, "all-to-all, sort of chunks", "alltoall_dispatch local_experts=3; sort_chunks"),
    feature(71, "drop and pad", "alltoall_dispatch capacity=2"),
    feature(72, "number of rows found by the dispatcher", "alltoall_dispatch; hybridep_dispatch"),
    feature(
        73,
        "copies to the host on a stream of their own",
        fast="dispatch.CountsOnHost",
        record="layer-h200",
        why="a copy has no values of its own to judge; a GPU has run 50 copies beside work that overwrites the counts",
    ),
    feature(
        74,
        "expansion of flex metadata",
        "flatten_experts shards=2",
    ),
    feature(
        75,
        "DeepEP",
        "deepep_layout; deepep_dispatch; deepep_cached_dispatch; deepep_combine; "
        "deepep_low_latency_dispatch; deepep_low_latency_combine; moe_layer dispatcher=deepep counts=2,2",
    ),
    feature(76, "DeepEP, slots of -1", "deepep_dispatch drop_zeros=True"),
    feature(
        77,
        "HybridEP",
        "hybridep_dispatch; hybridep_cached_dispatch; hybridep_combine; moe_layer dispatcher=hybridep counts=2,2",
    ),
    feature(
        78,
        "HybridEP, fused permutation and blocks",
        "hybridep_dispatch num_sms=1 num_blocks=3 law:fused; hybridep_combine num_sms=1 num_blocks=3; "
        "moe_layer counts=3,4 dispatcher=hybridep programs=3",
        fast="dispatch.symmetric.hybridep_dispatch",
    ),
    feature(
        79,
        "padding of uneven inputs",
        "hybridep_dispatch counts=2,3",
        partly=ALL,
        why="any number of tokens per rank is legal, so there is nothing to pad",
    ),
    feature(
        80,
        "rank budget and overflow",
        "hybridep_dispatch slack=-1; allgather_dispatch slack=-1; alltoall_dispatch slack=-2; "
        "moe_layer counts=4,3 dispatcher=hybridep budget=5; moe_layer counts=4,3 dispatcher=alltoall budget=5; "
        "moe_layer counts=5 dispatcher=deepep budget=7 law:host_sync; "
        "deepep_dispatch slack=2 trusted=True law:host_sync",
        ref="config.rank_budget",
        fast="within_budget",
    ),
    feature(81, "NCCL-EP, eager", why=_NCCL_EP),
    feature(82, "NCCL-EP, static", why=_NCCL_EP),
    feature(83, "zero copy", why=_NCCL_EP),
    feature(
        84,
        "MXFP8 on the wire",
        "hybridep_dispatch fp8=fp8",
        partly=ALL,
        why="rows travel as FP8 codes with a scale for each 128 columns, not for MXFP8's 32: in Megatron that form "
        "travels by NCCL-EP alone, which is not public",
    ),
    feature(85, "growth of the capacity", why=_NCCL_EP),
    feature(86, "paged stash", why=_STASH),
    feature(87, "paged stash on the host", why=_STASH),
    feature(
        88,
        "rule that reruns a step",
        "moe_layer counts=4,3 dispatcher=alltoall budget=7 rerun=True law:rerun",
        fast="within_budget",
    ),
    feature(
        89,
        "partial capture in CUDA graphs",
        "hybridep_dispatch law:graph_capture; route law:graph_capture; moe_layer law:graph_capture",
        fast="MoELayer.route MoELayer.run_experts",
        record="layer-h200",
    ),
    feature(90, "dispatch of inference", why=_INFERENCE),
    feature(91, "padding mask of inference", why=_INFERENCE),
)

EXPERTS = (
    feature(92, "grouped experts", "grouped_mlp tail=1; moe_layer"),
    feature(93, "sequential experts", "sequential_mlp law:grouped"),
    feature(94, "bias of fc1", "grouped_mlp bias1=float32; moe_layer fc1_bias=True"),
    feature(
        95,
        "bias of fc2 times p, list",
        "grouped_mlp bias2=float32 probs=float32",
        partly=ALL,
        why="with probs in float32, Megatron's, the promoted dtype is float32 and the two are one; with narrower "
        "probs Megatron's list rounds the product once more, and ours does not",
    ),
    feature(96, "bias of fc2 times p, packed", "grouped_mlp bias2=float32 probs=float32; moe_layer fc2_bias=True"),
    feature(97, "weighted SwiGLU", "glu probs=float32; moe_layer"),
    feature(98, "clamped SwiGLU", "glu clamp=8"),
    feature(99, "quick-GEGLU with offset and clamp", "glu kind=quick_geglu offset=8 clamp=56"),
    feature(100, "weighted squared ReLU", "activation probs=float32; moe_layer kind=squared_relu"),
    feature(101, "interleaved halves", "glu interleave=32"),
    feature(102, "probs on the input", "grouped_mlp on_input=True; moe_layer on_input=True"),
    feature(103, "activation kept in FP8", "glu stored=True grads=h; grouped_mlp stored=True"),
    feature(
        104,
        "Transformer Engine's activation",
        "glu early=True probs=float32; activation early=True probs=float32",
        ref="config.layer_config",
    ),
    feature(105, "table of alignments", ref="config.quantization_alignment", rule=True),
    feature(
        106,
        "padding of experts' rows, and its skip rule",
        "grouped_mlp align=256; moe_layer recipe=block align=16",
        ref="config.pads_expert_rows",
    ),
    feature(107, "splits on the device", "grouped_linear index_dtype=int32 law:host_sync law:graph_capture"),
    feature(
        108,
        "op fuser, and its gate",
        why="`conformance.peers.te` calls TE's fused operation where a release has it; there is no stage of its own",
    ),
    feature(109, "packed weights", "normalize_parameters packed=True weights=packed"),
    feature(110, "packed biases", "normalize_parameters packed=True biases=packed bias=True"),
    feature(111, "normalisation of keys", "normalize_parameters weights=indexed; convert_experts fc1=sequential"),
    feature(112, "extra state split and merged", "split_extra_state kept=whole law:round_trip; merge_extra_state"),
    feature(113, "keys of sharded checkpoints", "shard_parameters gated=True tensor_ranks=2 law:whole_again"),
    feature(114, "keys of optimizers", "normalize_master_parameters longer=indexed"),
    feature(115, "shard expansion for casts", "expand_shard shard=given law:reassembled; expand_shard shard=none"),
    feature(
        116,
        "recomputation of the activation",
        "grouped_mlp recompute=moe_act law:recompute; moe_layer grads=x+fc1_weight+fc2_weight law:kept",
    ),
    feature(
        117, "offloading", why="memory of the trainer: `torch.autograd.graph.save_on_cpu` does it around any layer"
    ),
    feature(
        118,
        "delayed weight gradients",
        "grouped_mlp grads=fc1_weight+fc2_weight law:delayed; moe_layer grads=fc1_weight law:delayed; "
        "grouped_wgrad into=float32",
        fast="MoELayer.backward_dw",
    ),
    feature(
        119,
        "weight gradients beside the dispatch",
        "moe_layer grads=fc1_weight law:delayed",
        fast="dispatch.overlap.in_backward MoELayer.backward_dw",
        partly="contract",
        record="layer-h200",
        why="a law judges the values; streams are compared with one stream by `benchmarks.streams`",
    ),
    feature(120, "empty experts", "grouped_mlp tokens=3 experts=2 counts=0,3"),
    feature(
        121,
        "tensor-parallel experts",
        "alltoall_combine shards=2; shard_parameters tensor_ranks=2; moe_layer counts=4,3 shards=2",
    ),
    feature(122, "inference experts", why=_INFERENCE),
)

LAYER = (
    feature(123, "order of the stages", "moe_layer"),
    feature(124, "shared experts", "shared_experts; moe_layer shared=2"),
    feature(125, "gate of the shared experts", "shared_experts gate=True; moe_layer shared=2 gate=True"),
    feature(
        126,
        "shared experts beside the dispatch",
        "moe_layer shared=2 law:overlap",
        fast="dispatch.overlap.beside",
        record="dispatch",
    ),
    feature(
        127,
        "fused shared experts",
        "shared_experts interleave=2 scaling=mxfp8; shared_experts law:one_group",
    ),
    feature(128, "latent projections", "latent_projection; moe_layer latent=3"),
    feature(
        129,
        "recomputation of the layer",
        "moe_layer grads=x law:recompute",
        fast="MoELayer",
        record="training",
    ),
    feature(130, "recomputation of the shared experts", "shared_experts again=True law:recompute"),
    feature(131, "1F1B split", why="a schedule of the trainer over several layers"),
    feature(132, "validation of the configuration", ref="config.MoEConfig config.layer_config", rule=True),
    feature(133, "upcycling", "upcycle law:copies"),
    feature(
        134,
        "choice of modules by backend",
        why="`conformance.peers.te` chooses by the installed release; an implementation is any namespace",
    ),
)

SECTIONS = {
    "Router": ROUTER, "Permutation": PERMUTATION, "Dispatch": DISPATCH, "Experts": EXPERTS, "Layer": LAYER,
}  # fmt: skip
