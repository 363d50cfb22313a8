"""An implementation whose `permute` is odd, in the way that the number of experts chooses.

Every kind of `CALLS` is a function of the right result, run inside the call; every kind of
`SUPPORTS` answers for `supports`. The other functions are right.
"""

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.engine.child import isolation
from conformance.interface import UsageError
from moe_ref.permutation.permute import permute as right
from moe_ref.permutation.routing_map import pad_routing_map as pad_routing_map

SLEEP = 3600


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


class OwnEnd(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no str")


class MuteMemory(MemoryError):
    __str__ = Mute.__str__


class Evasive:
    def __getattr__(self, name):
        raise RuntimeError("no attributes")


class AnyName:
    def __getattr__(self, name):
        return Evasive()


class Refuses(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise RuntimeError("no torch here")


class RefusesToDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise RuntimeError("no dispatch here")


def throws(error):
    def throw(out):
        raise error() if isinstance(error, type) else error

    return throw


def then(action, result=None):
    """The action, and a wrong result, so that the call fails even if nothing else does."""

    def call(out):
        action()
        return result

    return call


def keeps(action):
    """The action, and the right result: the action itself must be the failure."""

    def call(out):
        action()
        return out

    return call


def files():
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all(out):
    for file in files():
        with contextlib.suppress(OSError):
            os.close(file)


def write_to_all(content):
    def write(out):
        for file in files():
            with contextlib.suppress(OSError):
                os.write(file, content)
        return out

    return write


def silence_all(out):
    null = os.open("/dev/null", os.O_RDWR)
    for file in files():
        os.dup2(null, file)
    return out


def fork(in_copy, in_original):
    def call(out):
        return (in_original if os.fork() else in_copy)(out)

    return call


def sleep(out):
    time.sleep(SLEEP)


def wrong(out):
    return None


def die(out):
    os._exit(5)


def spin(out):
    while True:
        pass


def recurse(out):
    return recurse(out)


def recurse_in_c(out):
    sys.setrecursionlimit(10**9)
    return sorted([1], key=lambda _: recurse_in_c(out))


def allocate(out):
    isolation.MEMORY_BYTES = isolation._resident() + 2**26
    kept = []
    while True:
        kept.append(torch.ones(2**20))


def thread(target, daemon=True):
    threading.Thread(target=target, daemon=daemon).start()


def leave_a_thread_and_exit(out):
    thread(lambda: time.sleep(SLEEP), daemon=False)
    atexit.register(time.sleep, SLEEP)
    sys.exit(0)


def ignore_signals(out):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    spin(out)


def group():
    return ExceptionGroup("several", [ValueError("one"), KeyError("two")])


def circle():
    error = ValueError("a circle")
    error.__cause__ = error.__context__ = error
    return error


async def coroutine():
    return None


def replace_streams():
    sys.stdout = sys.stderr = Unprintable()


def print_much():
    for _ in range(32):
        os.write(1, b"much\n" * 2**18)
    while os.fstat(1).st_size > isolation.LOG_BYTES:  # until the log is bounded
        time.sleep(isolation.WATCH_SECONDS)


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


CALLS = {
    # the end of the process
    "os_exit_0": lambda out: os._exit(0),
    "os_exit_3": lambda out: os._exit(3),
    "sys_exit": lambda out: sys.exit(),
    "sys_exit_text": lambda out: sys.exit("done"),
    "sys_exit_unprintable": lambda out: sys.exit(Unprintable()),
    "keyboard_interrupt": throws(KeyboardInterrupt),
    "generator_exit": throws(GeneratorExit),
    "own_end": throws(OwnEnd),
    "sigterm": keeps(lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "sigkill": keeps(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "sigint": keeps(lambda: os.kill(os.getpid(), signal.SIGINT)),
    "sigalrm": keeps(lambda: signal.raise_signal(signal.SIGALRM)),
    "group_sigterm": keeps(lambda: os.killpg(0, signal.SIGTERM)),
    "group_sigkill": keeps(lambda: os.killpg(0, signal.SIGKILL)),
    "group_sigint": keeps(lambda: os.killpg(0, signal.SIGINT)),
    "segfault": keeps(lambda: ctypes.string_at(1)),
    "abort": lambda out: os.abort(),
    "exec_true": lambda out: os.execv("/bin/true", ["true"]),
    "exec_sleep": lambda out: os.execv("/bin/sleep", ["sleep", str(SLEEP)]),
    "exit_with_a_thread_left": leave_a_thread_and_exit,
    # files
    "close_all": close_all,
    "garbage": write_to_all(b"garbage " * 8),
    "zeros": write_to_all(bytes(64)),
    "half_a_message": write_to_all(b"\0\0\x10\0 the rest never comes"),
    "another_message": write_to_all(b"\0\0\0\x04\x80\x04N."),
    "silence_all": silence_all,
    "prints_much": then(print_much),
    "no_more_files": then(limit_files),
    # other processes
    "fork_returns_twice": fork(lambda out: out, wrong),
    "fork_raises_twice": fork(throws(ValueError), throws(ValueError)),
    "fork_sleeps": fork(sleep, wrong),
    "fork_outlives": fork(sleep, die),
    "fork_of_a_fork": fork(fork(sleep, die), wrong),
    "starts_a_program": then(lambda: subprocess.Popen(["sleep", str(SLEEP)])),
    # no end
    "sleeps": sleep,
    "spins_and_ignores_signals": ignore_signals,
    "waits_for_itself": lambda out: threading.Lock().acquire() and threading.Barrier(2).wait(),
    "stops": keeps(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "reads_its_input": lambda out: input(),
    "recurses": recurse,
    "recurses_in_c": recurse_in_c,
    "allocates": allocate,
    # modes of the process
    "gradients": keeps(lambda: torch.set_grad_enabled(False)),
    "dtype": keeps(lambda: torch.set_default_dtype(torch.float64)),
    "device": keeps(lambda: torch.set_default_device("meta")),
    "autocast": keeps(lambda: torch.set_autocast_enabled("cpu", True)),
    "subnormal": keeps(lambda: torch.set_flush_denormal(True)),
    "directory": keeps(lambda: os.chdir("/")),
    "recursion_limit": keeps(lambda: sys.setrecursionlimit(500)),
    "function_mode": keeps(lambda: Refuses().__enter__()),
    "dispatch_mode": keeps(lambda: RefusesToDispatch().__enter__()),
    "streams": then(replace_streams),
    "environment": then(os.environ.clear),
    "thread": then(lambda: thread(lambda: time.sleep(SLEEP))),
    "timer": then(lambda: signal.setitimer(signal.ITIMER_VIRTUAL, SLEEP)),
    "tracing": then(lambda: sys.settrace(lambda *_: None)),
    # errors
    "mute": throws(Mute),
    "mute_memory": throws(MuteMemory),
    "long": throws(ValueError("x" * 10**7)),
    "unprintable": throws(ValueError(Unprintable())),
    "odd_letters": throws(ValueError("\0\x1b[31m\ud800\n\r\u2028")),
    "stop_iteration": throws(StopIteration),
    "end_of_file": throws(EOFError),
    "usage": throws(UsageError("no such case")),
    "error_group": throws(group()),
    "circle": throws(circle()),
    "memory": throws(MemoryError),
    "gpu_memory": throws(torch.OutOfMemoryError("no memory")),
    "too_large": lambda out: torch.ones(2**50),
    # results
    "evasive": lambda out: Evasive(),
    "any_name": lambda out: AnyName(),
    "generator": lambda out: (x for x in out),
    "coroutine": lambda out: coroutine(),
    "class": lambda out: type(out),
    "module": lambda out: torch,
    "itself": lambda out: permute,
}
SUPPORTS = {
    "supports_raises": throws(RuntimeError("supports")),
    "supports_mute": throws(Mute),
    "supports_exits": lambda: sys.exit(1),
    "supports_sleeps": lambda: time.sleep(SLEEP),
    "supports_list": lambda: ["no"],
    "supports_tensor": lambda: torch.ones(2),
    "supports_zero": lambda: 0,
    "supports_true": lambda: True,
    "supports_false": lambda: False,
    "supports_unprintable": lambda: Unprintable(),
}
KINDS = [*CALLS, *SUPPORTS]


def kind_of(routing_map):
    """The kind that the number of experts chooses; "" for a few experts: the right one."""
    number = routing_map.shape[1] - 3
    return KINDS[number] if number >= 0 else ""


def permute(tokens, routing_map, **settings):
    out = right(tokens, routing_map, **settings)
    kind = kind_of(routing_map)
    return CALLS[kind](out) if kind in CALLS else out


def supports(function, **arguments):
    kind = kind_of(arguments["routing_map"])
    if function == "permute" and kind in SUPPORTS:
        answer = SUPPORTS[kind]
        return answer(None) if answer.__name__ == "throw" else answer()
    return None


def declares(function):
    if function == "unpermute":
        raise RuntimeError("nothing about unpermute")
    return {}


def unpermute(*arguments, **settings):
    raise AssertionError("its declarations are not known, so it is not called")
