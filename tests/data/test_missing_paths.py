"""A path that is not there is told as that by every data set that reads one."""

from pathlib import Path

import pytest

from baoc.data import DATASETS, build_data
from baoc.errors import BadInputError


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if row.takes_path])
def test_a_missing_path_is_said(name: str, tmp_path: Path):
    row = DATASETS[name]
    with pytest.raises(
        BadInputError, match=r"dataset.path=.*nowhere(: use dataset=latents| does not exist: | is no folder )"
    ):
        build_data(name, task=row.tasks[0], batch_size=8, path=str(tmp_path / "nowhere"))
