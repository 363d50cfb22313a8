"""Fixtures of several test modules."""

from tests.judge.ratio_helpers import expected as expected
