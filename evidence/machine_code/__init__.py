"""The machine code of moe_fast's kernels for an H200, read without one.

    python -m evidence.machine_code                      # every configuration that the calls reach
    python -m evidence.machine_code --seconds 600        # as many as that time allows
    python -m evidence.machine_code --kernels NAME,NAME  # some kernels

A kernel is right or wrong for each configuration: tile, warps, stages, options. `calls` makes calls
at the sizes of models, `launches` records the configurations that the launchers choose for them,
`compiling` compiles each for sm_90 with the installed Triton, `disassembly` reads the machine code,
and `findings` judges it.
"""
