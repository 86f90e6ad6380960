"""Threads that wait sleep where cores are shared, and the user's own word on it counts."""

import os

import pytest

from baoc.cli import waiting


@pytest.mark.parametrize(
    ("load", "cores", "shared"), [(0.1, 2, False), (0.5, 2, False), (0.8, 2, True), (3, 16, False), (5, 16, True)]
)
def test_shared_is_told_by_the_load(monkeypatch: pytest.MonkeyPatch, load: float, cores: int, shared: bool) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert waiting.cores_are_shared() == shared
    environment: dict[str, str] = {}
    assert waiting.sleep_where_shared(environment) == shared
    assert environment == ({"OMP_WAIT_POLICY": "PASSIVE"} if shared else {})


@pytest.mark.parametrize("name", waiting.VARIABLES)
def test_what_the_user_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(waiting, "cores_are_shared", lambda: True)
    environment = {name: "ACTIVE"}
    assert not waiting.sleep_where_shared(environment) and environment == {name: "ACTIVE"}


def test_a_system_that_does_not_tell_its_load_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert not waiting.cores_are_shared()
