"""A change is noticed in every function that it can reach."""

import os
import sys
from pathlib import Path

import pytest

import moe_fast
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.tracing import traced
from conformance.engine.choose.plan import fixed_cases
from conformance.engine.footprint.closure import Closure
from conformance.engine.footprint.companions import companions
from conformance.engine.footprint.footprint import Footprints
from conformance.engine.footprint.packages import Packages
from conformance.interface import Implementation, load
from moe_fast import router
from tests.common.suite import EVERYTHING, gate_cases
from tests.engine.footprint_kit import FILES, changes, edited, footprints_here, footprints_in, write

EVERY = {"gate", "jitter", "z_loss"}
EDITS = {
    "the module of a function": (edited("noise.py", "eps=noise(eps)", "eps=+noise(eps)"), {"jitter"}),
    "a module that a function imports": (edited("scales.py", "return eps", "return 1 * eps"), {"jitter"}),
    "an optional module": (edited("quick.py", "return eps", "return +eps"), {"jitter"}),
    "a relative import": (edited("kernels.py", "BLOCK: tl.constexpr", "BLOCK"), {"z_loss"}),
    "an import by name": (edited("bases.py", "coeff=coeff", "coeff=+coeff"), {"z_loss"}),
    "a function in a registry": (edited("plain.py", "bias=bias", "bias=None"), {"gate"}),
    "a decorator, which an import calls": (edited("registry.py", "return function(*", "return +function(*"), EVERY),
    "a module that changes another package": (edited("patch.py", "= 1", "= 2"), EVERY),
    "the package itself": (edited("__init__.py", "patch, plain", "plain, patch"), EVERY),
    "what a function is supported for": (edited("gate_checks.py", "return None", "return"), {"gate"}),
    "a check of all functions": (edited("checks.py", "(*args, **settings)\n    return", "(*args)\n    return"), EVERY),
    "a table beside the package": ({"../table.json": "[1]"}, EVERY),
    "a data file": ({"table.json": "[2]"}, EVERY),
    "a library": ({"fast.so": "other machine code"}, EVERY),
    "a kernel's source beside the package": ({"../kernel.cu": "__global__"}, EVERY),
    "a report beside the package": ({"../report.json": '{"exit_code": 0, "footprints": {}}'}, set()),
    "comments and layout": (edited("noise.py", "  # plain", "  # a comment,\n\n    # and another"), set()),
    "a docstring": (edited("noise.py", '"""Noise."""', '"""Other noise."""'), set()),
    "a module that nothing imports": (edited("unused.py", "1", "2"), set()),
}  # fmt: skip
HIDING = {
    "eval": "eval('noise(eps)')",
    "globals": "globals()['noise'](eps)",
    "import": "__import__('kit.unused') and noise(eps)",
    "a computed import": "importlib.import_module('kit.' + 'unused') and noise(eps)",
    "a library": "ctypes.CDLL(None) and noise(eps)",
    "a process": "subprocess.run(['true']) and noise(eps)",
    "all subclasses": "type.__subclasses__(type) and noise(eps)",
    "loaded modules": "sys.modules and noise(eps)",
    "an operator of torch": "torch.ops and noise(eps)",
}
SEVERAL = {
    "unpermute": {"permute"},
    "route": {"new_state", "finish_batch", "state_tensors", "state_from"},
    "sequential_mlp": {"grouped_mlp"},
    "quantize": {"codes", "scales", "amax", "dequantize"},
}
FOLDER = os.path.dirname(str(moe_fast.__file__))


@pytest.fixture(scope="module")
def kits(tmp_path_factory) -> dict[str, Footprints]:
    """The footprints of the package, after each edit, and with each kind of hidden code."""
    folder, imports = tmp_path_factory.mktemp("kits"), "import ctypes, importlib, subprocess, sys, torch\n"
    files = {"": {}} | {name: edit for name, (edit, _) in EDITS.items()}
    for name, code in HIDING.items():
        files[name, 1] = {"noise.py": imports + FILES["noise.py"].replace("eps=noise(eps)", f"eps={code}")}
        files[name, 2] = files[name, 1] | EDITS["a module that nothing imports"][0]
    folders = [write(folder / str(number), content) for number, content in enumerate(files.values())]
    return dict(zip(files, footprints_in(*folders), strict=True))


@pytest.fixture(scope="module")
def kernels() -> Footprints:
    """The footprints of this project's kernels."""
    return footprints_in(Path(FOLDER).parent, implementation="moe_fast")[0]


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_is_noticed_where_it_reaches(edit, kits):
    assert set(changes(kits[""], kits[edit])) == EDITS[edit][1]


@pytest.mark.parametrize("kind", HIDING)
def test_code_that_hides_what_it_runs_depends_on_all_files(kind, kits):
    assert changes(kits[kind, 1], kits[kind, 2]) == {"jitter": "changed kit (all files)"}


