"""A row of the tables of rules: one reason why `MoEConfig` refuses; and the conditions in rows."""

from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from moe_ref.config.rules import is_count, is_number, require

Config = Any  # a `MoEConfig`, whose file is above this one
Condition = Callable[[Config], object]  # anything true counts
Who = Literal["V", "A", "run", "args", "our"]
"""Who else refuses it: Megatron's TransformerConfig by a ValueError (V) or an assertion (A), its
modules when built, called or reached (run), its command line (args); or only this project (our): in
Megatron the option has no effect, or not the one it names."""


class Rule(NamedTuple):
    """One reason to refuse."""

    who: Who
    option: str  # the option to name
    depends: str  # the other options of the reason, in the order to name them
    refused: Condition
    requirement: str  # goes on after "it must be"; {option} is that option's value

    def check(self, config: Config) -> None:
        """Raise `ValueError` if the config is refused."""
        values = vars(config)
        dependencies = " and ".join(f"{name} {values[name]!r}" for name in self.depends.split())
        value = f"{values[self.option]!r} with {dependencies}" if dependencies else repr(values[self.option])
        require(not self.refused(config), self.option, value, self.requirement.format_map(values))


def each(
    who: Who, options: str, depends: str, refused: Callable[[Config, Any], object], requirement: str
) -> tuple[Rule, ...]:
    """The same rule for several options; `refused` gets the option's value too."""

    def of(name: str) -> Condition:
        return lambda config: refused(config, getattr(config, name))

    return tuple(Rule(who, name, depends, of(name), requirement) for name in options.split())


def needs(who: Who, options: str, other: str) -> tuple[Rule, ...]:
    """An option that is set needs another."""
    return each(who, options, other, lambda c, value: value and not getattr(c, other), f"False, or {other} be set")


def excludes(who: Who, options: str, other: str) -> tuple[Rule, ...]:
    """Two options of which one may be set."""
    return each(who, options, other, lambda c, value: value and getattr(c, other), f"False, or {other} be off")


def positive(who: Who, options: str, requirement: str = "positive") -> tuple[Rule, ...]:
    return each(who, options, "", lambda c, value: value is not None and value <= 0, requirement)


def not_negative(options: str) -> tuple[Rule, ...]:
    return each("our", options, "", lambda c, value: value is not None and value < 0, "0 or more")


def listed(value: Any) -> tuple[Any, ...]:
    """The entries of a list, or the one value."""
    return value if isinstance(value, tuple) else (value,)


def sinkhorn(c: Config) -> bool:
    return c.moe_router_load_balancing_type == "sinkhorn"


def flex(c: Config, *backends: str) -> bool:
    return c.moe_token_dispatcher_type == "flex" and c.moe_flex_dispatcher_backend in backends


def fused_experts(c: Config) -> bool:
    return c.use_transformer_engine_op_fuser and c.moe_grouped_gemm


def swiglu(c: Config) -> bool:
    return c.gated_linear_unit and c.activation_func == "silu"


def gated(c: Config) -> bool:
    return c.gated_linear_unit and c.activation_func in ("silu", "quick_gelu")


def shared(c: Config) -> bool:
    return c.moe_shared_expert_intermediate_size is not None


def some_dense(c: Config) -> bool:
    """There are dense layers among the MoE layers."""
    return 0 in c.moe_layer_freq if isinstance(c.moe_layer_freq, tuple) else c.moe_layer_freq != 1


def recomputes(c: Config, *modules: str) -> bool:
    return c.recompute_granularity == "selective" and bool(set(modules) & set(c.recompute_modules or ()))


def offloads(c: Config, *modules: str) -> bool:
    return c.fine_grained_activation_offloading and bool(set(modules) & set(c.offload_modules))


def graphs(c: Config, *modules: str) -> bool:
    return c.cuda_graph_impl in ("local", "transformer_engine") and set(modules) <= set(c.cuda_graph_modules)


def drops_and_pads(c: Config) -> bool:
    return c.moe_expert_capacity_factor is not None and c.moe_pad_expert_input_to_capacity


def check_kinds(config: Config) -> None:
    """Every value is of the kind that its field is annotated with."""
    cls: Any = type(config)
    for name, kind in kinds_of(cls).items():
        value = getattr(config, name)
        require(fits(value, kind), name, repr(value), words(kind))


@cache
def kinds_of(cls: type) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(cls).items() if get_origin(kind) is not ClassVar}


def fits(value: object, kind: Any) -> bool:
    """The value is of the kind; lists are tuples by now. A bool is no number, and a number is
    finite.
    """
    if kind is float:
        return is_count(value) or is_number(value)  # is_number fails on an integer that no float can hold
    if kind is int:
        return is_count(value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is Sequence:
        return isinstance(value, tuple) and all(fits(item, arguments[0]) for item in value)
    return any(fits(value, argument) for argument in arguments) if arguments else isinstance(value, kind)


def words(kind: Any) -> str:
    """The kind, to be read after "it must be"."""
    words_of: dict[Any, str] = {int: "an integer", float: "a finite number", bool: "True or False", NoneType: "None"}
    if kind in words_of:
        return words_of[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is Sequence:
        return f"a list, of {words(arguments[0])} each"
    return " or ".join(map(words, arguments))
