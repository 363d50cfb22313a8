"""Help, the version and errors of the user come before torch is imported."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

import conformance
from tests.report.cli_helpers import smoke

# a process for each command line, forked where nothing but the command is imported
CALLS = """
import contextlib, io, json, os, sys
from conformance.cli import main

def call(arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = left.code
    return code, "torch" in sys.modules, out.getvalue()

for arguments in json.load(sys.stdin):
    if os.fork():
        os.wait()
    else:
        print(json.dumps(call(arguments)), flush=True)
        os._exit(0)
"""
VERBS = (
    *("run", "fuzz", "replay", "minimize", "explain", "check-adapter", "new-adapter", "new-test", "speed", "mutants"),
    *("list", "doctor"),
)
QUICK = [
    ((), 2, "VERB"),
    (("--help",), 0, "Compare an implementation"),
    *(((verb, "--help"), 0, f"usage: moe-conformance {verb}") for verb in VERBS),
    (("--version",), 0, f"moe-conformance {conformance.__version__}\n"),
    (("fly",), 2, "invalid choice: 'fly'"),
    (("run",), 2, "--impl"),
    (smoke("moe_ref", "--bad"), 2, "unrecognized arguments: --bad"),
    (smoke("nobody"), 2, "there is no module 'nobody'"),
    (smoke("nobody.inside:x"), 2, "there is no module 'nobody'"),
    (smoke("good.py"), 2, "give the module's name, not its file: good"),
    (smoke(""), 2, "--impl is empty"),
    (smoke("moe_ref", "--profile", "huge"), 2, "invalid choice: 'huge'"),
    (smoke("moe_ref", "--sanitize", "asan"), 2, "invalid choice: 'asan'"),
    (smoke("moe_ref", "--shard", "3/2"), 2, "--shard is '3/2'"),
    (smoke("moe_ref", "--shard", "0/2"), 2, "--shard is '0/2'"),
    (smoke("moe_ref", "--shard", "half"), 2, "--shard is 'half'; it must be i/n"),
    (smoke("moe_ref", "--jobs", "-1"), 2, "--jobs is -1"),
    (smoke("moe_ref", "--jobs", "many"), 2, "invalid int value: 'many'"),
    (smoke("moe_ref", "--report", "out.pdf"), 2, "--report out.pdf: the ending must be one of .json, .xml, .md"),
    (smoke("moe_ref", "--waivers", "missing.toml"), 2, "--waivers missing.toml: there is no such file"),
    (smoke("moe_ref", "--baseline", "missing.json"), 2, "--baseline missing.json: there is no such file"),
    (("fuzz", "--impl", "moe_ref", "--minutes", "0"), 2, "--minutes is 0.0; it must be above 0"),
    (("speed", "--impl", "good", "--against", "nobody"), 2, "--against nobody: there is no module 'nobody'"),
    (("replay", "{}", "--impl", "nobody"), 2, "there is no module 'nobody'"),
    (("check-adapter", "--impl", "nobody"), 2, "there is no module 'nobody'"),
]


def test_torch_is_not_imported(workdir):
    lines = json.dumps([arguments for arguments, _, _ in QUICK])
    done = subprocess.run([sys.executable, "-c", CALLS], input=lines, capture_output=True, text=True, timeout=600)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for (arguments, code, sentence), (observed, imports_torch, text) in zip(QUICK, results, strict=True):
        assert (observed, imports_torch, sentence in text) == (code, False, True), (arguments, text)
        assert "Traceback" not in text
        # the other lines of an error are argparse's usage
        assert code == 0 or sum(line.startswith("moe-conformance") for line in text.splitlines()) == 1, text


def test_a_module_of_the_working_directory_is_not_called_missing(workdir):
    (workdir / "package").mkdir()
    (workdir / "package" / "kernels.py").write_text("x = 1\n")
    lines = (
        "from conformance.usage import check_module as c; c('good'); c('good:permute'); c('package.kernels'); c('sys')"
    )
    program = f"import sys; sys.path[:] = filter(None, sys.path); {lines}"  # as the console script
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_version_is_the_installed_packages():
    assert conformance.__version__ == importlib.metadata.version("moe-conformance")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = conformance.nothing


COLLECTED = """
import gc, sys
from conformance.engine.collecting import uncollected
with uncollected():
    inside = gc.isenabled()
    import torch
print(inside, gc.isenabled(), gc.get_freeze_count() > 100_000)
before = gc.get_freeze_count()
made = [[] for _ in range(1000)]
with uncollected():
    inside = gc.isenabled()
print(inside, gc.isenabled(), gc.get_freeze_count() == before)
"""


def test_collections_leave_out_what_torch_has_made_and_nothing_of_a_process_that_had_torch():
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["False True True", "True True True"], done.stderr
