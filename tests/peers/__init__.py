"""Tests of the adapters of other packages, which are skipped where a package is not installed."""

from importlib.util import find_spec

import pytest

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1"
)
