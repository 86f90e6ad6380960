"""A database that refuses a connection is asked again, for as long as it was said, and no longer."""

import sqlite3

import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool

from baoc.sweep.storage import retry_connections


def engine_that_refuses(times: int, monkeypatch: pytest.MonkeyPatch) -> tuple[sqlalchemy.Engine, list[int]]:
    engine = sqlalchemy.create_engine("sqlite://", poolclass=NullPool)
    tries: list[int] = []
    connect = engine.dialect.connect

    def refusing(*arguments: object, **options: object) -> object:
        tries.append(1)
        if len(tries) <= times:
            raise sqlite3.OperationalError("too many clients already")
        return connect(*arguments, **options)

    monkeypatch.setattr(engine.dialect, "connect", refusing)
    return engine, tries


def test_a_refused_connection_is_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    engine, tries = engine_that_refuses(2, monkeypatch)
    retry_connections(engine, patience_s=30.0)
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("select 1")).scalar() == 1
    assert len(tries) == 3


def test_patience_ends(monkeypatch: pytest.MonkeyPatch):
    engine, tries = engine_that_refuses(10**6, monkeypatch)
    retry_connections(engine, patience_s=0.2)
    with pytest.raises(OperationalError, match="too many clients"):
        engine.connect()
    assert len(tries) > 1
