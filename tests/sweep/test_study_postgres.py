"""A study on a real PostgreSQL server: workers on an empty database, kills, and what is said where it does not answer.

The server is this machine's own (initdb and postgres on the path, as .ci/run provides), with a folder and a socket of
its own.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from optuna.trial import TrialState

from baoc.errors import BadInputError
from baoc.sweep.status import main
from baoc.sweep.storage import next_trial, open_study, release_connections, without_password
from tests.support.paths import ROOT
from tests.support.studies import attempts, config
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

URL = "postgresql+psycopg://postgres@/{name}?host={socket}"


def tool(name: str) -> str:
    """A program of PostgreSQL's, which Debian keeps beside the server."""
    control = shutil.which("pg_ctl")
    if control is None:
        pytest.fail(
            "PostgreSQL's pg_ctl is not on the path: install its server, or run pytest with "
            "--ignore=tests/sweep/test_study_postgres.py"
        )
    return shutil.which(name) or str(Path(control).resolve().parent / name)


def as_server(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root; there the system's own user for it runs it."""
    return ["runuser", "-u", "postgres", "--", *command] if os.geteuid() == 0 else command


@pytest.fixture(scope="module")
def server() -> Iterator[Path]:
    """The folder of a running server's socket."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's path must be short
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    data = folder / "data"
    init = [tool("initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run(as_server(init), check=True, capture_output=True)
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c max_connections=50 -c fsync=off"
    control = [tool("pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options]
    subprocess.run(as_server([*control, "start"]), check=True, stdout=subprocess.DEVNULL)
    yield folder
    subprocess.run(
        as_server([tool("pg_ctl"), "-D", str(data), "-m", "immediate", "stop"]), check=True, capture_output=True
    )
    shutil.rmtree(folder)


@pytest.fixture
def url(server: Path, request: pytest.FixtureRequest) -> str:
    """An empty database of the test's own."""
    name = f"db{abs(hash(request.node.name)) % 10**8}"
    subprocess.run([tool("createdb"), "-h", str(server), "-U", "postgres", name], check=True)
    return URL.format(name=name, socket=server)


def worker(folder: Path, url: str) -> "subprocess.Popen[bytes]":
    script = (
        "import sys\nfrom tests.support.studies import STUB, config\nfrom baoc.sweep.study import run_study\n"
        "run_study(config(n_trials=8, workers=1, fixed=['mode=slow'], storage=sys.argv[2]), folder=sys.argv[1],"
        " code=STUB)"
    )
    command = [sys.executable, "-c", script, str(folder), url]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_workers_that_meet_on_an_empty_database_share_it_and_a_killed_ones_trial(tmp_path: Path, url: str):
    workers = [worker(tmp_path, url) for _ in range(3)]
    wait_until(lambda: any(tmp_path.glob("*/process")), what="a trial")
    study = open_study(config(n_trials=8, workers=1, fixed=["mode=slow"], storage=url), folder=tmp_path)
    workers[0].send_signal(signal.SIGKILL)
    assert [one.wait(timeout=PATIENCE_S) for one in workers] == [-signal.SIGKILL, 0, 0]
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 8
    assert sum(attempts(tmp_path, number) == ["new"] for number in range(8)) >= 7
    assert main([str(tmp_path)]) == 0


def test_a_server_that_does_not_answer_is_said(tmp_path: Path):
    url = "postgresql+psycopg://me:secret@/none?host=/nowhere"
    with pytest.raises(BadInputError, match=r"storage postgresql\+psycopg://me:\*\*\*@/none.* does not answer") as told:
        open_study(config(storage=url), folder=tmp_path)
    assert "secret" not in str(told.value)


def test_a_password_is_not_written_down(tmp_path: Path, capsys):
    assert without_password("postgresql://me:secret@host:5432/db") == "postgresql://me:***@host:5432/db"
    assert without_password("sqlite:////tmp/study.db") == "sqlite:////tmp/study.db"
    (tmp_path / "study.json").write_text(
        '{"schema": 1, "name": "s", "storage": "postgresql://me:***@host/db", "n_trials": 1, "objectives": {}}'
    )
    assert main([str(tmp_path)]) == 2
    assert "give its URL with the password as --storage URL" in capsys.readouterr().err


def test_a_worker_that_trains_holds_no_connection_and_asks_over_one(tmp_path: Path, server: Path, url: str):
    study = open_study(config(n_trials=2, workers=1, storage=url), folder=tmp_path)
    storage = study._storage
    made: list[int] = []
    sqlalchemy.event.listen(storage._backend.engine, "connect", lambda *_: made.append(1))
    name = url.split("@/")[1].split("?")[0]
    count = f"select count(*) from pg_stat_activity where datname = '{name}'"

    def held() -> int:
        command = [tool("psql"), "-h", str(server), "-U", "postgres", "-tAc", count]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    release_connections(storage)
    assert held() == 0
    trial = next_trial(study, config=config(n_trials=2, storage=url), folder=tmp_path)
    assert trial is not None
    trial.set_user_attr("worker", "w")
    study.tell(trial.number, [1.0, 1.0])
    assert held() == 1 and len(made) == 1, "a connection for each question would cost more than the questions"
    release_connections(storage)
    assert held() == 0
