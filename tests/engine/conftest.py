"""Fixtures of several test modules."""

from collections.abc import Iterator

import pytest

from tests.engine.verdict_helpers import book as book
from tests.engine.world_fixtures import forget, register


@pytest.fixture(scope="module")
def with_shift() -> Iterator[None]:
    """The suite knows the function `shift`."""
    register()
    yield
    forget()
