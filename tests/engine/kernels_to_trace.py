"""Compiled kernels, also where `triton.jit` is an interpreter; no test runs one."""

import sys
from typing import Any

from triton.runtime.jit import JITFunction

Launched = JITFunction
here: Any = sys.modules[__name__]


def inner(x):
    return x


inner_jit = JITFunction(inner)


def of_module(x):
    return x


of_module_jit = JITFunction(of_module)


def middle(x):
    return inner_jit(x)


middle_jit = JITFunction(middle)


class Pair:
    @JITFunction
    def first(self):
        return self


def outer_kernel(x_ptr):
    middle_jit(x_ptr)
    Pair(x_ptr).first()
    here.of_module_jit(x_ptr)


outer = JITFunction(outer_kernel)


def given_kernel(x_ptr, function):
    function(x_ptr)


given = JITFunction(given_kernel)


def alone_kernel(x_ptr):
    x_ptr + 1


alone = JITFunction(alone_kernel)
