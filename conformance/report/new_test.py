"""Writes tests for a project's own suite: one of drawn cases for each function of its namespace."""

from pathlib import Path

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import Collective
from conformance.report.new_adapter import write_new
from conformance.usage import UsageError

HEAD = '''"""Drawn cases of {implementation}: values, gradients, laws and memory are judged, as in the gate.

A failing case is shrunk, and kept in hypothesis's database. Add to a test what else shall hold.
"""

from hypothesis import settings

from conformance.testing import conforms

SETTINGS = settings(max_examples=50, deadline=None)  # a first call may compile a kernel
'''
TEST = """

@SETTINGS
@conforms("{name}", "{implementation}")
def test_{name}(case):
    pass
"""


def write_test(implementation: str, offered: list[str], wanted: tuple[str, ...]) -> Path:
    """Write test_NAMESPACE.py with a test of each of these functions, or of all that are offered.

    Raises:
        UsageError: the file exists, or a function is unknown, not offered, or called by all ranks
            together; or there is nothing to test.
    """
    single_process_names = [name for name in offered if not isinstance(CONTRACTS[name], Collective)]
    if refused := [name for name in wanted if name not in single_process_names]:
        text = f"it must be one that {implementation} offers and a rank calls alone"
        raise UsageError(f"--function is {refused[0]!r}; {text}: {', '.join(single_process_names) or 'none'}")
    if not single_process_names:
        raise UsageError(f"{implementation} offers no function that a rank calls alone; see check-adapter")
    text = HEAD + "".join(TEST.replace("{name}", name) for name in wanted or single_process_names)
    path = Path(f"test_{implementation.rpartition(':')[2].replace('.', '_')}.py")
    return write_new(path, text.replace("{implementation}", implementation))
