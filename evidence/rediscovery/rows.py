"""The defects to find again: which release has each, which mended it, and why a row is not run."""

from dataclasses import dataclass

MEGATRON, ENGINE = "megatron-core", "transformer-engine"
REPOSITORY = "NVIDIA/Megatron-LM"  # has releases that the index lacks
MAIN = "main"  # its newest revision


@dataclass(frozen=True)
class Row:
    """One defect of one package. `why` says why it is not run, or not shown."""

    bug: str
    title: str
    package: str
    broken: str  # a release with the defect
    mended: str | None  # the release that is said to have mended it; None: none has
    check: str | None = None
    why: str = ""
    mended_later: str | None = None  # where that release still fails: the one that passes
    on_a_gpu: bool = False  # judged by a run on a GPU, which is kept


def _megatron(bug: str, title: str, broken: str, mended: str | None, check: str | None = None, why: str = "", mended_later: str | None = None) -> Row:  # fmt: skip  # noqa: E501
    return Row(bug, title, MEGATRON, broken, mended, check, why, mended_later)


def _engine(bug: str, title: str, broken: str, mended: str | None, check: str | None = None, why: str = "") -> Row:
    return Row(bug, title, ENGINE, broken, mended, check, why)


def _compiled(bug: str, title: str, since: str) -> Row:
    """A row of compiled kernels, judged in the two releases that are packed for a GPU."""
    return Row(bug, f"{title} (mended in {since})", ENGINE, *PACKED, check=bug.lower(), on_a_gpu=True)


PACKED = "2.11.0", "2.20.2"
UNPACKED = "It needs compiled kernels of a release that has no core for CUDA 13, so that none was packed for a GPU."
NO_GPU = "It needs Transformer Engine's compiled kernels and a GPU."
BLACKWELL = "It needs a GPU with the matrix units of Blackwell."

ROWS = (
    _megatron("R05", "groups are ranked by two experts, whatever K is", "0.11.0", "0.12.0", "r05"),
    _megatron("A09", "the balancing loss of a sigmoid router is made of softmax scores", "0.11.0", "0.12.0", "a09"),
    _megatron("R08", "the expert bias becomes bfloat16 with its module", "0.11.0", "0.12.0", "r08"),
    _megatron("A10", "a recomputed forward counts its loss twice", "0.10.0", "0.11.0", "a10", mended_later="0.12.0"),
    _megatron("R10", "jitter turns bfloat16 into float32", "0.14.0", "0.15.0", "r10"),
    _megatron("R09", "scores of the loss are computed in bfloat16", "0.16.1", "0.17.0", "r09"),
    _megatron("L05", "upcycling of several chunks swaps its arguments", "0.16.1", MAIN, "l05"),
    _megatron("D05", "a multiple that padding cannot reach goes unreported", "0.16.1", None, "d05"),
    _megatron(
        "R27",
        "the counted map ignores groups and bias",
        "0.16.1",
        None,
        why="It is a choice of the package that the reference follows: `aux_loss_scores` counts the plain top-k.",
    ),
    _megatron("A14", "the tracker has no place for the losses of MTP layers", "0.16.1", "0.17.0", "a14"),
    _megatron("A07", "losses per token depend on tensor and context parallelism", "0.16.1", "0.19.0", "a07"),
    _megatron("J10", "gradients of experts are summed over the wrong ranks", "0.16.1", "0.19.0", "j10"),
    _megatron("H04", "overlapped shared experts are not clamped", "0.16.1", MAIN, "h04"),
    _megatron("E01", "AlltoAll sorts chunks by a count tensor of three dimensions", "0.11.0", "0.12.0", "e01"),
    _megatron("L01", "sharded state of experts with FP8 padding", "0.10.0", "0.11.0", "l01"),
    _megatron("L03", "an FP8 checkpoint of experts does not load", "0.12.0", "0.13.0", why=NO_GPU),
    _megatron("K05", "pipeline stages with different parameter groups", "0.13.1", "0.14.0", "k05"),
    _megatron("N05", "overlapped AlltoAll frees what one local expert needs", "0.16.1", "0.17.0", "n05"),
    _engine("P01", "addresses of rows wrap at 2^31", "2.8.0", "2.9.0", "p01"),
    _engine(
        "P04",
        "padding slots of probability 0 hold noise",
        "2.6.0",
        "2.7.0",
        "p04",
        "A literal of another dtype is stored, which Triton's interpreter converts and a GPU's compiler may not. "
        "On a GPU neither release compiles with Triton 3.6.",
    ),
    _engine("P12", "rows brought back from nothing have no tokens", "2.14.1", None, "p12"),
    _engine(
        "P13",
        "the gradient of a probability that is 0",
        "2.20.2",
        None,
        "p13",
        "The report was a reading of the code: the rule for such rows is declared, and the gradient is right.",
    ),
    _engine("P06", "a number of rows of -1 is taken for a size", "2.14.1", "2.15.0", "p06"),
    _engine("D02", "the alignment is fixed too early", "2.5.0", "2.6.0", "d02"),
    _compiled("R03", "scores of one chosen expert are not normalised", "2.14.0"),
    _compiled("R04", "many experts cannot be launched", "2.15.0"),
    _compiled("D01", "padding wraps at 2^31", "2.12.0"),
    _compiled("Q04", "splits of MXFP8 tensors raise", "2.12.0"),
    _compiled("N01", "cached FP8 weights in a CUDA graph", "2.17.0"),
    _compiled("K03", "tensors of more than 2^31 elements in FusedAdam", "2.17.0"),
    _compiled("K01", "empty groups of FusedAdam count no step", "2.19.0"),
    *(
        _engine(bug, title, broken, mended, why=UNPACKED)
        for bug, title, broken, mended in (
            ("R01", "top-k takes the same expert twice", "2.6.0", "2.7.0"),
            ("G03", "an empty last expert", "2.7.0", "2.8.0"),
            ("J03", "gradients of FP8 weights are fused wrongly", "2.2.0", "2.3.0"),
            ("J11", "offloaded activations and fused gradients", "2.4.0", "2.5.0"),
        )
    ),
    *(
        _engine(bug, title, broken, mended, why=BLACKWELL)
        for bug, title, broken, mended in (
            ("Q03", "reciprocals of the first and last UE8M0 codes", "2.12.0", "2.13.0"),
            ("Q01", "bits leak between packed UE8M0 scales", "2.11.0", "2.12.0"),
            ("J05", "an overwritten main gradient stays as it was", "2.14.1", "2.15.0"),
            ("J06", "delayed gradients on a side stream", "2.16.1", "2.17.0"),
        )
    ),
)
