"""Lets `triton.autotune` use the configuration that a case chooses, without timing any.

The list of a tuner is what its own pruning leaves. A configuration that Triton would discard,
because it does not fit the device, is passed over. In the interpreter the first configuration runs,
and no other: nothing there can be timed.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from conformance.engine.child.tuned import EACH, FIRST, UNKNOWN, Tuned

AUTOTUNER = "triton.runtime.autotuner"
# what Triton's autotuner takes for a configuration that does not fit
UNFIT = (
    (AUTOTUNER, "OutOfResources"),
    (AUTOTUNER, "PTXASError"),
    ("triton.compiler.errors", "CompileTimeAssertionFailure"),
)


@dataclass
class Choice:
    """Configuration `index` of each tuner, modulo the length of its list."""

    index: int = 0
    longest: int = 1  # the length of the longest list so far
    launched: Tuned = field(default_factory=dict)  # records of the calls that use this choice

    def note(self, name: str, total: int, by: str, *labels: str) -> None:
        """Remember configurations that are launched."""
        record = self.launched.setdefault(name, {"total": total, "by": by, "judged": [], "unfit": []})
        record["judged"] += [label for label in labels if label not in record["judged"]]

    def discard(self, name: str, label: str) -> None:
        """Remember that a configuration does not fit the device, and was not launched."""
        record = self.launched[name]
        record["judged"].remove(label)
        record["unfit"].append(label)


_choice: Choice | None = None


@contextlib.contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Tuners use this choice inside the block."""
    global _choice
    outer_choice, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = outer_choice


def install() -> None:
    """Let Triton's autotuner ask for the choice.

    The call is idempotent, and does nothing if the autotuner is not loaded.
    """
    autotuner = getattr(sys.modules.get(AUTOTUNER), "Autotuner", None)
    if autotuner is None or not hasattr(autotuner, "run") or hasattr(autotuner.run, "asks"):
        return
    original = autotuner.run
    asking = _forced(original) if _uses_forced_choice(autotuner, original) else _noted(original)
    asking.asks = True  # type: ignore[attr-defined]
    autotuner.run = asking


def _forced(original: Callable[..., Any]) -> Callable[..., Any]:
    """A launch whose tuner has a list of one configuration: Triton's own code then times nothing,
    reads no cache, and calls the `pre_hook` of the configuration as it does for a cached choice.
    """

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        interpreted, all_configs = _is_interpreted(tuner), tuner.configs
        if len(all_configs) < 2 or (_choice is None and not interpreted):
            return original(tuner, *args, **kwargs)
        choice = _choice or Choice()
        candidates = _candidates(tuner, args, kwargs, interpreted)
        choice.longest = max(choice.longest, len(candidates))
        name, unfit = _name(tuner), None
        for step in range(len(candidates)):
            config = candidates[(choice.index + step) % len(candidates)]
            choice.note(name, len(all_configs), FIRST if interpreted else EACH, _label(config))
            tuner.configs = [config]
            try:
                return original(tuner, *args, **kwargs)
            except _unfit_errors() as error:
                unfit = error
                choice.discard(name, _label(config))
            finally:
                tuner.configs = all_configs
        if unfit:
            raise unfit
        return original(tuner, *args, **kwargs)  # its pruning leaves nothing, which Triton refuses

    return run


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A launch of a tuner whose code is unknown: its own choice is only recorded."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tuner, *args, **kwargs)
        if _choice:
            _choice.note(_name(tuner), len(getattr(tuner, "configs", ())), UNKNOWN)
        return result

    return run


def _candidates(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], interpreted: bool) -> list[Any]:
    """The configurations that the tuner's own pruning leaves; in the interpreter the first one."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    if not interpreted:
        return list(tuner.prune_configs(kwargs))
    model, tuner.perf_model = tuner.perf_model, None  # it estimates times on a device
    try:
        return list(tuner.prune_configs(kwargs))[:1]
    except (RuntimeError, AssertionError):  # it asks for a device that is not there
        return list(tuner.configs[:1])
    finally:
        tuner.perf_model = model


def _uses_forced_choice(autotuner: Any, original: Callable[..., Any]) -> bool:
    """Whether a launch uses a list of one configuration as it is, in this version of Triton."""
    launches: list[dict[str, Any]] = []
    kernel = SimpleNamespace(fn=lambda x: None, arg_names=["x"], run=lambda *_, **kwargs: launches.append(kwargs))
    choice = Choice()
    try:
        config = sys.modules[AUTOTUNER].Config
        configs = [config({"BLOCK": 1}), config({"BLOCK": 2}, num_warps=8)]
        tuner = autotuner(kernel, kernel.arg_names, configs, ["x"], None, None)
        with chosen(choice):
            for choice.index in range(2):
                _forced(original)(tuner, 0)
    except Exception:
        return False
    used = [(launch["BLOCK"], launch["num_warps"]) for launch in launches]
    return used == [(1, 4), (2, 8)] and choice.longest == 2 and tuner.configs is configs


def _unfit_errors() -> tuple[type[Exception], ...]:
    classes = (getattr(sys.modules.get(module), name, None) for module, name in UNFIT)
    return tuple(error for error in classes if isinstance(error, type))


def _is_interpreted(tuner: Any) -> bool:
    kernel = tuner
    while not inspect.isfunction(kernel.fn):
        kernel = kernel.fn
    return type(kernel).__name__ == "InterpretedFunction"


def _name(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"


def _label(config: Any) -> str:
    """A configuration as text, such as "BLOCK_M: 64, num_warps: 8, num_stages: 3"."""
    settings = config.all_kwargs()
    return ", ".join(f"{name}: {value}" for name, value in settings.items() if (name, value) != ("num_ctas", 1))
