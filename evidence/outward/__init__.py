"""The test files of other packages, run over `moe_fast`.

Such a test imports functions of its own package. A *shim* here puts functions of `moe_fast` under
those names before pytest collects the file, so that the test runs unchanged. The files are fetched
by whoever runs them and never belong to this repository; a manifest in their folder lists them:

    python -m evidence.outward FOLDER OUT

A call that `moe_fast` does not offer skips its test with a reason that begins with "not offered".
"""
