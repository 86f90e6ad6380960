"""Whatever starts this worker's server of forks, it has imported what runs need: a server that stubs had started would
leave each run that other tests fork to import torch and Lightning by itself."""

from collections.abc import Iterator

import pytest

from baoc.sweep import forkserver
from tests.support.commands import NEEDED


@pytest.fixture(scope="session", autouse=True)
def one_server() -> Iterator[None]:
    preload = forkserver.preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "preload", lambda *modules: preload(*dict.fromkeys((*modules, *NEEDED))))
        yield
