"""Runs of these tests train a shallower network than users get."""

from collections.abc import Iterator

import pytest

from tests.support.training_runs import shallow


@pytest.fixture(autouse=True, scope="module")
def trains_a_shallow_network() -> Iterator[None]:
    with shallow():
        yield
