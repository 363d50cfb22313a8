"""Fixtures of several test modules."""

from tests.engine.verdict_helpers import book as book
