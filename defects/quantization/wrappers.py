"""What wrappers of several families share: a quantised tensor is opaque, so a defect in its readers
(`amax`, `scales`, …) wraps it.
"""

from typing import Any, NamedTuple


class Beside(NamedTuple):
    """The base's quantised tensor and the defect's data."""

    quantized: Any
    known: Any
