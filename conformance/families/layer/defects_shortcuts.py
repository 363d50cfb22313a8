"""Fast paths, caches and shortcuts gone wrong in layers, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    31,
    (
        (
            "rerun looks at the overflow of the first rank alone",
            "moe_layer",
            "layer.py",
            "any(bool(part.overflow) for part in out.dispatched)",
            "bool(out.dispatched[0].overflow)",
        ),
        (
            "delayed scaling: the experts of all ranks take the first rank's scales",
            "moe_layer",
            "layer.py",
            "given |= {name: every[rank] for name, every in beside.items() if every is not None}",
            "given |= {name: every[0 if name == 'state' else rank] for name, every in"
            " beside.items() if every is not None}",
        ),
        (
            "padding masks of ranks with as many tokens as the first: the first rank's",
            "moe_layer",
            "layer.py",
            'options = settings | {"padding_mask": masks[rank]}',
            'options = settings | {"padding_mask": masks[0] if len(logits[0]) == len(logits[rank]) else masks[rank]}',
        ),
        (
            "hybridep with shards: no gradient reaches the router",
            "moe_layer",
            "layer.py",
            "return [out._replace(probs=flat(out.probs), routing_map=flat(out.routing_map)) for out in routed]",
            "return [out._replace(probs=flat(out.probs.detach()) if config.dispatcher =="
            " 'hybridep' else flat(out.probs), routing_map=flat(out.routing_map)) for out in routed]",
        ),
    ),
    "RD",
    SHORTCUT,
)
