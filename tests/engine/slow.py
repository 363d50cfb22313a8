"""Implementations that are slow, and others that hang, each in another way."""

import ctypes
import threading
import time
from pathlib import Path

from moe_ref.permutation.permute import permute

SLOW_SECONDS = 0.5  # of CPU time, in each call


class Slow:
    """Uses a core for a while, so it takes longer on a machine with other work."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        end = time.thread_time() + SLOW_SECONDS
        while time.thread_time() < end:
            pass
        return permute(tokens, routing_map, probs=probs)


class Spins:
    """Runs for ever."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        while True:
            pass


class Sleeps:
    """Sleeps for ever, a short time at once."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        while True:
            time.sleep(0.01)


class Deadlocks:
    """Waits for a lock that it holds."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


class HoldsTheInterpreter:
    """Sleeps in native code that lets no other thread run Python."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        ctypes.PyDLL(None).sleep(3600)


class HangsOnce:
    """Sleeps in its first call in a working directory, as if other work had kept it waiting."""

    @staticmethod
    def permute(tokens, routing_map, *, probs=None):
        if not Path("slept").exists():
            Path("slept").touch()
            time.sleep(3600)
        return permute(tokens, routing_map, probs=probs)


class HangsLater:
    """Sleeps for two experts once it has been called with one expert."""

    single = False

    @classmethod
    def permute(cls, tokens, routing_map, *, probs=None):
        if cls.single and routing_map.shape[1] == 2:
            time.sleep(3600)
        cls.single = cls.single or routing_map.shape[1] == 1
        return permute(tokens, routing_map, probs=probs)
