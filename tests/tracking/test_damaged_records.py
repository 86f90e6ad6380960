"""JSON files of ours, damaged in every way at every field: a reader takes them or says a sentence, no other error."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baoc.cli.jobs import RACE_SETUP_FILE, read_failures, with_race_command
from baoc.config.from_hydra import to_conf
from baoc.core.recipes import RECIPES, recipe_node
from baoc.errors import BadInputError
from baoc.frontier.planned import read_plans
from baoc.frontier.runs import find_runs
from baoc.racing.entrants import ENTRANTS_FILE, read_target
from baoc.racing.records import find_race, race_family, read_taken_race
from baoc.sweep.race import RaceRun
from baoc.sweep.trial_outcome import trial_outcome
from baoc.sweep.trial_process import read_outcome
from baoc.tracking.files import write_json
from baoc.types import to_plain
from tests.support.races import config, write_target
from tests.support.values import make_result

CONTENTS = (b"", b"[]", b"3", b"null", b"{}", b'"x"', b'{"schema": 1}', b"\xff\xfe{}", b"[" * 200_000, b"1" * 5000)
VALUES = (None, [], {}, "x", 3, -1, math.nan, True)
RACE: dict[str, Any] = {
    "schema": 1, "choice": "foam8_lean", "lr": 6e-3, "recipe": recipe_node(RECIPES["foam8_lean"]), "told": "told",
    "claim": "the claim", "verdict": {}, "budget": "state_25",
}  # fmt: skip


def damaged(content: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    text = json.dumps(content).encode()
    yield from ((f"{part[:20]!r}", part) for part in (*CONTENTS, text[: len(text) // 2]))
    for path in _paths(content, depth=3):
        for value in (..., *VALUES):
            changed = copy.deepcopy(content)
            inner: Any = changed
            for key in path[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield f"{path}: {value}", json.dumps(changed).encode()


def _paths(value: Any, *, depth: int) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        if depth > 1:
            yield from ((key, *path) for path in _paths(item, depth=depth - 1))


def _race(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    given = config(folder)
    content = RACE | {"family": to_plain(race_family(given, size="tiny"))}
    return folder / "race.json", content, lambda: find_race(given, size="tiny", library=folder)


def _taken(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    file, race, _ = _race(folder)
    file = file.with_name("taken.json")
    return (
        file,
        {"schema": 1, "race": race},
        lambda: read_taken_race(file),
    )


def _entrants(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    write_target(folder, names=("muon8_lean", "plan"))
    file = folder / ENTRANTS_FILE
    return file, json.loads(file.read_text()), lambda: read_target(file)


def _setup(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    given = config(folder)
    race = RaceRun(given, overrides=[], folder=folder, command="c", code="")
    content = {"schema": 1, "words": ["a=1"], "settings": to_plain(to_conf(given)), "plan_s": 1.0}
    return folder / RACE_SETUP_FILE, content, race.check_setup


def _resumed(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    file = folder / RACE_SETUP_FILE
    return file, {"schema": 1, "words": ["a=1"]}, lambda: with_race_command(["mode=race", f"resume={folder}"])


def _error(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    content = {"schema": 1, "kind": "K", "message": "m", "exit_code": 3, "details": ""}
    return folder / "0_a" / "error.json", content, lambda: (read_failures(folder), find_runs(folder))


def _plan(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    content = {"device": "cpu", "name": "a_0", "peak_bytes": 1, "risk": 0.5, "samples_per_s": 3.0}
    return folder / "0_a" / "plan.json", content, lambda: read_plans(folder)


def _result(folder: Path) -> tuple[Path, dict[str, Any], Callable[[], object]]:
    objectives = {"quality": "minimize", "state_bytes": "minimize", "samples_per_s": "maximize"}

    def read() -> None:
        trial_outcome([read_outcome(folder, exit_code=0)], objectives=objectives)
        find_runs(folder)

    return folder / "result.json", to_plain(make_result()), read


@pytest.mark.slow
@pytest.mark.parametrize("reader", [_race, _taken, _entrants, _setup, _resumed, _error, _plan, _result])
def test_a_damaged_file_is_read_or_refused_by_name(reader: Callable[..., Any], tmp_path: Path):
    file, content, read = reader(tmp_path)
    write_json(file, content)
    read()
    refused = 0
    for what, text in damaged(content):
        file.write_bytes(text)
        try:
            read()
        except BadInputError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert refused > 10 or reader in (_error, _result)  # which read on: a job's failure, and a trial's


def test_a_damaged_race_is_passed_over_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever became of other races, the newest intact one of the family is taken."""
    given = config(tmp_path)
    intact = RACE | {"family": to_plain(race_family(given, size="tiny"))}
    write_json(tmp_path / "a.json", intact)
    for name, text in {"b": b"{", "c": b"[]", "d": json.dumps(intact | {"lr": -1}).encode()}.items():
        (tmp_path / f"{name}.json").write_bytes(text)
    (tmp_path / "later_version.json").write_text('{"schema": 2}')
    assert find_race(given, size="tiny", library=tmp_path)["choice"] == "foam8_lean"
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("passed over when looking for a race:") == 3 and "later_version" not in said


def test_a_job_whose_error_is_damaged_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, text in enumerate(('{"schema": 1, "kind": "K", "message": "m", "exit_code": 3}', "{")):
        (tmp_path / f"{number}_a").mkdir()
        (tmp_path / f"{number}_a" / "error.json").write_text(text)
    assert [failure.exit_code for failure in read_failures(tmp_path)] == [3, 2]
    assert "error.json is not JSON" in capsys.readouterr().err


def test_a_result_that_lacks_an_objective_fails_its_trial(tmp_path: Path):
    (tmp_path / "result.json").write_text('{"quality": {"value": 1.0}}')
    outcome = trial_outcome([read_outcome(tmp_path, exit_code=0)], objectives={"state_bytes": "minimize"})
    assert outcome.text == "failed: its result.json lacks a valid state_bytes"
    (tmp_path / "result.json").write_text('{"quality": {"value": "x"}}')
    assert read_outcome(tmp_path, exit_code=0).message.startswith(f"{tmp_path / 'result.json'} lacks a valid quality.v")
