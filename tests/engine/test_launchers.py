"""Launchers: each is built once for all processes, from a compiled header, and not optimised."""

import ctypes
import multiprocessing
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
import triton.runtime.build as build

from conformance.engine.child.launchers import share_launchers


@pytest.fixture
def commands(monkeypatch):
    """The commands of the C compiler, which writes them into the file that it is to make."""
    commands_run: list[list[str]] = []

    def compiler(command, **_):
        commands_run.append(command)
        time.sleep(0.2)
        Path(command[command.index("-o") + 1]).write_text(" ".join(command))

    monkeypatch.setattr(build.subprocess, "check_call", compiler)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace(make_launcher=None))
    return commands_run


def _built(folder: Path, source: str, where: str) -> str:
    """As Triton builds a launcher: in a folder of its own."""
    build_folder = folder / where
    build_folder.mkdir()
    (build_folder / "launch.c").write_text(source)
    return build._build("launch", str(build_folder / "launch.c"), str(build_folder), [], [], [], [])


def _in_a_process(folder: Path, where: str, out) -> None:
    share_launchers(str(folder))
    begun = time.monotonic()
    builder = _built(folder, "int a;", where)
    out.put((builder, Path(builder).read_text(), time.monotonic() - begun))


def test_a_launcher_is_built_once_and_not_optimised(commands, tmp_path):
    share_launchers(str(tmp_path))
    first, repeated = _built(tmp_path, "int a;", "1"), _built(tmp_path, "int a;", "2")
    assert first == repeated and len(commands) == 2  # the header, and the launcher
    assert all([word for word in command if word.startswith("-O")][-1] == "-O0" for command in commands)
    assert _built(tmp_path, "int b;", "3") != first and len(commands) == 3


def test_what_launchers_begin_with_is_compiled_once(commands, tmp_path):
    share_launchers(str(tmp_path))
    include = "#include <stdlib.h>\n\n#define SIZE 4\n"
    for position, text in enumerate(("int a;\n#define OWN 1\n", "int b;\n")):
        _built(tmp_path, include + text, str(position))
    header = commands[0][1]
    assert Path(header).read_text() == include and Path(f"{header}.gch").exists()
    assert [command[-2:] for command in commands[1:]] == [["-include", header]] * 2
    _built(tmp_path, "#include <math.h>\nint a;\n", "2")
    assert len(commands) == 5


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_compiler_takes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "gcc")
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace(make_launcher=None))
    share_launchers(str(tmp_path))
    text = "#include <stdlib.h>\nint twice(int a) { return 2 * abs(a); }\n"
    assert ctypes.CDLL(_built(tmp_path, text, "1")).twice(-4) == 8


def test_processes_share_one(commands, tmp_path):
    context = multiprocessing.get_context("fork")
    out = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(tmp_path, str(i), out)) for i in range(3)]
    for process in processes:
        process.start()
    results = [out.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    assert len({(builder, text) for builder, text, _ in results}) == 1  # the text names the builder's folder


def test_without_it_each_call_builds_and_optimises(commands, tmp_path):
    first, repeated = _built(tmp_path, "int a;", "1"), _built(tmp_path, "int a;", "2")
    assert first != repeated and len(commands) == 2
    assert "-O0" not in commands[0]


def test_a_build_that_fails_leaves_nothing_and_the_next_one_tries_again(commands, tmp_path, monkeypatch):
    share_launchers(str(tmp_path))
    working = build.subprocess.check_call

    def failing(command, **_):
        raise OSError("no compiler")

    monkeypatch.setattr(build.subprocess, "check_call", failing)
    with pytest.raises(OSError, match="no compiler"):
        _built(tmp_path, "int a;", "1")
    monkeypatch.setattr(build.subprocess, "check_call", working)
    assert Path(_built(tmp_path, "int a;", "2")).exists() and len(commands) == 2


def test_other_versions_and_the_implementations_own_way_are_left_alone(commands, tmp_path, monkeypatch):
    build_folder = object()
    monkeypatch.setattr(triton.knobs.build, "impl", build_folder)
    share_launchers(str(tmp_path))
    assert triton.knobs.build.impl is build_folder
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace())
    share_launchers(str(tmp_path))
    assert triton.knobs.build.impl is None
