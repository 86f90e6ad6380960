"""Runs of these tests train and time less than those of users."""

from collections.abc import Iterator

import pytest

from tests.support.training_runs import brief


@pytest.fixture(autouse=True, scope="module")
def trains_briefly() -> Iterator[None]:
    with brief():
        yield
