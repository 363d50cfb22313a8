"""Makes an MoEConfig of a base configuration and changes to it."""

from moe_ref.config import MoEConfig
from moe_ref.config.megatron import settings as moe
from moe_ref.config.megatron.routing import ROUTING
from moe_ref.config.megatron.running import RUNNING
from tests.router.moe_config_cases import BASE

RULES = (*ROUTING, *RUNNING)


def config(**changes):
    return MoEConfig(**{**BASE, **changes})


def refusing_rule(monkeypatch, changes):
    """The first rule that refuses the config."""
    with monkeypatch.context() as patch:
        patch.setattr(moe, "ROUTING", ())
        patch.setattr(moe, "RUNNING", ())
        unchecked = config(**changes)
    return next(rule for rule in RULES if rule.refused(unchecked)), unchecked


def is_accepted(cls, options):
    try:
        return bool(
            cls(**{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()})
        )
    except (ValueError, AssertionError):
        return False
