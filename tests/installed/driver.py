"""Takes the steps of a user, one after another, in one process: torch is imported once.

Run as `python driver.py RESULTS`, with the wheel on PYTHONPATH, the steps as JSON on stdin. A step
is

    ["cd", FOLDER]             a new folder below the first
    ["write", {NAME: TEXT}]    files
    ["call", WORDS]            `moe-conformance …`, or a Python script with its arguments
    ["shell", SCRIPT, ENVIRONMENT, SECONDS]    a script of bash, which gets SIGTERM so many seconds
                               after its first command; 0: it does not

and RESULTS gets the (exit code, output) of each, as JSON. The command `moe-conformance` of a script
is `COMMAND`: it lends its arguments, environment, folder and streams to this process, which calls
the installed package's `main` with them.
"""

import contextlib
import glob
import io
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from conformance.cli import main

COMMAND = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
driver = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
driver.connect(os.environ["DRIVER"])
given = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
socket.send_fds(driver, [given.encode()], [1, 2])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(int(os.environ["DRIVER_PID"]), number))
sys.exit(int(driver.recv(16)))
"""
SHORT = ("--profile", "smoke", "--jobs", "1")  # of an option that is given twice the last one counts
START = pathlib.Path.cwd()


def exit_code(program: Callable[..., Any], *arguments: Any) -> int:
    try:
        return program(*arguments) or 0
    except SystemExit as left:
        return int(left.code or 0)


def script(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def called(words: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if words[0] == "moe-conformance":
            code = exit_code(main, [y for x in words[1:] for y in (sorted(glob.glob(x)) if "*" in x else [x])])
        else:
            code = exit_code(script, words[1:])
    return code, out.getvalue()


def serve(connection: socket.socket) -> None:
    """Call the command with what a script's process has lent."""
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    words, folder, environment = json.loads(text)
    environment_before, streams_before = dict(os.environ), (os.dup(1), os.dup(2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    code = exit_code(main, [*words, *(SHORT if words[0] == "run" else ())])
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.clear()
    os.environ.update(environment_before)
    for number, stream in enumerate(streams_before, 1):
        os.dup2(stream, number)
    for stream in (*streams, *streams_before):
        os.close(stream)
    connection.send(str(code).encode())


def shell(text: str, environment: dict[str, str], seconds: float) -> tuple[int, str]:
    folder = pathlib.Path.cwd()
    with (
        tempfile.TemporaryDirectory() as private_folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.bind(f"{private_folder}/socket")
        listener.listen()
        listener.settimeout(0.02)
        command = pathlib.Path(private_folder, "moe-conformance")
        command.write_text(COMMAND)
        command.chmod(0o755)
        path = {"PATH": os.pathsep.join([private_folder, environment.pop("PATH", ""), os.environ["PATH"]])}
        driver = {"DRIVER": f"{private_folder}/socket", "DRIVER_PID": str(os.getpid()), "COMMAND": str(command)}
        with open(f"{private_folder}/out", "w+") as out:
            process = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", text],
                env=os.environ | environment | path | driver,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            while process.poll() is None:
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    if seconds:
                        threading.Timer(seconds, process.send_signal, [signal.SIGTERM]).start()
                    with connection:
                        serve(connection)
                    os.chdir(folder)
            out.seek(0)
            return process.returncode, out.read()


def taken(step: list[Any]) -> tuple[int, str]:
    kind, *arguments = step
    if kind == "cd":
        os.chdir(START)
        os.makedirs(arguments[0])
        os.chdir(arguments[0])
    elif kind == "write":
        for name, text in arguments[0].items():
            pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(name).write_text(text)
    else:
        return called(arguments[0]) if kind == "call" else shell(*arguments)
    return 0, ""


if __name__ == "__main__":
    results = pathlib.Path(sys.argv[1])  # a script's `sys.argv` replaces it
    results.write_text(json.dumps([taken(step) for step in json.loads(sys.stdin.read())]))
