"""What a child answers about one case."""

from dataclasses import dataclass, field
from typing import Any

LAST = ("CRASH", "HANG", "OOM")  # statuses after which a process runs no further case


@dataclass
class Outcome:
    """The outcome of one case.

    status: PASS FAIL CRASH HANG OOM NOT_OFFERED DECLARED_UNSUPPORTED BLOCKED UNINFORMATIVE,
        NOT_RUN for lack of ranks, or ERROR of the harness
    seconds: from the start of the case to its outcome
    kernels: names of the kernel specialisations that were compiled or loaded for it
    configurations: names of the configurations that the judged call launched
    launched: names of those that other calls of the case launched
    descriptions: of configurations that the process met first in this case
    planted: by configuration, what became of a fault in it, if the child's options ask for faults
    tuned: by tuned kernel or function, the `total` of its configurations, labels of those that the
        case `judged`, of those that are `unfit` for the device, and `by` what they were chosen
        (see `conformance.engine.child.tuning`)
    calls: the implementation's Python functions that it ran, as "file:function", if traced; of a
        copy that compares mutants, those that differ
    scores: how near its outputs are to wrong ones, by kind of error: above 1 is wrong. Of a failing
        case, by how much the wrong output exceeds the check that it failed
    lines: of the implementation's Python code that ran, as "file:line". Both if the child's options
        ask for them
    transport: how several ranks reached each other; shares_gpu: whether on fewer GPUs than ranks
    """

    status: str
    finding: dict[str, Any] | None = None
    reason: str = ""
    seconds: float = 0.0
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    evaluations: int = 0
    kernels: list[str] = field(default_factory=list)
    configurations: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    descriptions: dict[str, dict[str, str]] = field(default_factory=dict)
    planted: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    transport: str = ""
    shares_gpu: bool = False
