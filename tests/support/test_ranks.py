"""Processes that tests fork have the environment of the test, not of the server that forks them."""

import os
from pathlib import Path

import pytest

from tests.support.ranks import in_processes

pytestmark = pytest.mark.slow

GIVEN, GONE = "BAOC_TEST_GIVEN", "BAOC_TEST_GONE"


def environment(rank: int, size: int, store: Path) -> tuple[str | None, str | None]:
    return os.environ.get(GIVEN), os.environ.get(GONE)


def test_forks_have_their_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GONE, "1")
    assert in_processes(environment, size=1) == [(None, "1")]
    monkeypatch.delenv(GONE)
    monkeypatch.setenv(GIVEN, "1")
    assert in_processes(environment, size=1) == [("1", None)]
