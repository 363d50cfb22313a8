"""The configurations that moe_fast's launchers choose on an H200, recorded without a GPU.

Calls get tensors of the device "meta", which have shapes and strides but no memory. No kernel is
compiled or run: Triton's hook on its cache of kernels takes each launch.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

HOPPER = GPUTarget("cuda", 90, 32)
H200 = SimpleNamespace(  # cudaGetDeviceProperties
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=149250113536
)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")  # options that launches choose
PROBES = ("has_descriptors", "is_hopper", "casts_in_hardware")  # properties of the device, in moe_fast.launch.backend


@dataclass(frozen=True)
class Configuration:
    """What Triton compiles one version of a kernel for."""

    kernel: Any
    signature: dict[str, Any]  # the type of each argument
    constants: dict[tuple[int, ...], Any]  # by the argument's index, and a field's within it
    attributes: dict[tuple[int, ...], Any]  # what is known of integers and addresses
    options: dict[str, Any]
    call: str  # that launches it first

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"

    @cached_property
    def named_constants(self) -> dict[str, str]:
        """The constants by the names of their arguments."""
        names = list(self.signature)
        return {".".join([names[path[0]], *map(str, path[1:])]): str(value) for path, value in self.constants.items()}

    @cached_property
    def tile(self) -> str:
        """What distinguishes the configuration apart from what is known of its integers."""
        kinds = [(name, kind) for name, kind in self.signature.items() if kind not in ("i32", "i64", "constexpr")]
        chosen = {name: value for name, value in self.named_constants.items() if value != "1" or name.isupper()}
        return str((self.name, kinds, chosen, self.options))

    @cached_property
    def key(self) -> str:
        return str((self.name, self.signature, self.named_constants, self.attributes, self.options))


class Driver:
    """The part of Triton's driver that a launch asks before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


class Forgetful(dict[Any, Any]):
    """A cache of compiled kernels that is always empty."""

    def __contains__(self, key: object) -> bool:
        return False


@contextmanager
def as_on_an_h200(take: Callable[..., bool]) -> Iterator[None]:
    """moe_fast launches as on an H200; `take` gets what Triton tells its hook of each launch."""
    import moe_fast  # noqa: F401 - its modules are in sys.modules
    from moe_fast.launch import prepared

    modules = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "moe_fast"]
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: H200))
        patches.enter_context(patch.object(prepared, "_compiled", Forgetful()))
        patches.enter_context(patch.object(triton.knobs.runtime, "jit_cache_hook", take))
        for module in modules:
            for probe in PROBES:
                if hasattr(module, probe):
                    patches.enter_context(patch.object(module, probe, lambda device: True))
        driver.set_active(Driver())  # it stays: without a GPU there is no other to go back to
        yield


def recorded(calls: Iterator[tuple[str, Callable[[], Any]]]) -> tuple[list[Configuration], dict[str, str]]:
    """(each configuration that the calls launch, what the calls that raise say)."""
    configurations: dict[str, Configuration] = {}
    errors: dict[str, str] = {}
    text = ""

    def take(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        chosen = json.loads(compile["specialization_data"])["options"]
        options = {name: chosen[name] for name in OPTIONS if name in chosen}
        (attributes,) = compile["configs"]
        configuration = Configuration(
            fn.jit_function, compile["signature"], compile["constants"], attributes, options, text
        )
        configurations.setdefault(configuration.key, configuration)
        return True  # Triton does not compile

    with as_on_an_h200(take):
        for text, call in calls:
            try:
                call()
            except Exception as error:
                errors[text] = f"{type(error).__name__}: {error}"
    return list(configurations.values()), errors
