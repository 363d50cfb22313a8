"""Configurations of a report and of a recording are compared by kernel, constants and warps."""

from types import SimpleNamespace

from tests.common.compiler import compiled


def compared(options: dict[str, int], constants: dict[str, str], judged: int = 1) -> bool:
    """Whether a record of a report has judged this recorded configuration."""
    from evidence.machine_code.judged import of_recording, of_report

    text = "BLOCK_M=4 ERROR=mae splits_ptr=None"
    record = {"kernel": "m.k", "constants": text, "options": "2 warps, 3 stages, one program", "judged": judged}
    recording = SimpleNamespace(name="m.k", named_constants=constants, options=options)
    return of_recording(recording) in of_report([record])


SAME = {"BLOCK_M": "4", "ERROR": "mae", "bias_ptr": "None"}


def test_the_same_constants_and_warps_are_one_configuration():
    assert compiled(compared, {"num_warps": 2}, SAME)


def test_other_warps_or_constants_are_another_configuration():
    assert not compiled(compared, {"num_warps": 1}, SAME)
    assert not compiled(compared, {"num_warps": 2}, SAME | {"BLOCK_M": "8"})


def test_a_configuration_that_no_case_judged_is_missing():
    assert not compiled(compared, {"num_warps": 2}, SAME, 0)
