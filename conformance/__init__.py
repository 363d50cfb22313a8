"""The conformance suite: any namespace that offers the reference's functions is compared with the reference.

    moe-conformance run --impl my_kernels.moe

`interface` says what an implementation is, `case` what a case is. `strategies` draw cases, `contracts` build their inputs and
expected outputs, `judge` compares, `execute` runs a case in a child process that may crash or hang, `reduction` finds the
smallest failing case, `verdict` adds everything up, `report` prints it. `cli` and `plugin` are two doors to the same suite.
"""
