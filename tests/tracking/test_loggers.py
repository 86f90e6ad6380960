"""Which loggers a run gets, and where W&B goes without a key, without a network, or with both."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baoc.errors import BadInputError, BudgetBreachedError
from baoc.tracking import wandb_run
from baoc.tracking.loggers import finishing, make_loggers
from baoc.tracking.wandb_run import choose_mode, choose_run_id

SERVER = "http://wandb.example:8080"


class FakeRun:
    """Stands for what wandb.init returns; `exit_codes` holds what it was finished with."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.dir = str(Path(options["dir"]) / "wandb" / "offline-run" / "files")
        self.url = "https://wandb.example/p/1"
        self.exit_codes: list[int] = []

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


@pytest.fixture
def inits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeRun]:
    """wandb.init records its options and never reaches for a network; there is no key and no wish of the user's."""
    runs: list[FakeRun] = []

    def init(**options: Any) -> FakeRun:
        runs.append(FakeRun(options))
        return runs[-1]

    monkeypatch.setattr("wandb.init", init)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", SERVER)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return runs


def make(tmp_path: Path, *names: str, mode: str = "auto") -> tuple[list[Any], list[str]]:
    said: list[str] = []
    about = {"name": "job", "config": {"lr": 0.1}, "group": "g", "tags": ["t"], "say": said.append}
    wandb = {"project": "p", "entity": None, "mode": mode}
    return make_loggers(names or ("wandb",), wandb=wandb, run_dir=tmp_path, **about), said


def test_the_jsonl_is_always_there_and_comes_first(tmp_path: Path) -> None:
    (logger,), said = make(tmp_path, "jsonl")
    assert type(logger).__name__ == "JsonlLogger" and said == []
    assert (logger.name, logger.save_dir, logger.log_dir) == ("job", str(tmp_path), str(tmp_path))
    loggers, _ = make(tmp_path, "csv")
    loggers[0].log_metrics({"a": 1.0}, step=0)
    loggers[0].finalize("success")
    assert (tmp_path / "metrics.csv").is_file()


