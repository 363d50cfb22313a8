"""Fast paths, caches and shortcuts gone wrong in parameters, as changes of the reference."""

from conformance.core.rewritten import SHORTCUT, series

DEFECTS = series(
    35,
    (
        (
            "other keys that begin like the extra state are lost",
            "merge_extra_state",
            "parameters/extra_state.py",
            "if name not in keys}",
            "if not name.startswith(keys[0])}",
        ),
        (
            "other keys that begin like the parameter's are lost",
            "normalize_parameters normalize_master_parameters",
            "parameters/names.py",
            "if name not in parts}",
            "if not name.startswith(key)}",
        ),
        (
            "experts are counted among the present ones",
            "shard_parameters",
            "parameters/shards.py",
            "expert, values = rank * local + e, by_expert",
            'expert, values = rank * local + sum(f"{name}{i}" in by_expert for i in range(e)), by_expert',
        ),
        (
            "a list of one member is taken for one parameter, whose shard may be empty",
            "expand_shard",
            "parameters/shards.py",
            "first = offset or 0\n",
            "if len(members) == 1 and shard is not None:\n"
            "        return [MemberShard(members[0], shard, offset)]\n"
            "    first = offset or 0\n",
        ),
    ),
    "RD",
    SHORTCUT,
)