def test_a_footprint_that_ignores_values_misses_a_registered_function(tmp_path, monkeypatch):
    monkeypatch.setattr(Closure, "_binds", lambda *_: False)
    files, reached = EDITS["a function in a registry"]
    earlier, now = footprints_here(write(tmp_path / "before")), footprints_here(write(tmp_path / "now", files))
    assert set(changes(earlier, now)) != reached


def test_the_reason_names_the_module(kits):
    assert changes(kits[""], kits["a relative import"]) == {"z_loss": "changed kit.kernels"}


def test_a_module_may_state_what_calls_reach(tmp_path):
    silent = {"registry.py": FILES["registry.py"] + "__reaches__ = ()\n"}
    folders = [
        write(tmp_path / "before", silent),
        write(tmp_path / "now", silent | EDITS["a function in a registry"][0]),
    ]
    assert changes(*footprints_in(*folders)) == {}


def test_the_same_package_in_another_folder_is_unchanged(kits, tmp_path):
    assert changes(kits[""], *footprints_in(write(tmp_path))) == {}


def test_a_file_that_is_gone_is_noticed(kits, tmp_path):
    folder = write(tmp_path)
    (folder / "kit" / "quick.py").unlink()
    assert "jitter" in changes(kits[""], *footprints_in(folder))


def test_objects_whose_attributes_raise_are_passed_over(kits, tmp_path):
    silent = "class Silent:\n    def __getattribute__(self, name): raise RuntimeError(name)\n\n\nSILENT = [Silent()]\n"
    (footprint,) = footprints_in(write(tmp_path, {"scales.py": FILES["scales.py"] + silent}))
    assert changes(kits[""], footprint) == {"jitter": "changed kit.scales"}


def test_a_variable_of_the_environment_is_noticed_where_it_is_read(kits, tmp_path, monkeypatch):
    monkeypatch.setenv("KIT_NAME", "twice")
    assert set(changes(kits[""], *footprints_in(write(tmp_path)))) == {"z_loss"}


def test_a_variable_that_compilers_read_concerns_every_function(kits, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    reasons = changes(kits[""], *footprints_in(write(tmp_path)))
    assert reasons == dict.fromkeys(EVERY, "changed the variable TRITON_DISABLE_LINE_INFO")


def test_a_footprint_is_the_same_after_json(kits):
    assert Footprints.of(kits[""].record()) == kits[""]


# ---- this project's kernels


def modules_run_by(cases: list[Case]) -> set[str]:
    """The modules of moe_fast that the cases run."""
    implementation = load("moe_fast")
    with traced(FOLDER + os.sep) as calls:
        for case in cases:
            evaluate(case, implementation)
    files = {call.partition(":")[0].removesuffix(".py").removesuffix("/__init__") for call in calls}
    return {f"moe_fast.{file}".replace("/", ".") for file in files}


@pytest.mark.parametrize("function", ["gate", "jitter", "z_loss", "topk_indices", "sort_chunks", "multihot_to_indices"])
def test_whatever_runs_is_in_the_footprint(function, kernels):
    assert modules_run_by(fixed_cases(function, EVERYTHING)[:6]) <= set(kernels.functions[function])


def test_every_offered_function_has_a_footprint_of_modules(kernels):
    implementation = load("moe_fast")
    assert set(kernels.functions) == {name for name in CONTRACTS if implementation.offers(name)}
    assert not [label for modules in kernels.functions.values() for label in modules if "all files" in label]


def test_a_kernel_is_in_the_footprints_of_its_family_and_the_layer(kernels):
    holding = {name for name, modules in kernels.functions.items() if "moe_fast.router._capacity" in modules}
    assert holding == {name for name in router.__all__ if name in CONTRACTS} & kernels.functions.keys() | {"moe_layer"}


class Recording(Implementation):
    """The reference, and the functions it was asked for."""

    asked: set[str]

    def call(self, function, *args, **settings):
        self.asked.add(function)
        return super().call(function, *args, **settings)


@pytest.mark.parametrize("function", SEVERAL)
def test_the_functions_that_a_judgement_calls_are_known(function):
    recording = Recording(load("moe_ref").namespace, "moe_ref")
    recording.asked = set()
    for case in gate_cases(function, every=9, seeds=range(3, 4), draws=20):
        evaluate(case, recording)
    assert SEVERAL[function] <= recording.asked - {function} <= companions(function)


def test_a_module_in_a_folder_without_init_is_found_though_its_package_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "shelf" / "box" / "drawer"
    folder.mkdir(parents=True)
    for file in ("shelf/__init__.py", "shelf/box/__init__.py", "shelf/box/drawer/tool.py"):
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert Packages("shelf", ()).path("shelf.box.drawer.tool") == str(folder / "tool.py")
    assert "shelf.box" not in sys.modules