def test_no_key_goes_offline_at_once_in_one_line(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be asked of a network without a key")

    monkeypatch.setattr(socket, "create_connection", touched)
    monkeypatch.setattr(threading.Thread, "start", touched)
    _, said = make(tmp_path)
    (run,) = inits
    assert run.options["mode"] == "offline"
    assert said == [
        "W&B: offline (no key in WANDB_API_KEY or netrc); upload it later with: "
        f"wandb sync {tmp_path / 'wandb' / 'offline-run'}"
    ]


def test_a_run_is_one_of_its_own_with_plain_config(tmp_path: Path, inits: list[FakeRun]) -> None:
    make(tmp_path)
    options = inits[0].options
    assert options["reinit"] == "create_new"
    assert (options["name"], options["group"], options["tags"], options["config"]) == ("job", "g", ["t"], {"lr": 0.1})
    assert options["dir"] == str(tmp_path)
    assert options["settings"].init_timeout == 10


def test_a_key_without_a_network_goes_offline(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(socket, "create_connection", refused)
    _, said = make(tmp_path)
    assert [run.options["mode"] for run in inits] == ["offline"]
    assert said[0].startswith("W&B: offline (wandb.example does not answer); upload")


def test_a_look_up_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, inits: list[FakeRun]) -> None:
    release = threading.Event()

    def hangs(*_: Any, **__: Any) -> None:
        release.wait(60)
        raise OSError("at last")

    monkeypatch.setattr(socket, "create_connection", hangs)
    assert not wandb_run.reachable(SERVER, timeout_s=0.05)
    release.set()


def test_a_server_that_fails_during_init_goes_offline(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb
    from wandb.errors import CommError

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr(wandb_run, "reachable", lambda url: True)
    offline, failed = wandb.init, CommError("timed out\nsecond line")

    def init(**options: Any) -> Any:
        if options["mode"] == "online":
            raise failed
        return offline(**options)

    monkeypatch.setattr("wandb.init", init)
    _, said = make(tmp_path)
    assert [run.options["mode"] for run in inits] == ["offline"]
    assert said[0].startswith("W&B: offline (CommError: timed out); upload")


def test_a_key_and_a_network_go_online(tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_run, "reachable", lambda url: True)
    (tmp_path / "netrc").write_text("machine wandb.example:8080\n  login user\n  password " + "k" * 40 + "\n")
    _, said = make(tmp_path)
    assert [run.options["mode"] for run in inits] == ["online"]
    assert said == ["W&B: online, https://wandb.example/p/1"]


def test_a_key_for_another_server_is_no_key(tmp_path: Path, inits: list[FakeRun]) -> None:
    (tmp_path / "netrc").write_text("machine elsewhere.example\n  login user\n  password x\n")
    make(tmp_path)
    assert inits[0].options["mode"] == "offline"


@pytest.mark.parametrize("content", [b"\xff\xfe machine", b"machine"])
def test_a_damaged_netrc_holds_no_key(content: bytes, tmp_path: Path, inits: list[FakeRun]) -> None:
    (tmp_path / "netrc").write_bytes(content)
    _, said = make(tmp_path)
    assert said[0].startswith("W&B: offline (no key in WANDB_API_KEY or netrc)")


@pytest.mark.parametrize("url", ["http://[bad", "http://localhost:port", "http://localhost:99999999"])
def test_an_address_that_is_none_leaves_wandb_out(
    url: str,
    tmp_path: Path,
    inits: list[FakeRun],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    loggers, said = make(tmp_path)
    assert len(loggers) == 1 and not inits and said[0].startswith("W&B: left out (ValueError: ")
    assert said[0].endswith("metrics.jsonl holds every step") and "Traceback" not in capfd.readouterr().err


def test_a_setting_that_wandb_does_not_take_is_named(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def setup() -> None:
        wandb.Settings(x_graphql_timeout_seconds="abc")  # pyright: ignore[reportArgumentType]

    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setattr("wandb.setup", setup)
    loggers, said = make(tmp_path)
    assert len(loggers) == 1 and not inits
    assert (
        "left out (ValidationError: 1 validation error for Settings x_graphql_timeout_seconds Input should" in said[0]
    )


def test_what_was_asked_for_is_followed(tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch) -> None:
    loggers, said = make(tmp_path, mode="disabled")
    assert (len(loggers), said, inits) == (1, [], [])
    monkeypatch.setenv("WANDB_MODE", "disabled")
    loggers, _ = make(tmp_path)
    assert len(loggers) == 1
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    _, said = make(tmp_path)
    assert said[0].startswith("W&B: offline (WANDB_MODE says so)")


def test_asking_for_online_without_a_key_is_an_error_not_a_question(tmp_path: Path, inits: list[FakeRun]) -> None:
    with pytest.raises(BadInputError, match=r"mode=online needs a key: set WANDB_API_KEY or run `wandb login`"):
        make(tmp_path, mode="online")


@contextmanager
def swallowed(kind: type[BaseException]) -> Iterator[None]:
    with pytest.raises(kind):
        yield


@pytest.mark.parametrize(
    ("error", "code"), [(BudgetBreachedError("x"), 4), (RuntimeError("x"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_failed_job_closes_its_run_as_failed(
    tmp_path: Path, inits: list[FakeRun], error: BaseException, code: int
) -> None:
    loggers, _ = make(tmp_path)
    with swallowed(type(error)), finishing(loggers):
        raise error
    assert inits[0].exit_codes == [code]
    loggers[1].log_metrics({"a": 1.0}, step=0)  # last words after the end are not an error


def test_a_job_that_ends_well_closes_its_run_once(tmp_path: Path, inits: list[FakeRun]) -> None:
    loggers, _ = make(tmp_path)
    with finishing(loggers):
        loggers[1].finalize("success")  # Lightning says this after each fit and each validation
        assert inits[0].exit_codes == []
    assert inits[0].exit_codes == [0]


LOST = "W&B: lost (ConnectionResetError: gone); the run goes on without it, metrics.jsonl holds every step"


def gone(*_: Any, **__: Any) -> None:
    raise ConnectionResetError("gone")


@pytest.mark.parametrize("moment", ["define_metric", "log_hyperparams", "log", "summary"])
def test_wandb_is_given_up_wherever_it_fails(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Once, with what is left of it ended: its process would end with a traceback of its own when Python does."""
    ended: list[str] = []
    monkeypatch.setattr("wandb.teardown", lambda exit_code: ended.append("service"))
    monkeypatch.setattr(FakeRun, "log", gone, raising=False)
    if moment == "define_metric":
        monkeypatch.setattr(FakeRun, "define_metric", gone)
    loggers, said = make(tmp_path)
    logger, (run,) = loggers[1], inits
    run.config, run.summary = SimpleNamespace(update=gone), SimpleNamespace(update=gone)  # pyright: ignore
    calls = {
        "define_metric": lambda: None,
        "log_hyperparams": lambda: logger.log_hyperparams({"lr": 0.1}),
        "log": lambda: logger.log_metrics({"a": 1.0}, step=0),
        "summary": lambda: logger.log_summary({"quality": 1.0}),
    }
    calls[moment]()
    logger.log_metrics({"a": 1.0}, step=1)
    logger.finish(exit_code=0)
    assert said[1:] == [LOST]
    assert (run.exit_codes, ended) == ([1], ["service"])


def test_a_table_that_is_refused_costs_tables_alone(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []
    log = lambda self, values: gone() if "allocation" in values else logged.append(values)  # noqa: E731
    monkeypatch.setattr(FakeRun, "log", log, raising=False)
    loggers, said = make(tmp_path)
    for _ in range(2):  # the second is not tried: it would wait for the server again
        loggers[1].log_table("allocation", columns=["a"], data=[[1]])
    loggers[1].log_metrics({"a": 1.0}, step=0)
    text = "W&B: allocation, and tables and pictures after it, are left out (ConnectionResetError: gone)"
    assert said[1:] == [text] and logged[0]["a"] == 1.0


def test_a_run_that_cannot_be_opened_is_left_out(
    tmp_path: Path, inits: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb.init", gone)
    monkeypatch.setattr("wandb.teardown", lambda exit_code: None)
    loggers, said = make(tmp_path)
    assert len(loggers) == 1
    assert said == ["W&B: left out (ConnectionResetError: gone); metrics.jsonl holds every step"]


def test_an_unknown_mode_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "bogus")
    with pytest.raises(BadInputError, match="WANDB_MODE=bogus in the environment is no mode of W&B: unset it, or set"):
        choose_mode("auto")


def test_a_run_id_in_the_environment_is_that_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_run_id() is None
    monkeypatch.setenv("WANDB_RUN_ID", "mine-of-this-test")
    first, second, third = choose_run_id(), choose_run_id(), choose_run_id()
    assert first == "mine-of-this-test" and len({first, second, third}) == 3, "further jobs are runs of their own"
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-study")
    monkeypatch.setenv("WANDB_JOB_TYPE", "trial")
    assert choose_run_id() not in (None, "of-a-study")
