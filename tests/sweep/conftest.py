"""Whatever starts this worker's server of forks, it has imported what runs need: a server that stubs had started would
leave each run that other tests fork to import torch and Lightning by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from baoc.sweep import forkserver
from tests.support.commands import NEEDED


@pytest.fixture(scope="session", autouse=True)
def one_server() -> Iterator[None]:
    preload = forkserver.preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "preload", lambda *modules: preload(*dict.fromkeys((*modules, *NEEDED))))
        yield


@pytest.fixture
def server_is_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For tests of trials that write nothing for seconds: they do not while the server still imports either."""
    folder: Path = tmp_path_factory.mktemp("server")
    forkserver.preload()
    forkserver.start(int, log=folder / "log", lock=folder / "lock", arguments=(), variables={}).join()
