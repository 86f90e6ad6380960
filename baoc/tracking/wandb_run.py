"""One W&B run per job: online where there is a key and a network, else offline, never a wait.

wandb waits 90 s for a network by default, asks for a key on a terminal, and lets a second job log into the run that a
crashed first one left open. Here the choice is made before `wandb.init`, and every run is opened as one of its own.
"""

import io
import netrc
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger

from baoc.errors import BadInputError
from baoc.types import to_plain

INIT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
LET_GO_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 60.0  # what is not uploaded by then stays in the run folder for `wandb sync`
PUBLIC_HOST = "api.wandb.ai"
MODES = ("auto", "online", "offline", "disabled")


class WandbSettings(Protocol):
    """The part of conf/logger that is about W&B."""

    @property
    def project(self) -> str: ...
    @property
    def entity(self) -> str | None: ...
    @property
    def mode(self) -> str: ...


class WandbRunLogger(WandbLogger):
    """Lightning's W&B logger around a run of its own. A failed fit closes the run as failed, exit code 1.

    Networks that come and go are wandb's affair. Where its own process is gone or refuses, that is said once, and the
    run goes on without it.
    """

    def __init__(self, run: Any, *, project: str, run_dir: Path, say: Callable[[str], None] = print):
        super().__init__(experiment=run, project=project, save_dir=run_dir)
        self.closed = self._bearing = self._plain = False
        self._say = say
        self._bear(lambda: run.define_metric("trainer/global_step", hidden=True))
        self._bear(lambda: run.define_metric("*", step_metric="trainer/global_step", step_sync=True))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        log = super().log_hyperparams
        self._bear(lambda: log(*args, **kwargs))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        log = super().log_metrics
        self._bear(lambda: log(metrics, step))  # the last words of a failed fit come after `finalize`

    def log_table(self, key: str, *args: Any, **kwargs: Any) -> None:
        log = super().log_table
        self._bear(lambda: log(key, *args, **kwargs), lacks=key)

    def log_image(self, key: str, *args: Any, **kwargs: Any) -> None:
        log = super().log_image
        self._bear(lambda: log(key, *args, **kwargs), lacks=key)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        self._bear(lambda: self.experiment.summary.update(values))

    def finalize(self, status: str) -> None:
        """Lightning calls this after each fit and each validation; only a failure ends the run here."""
        finalize = super().finalize
        self._bear(lambda: finalize(status))
        if status != "success":
            self.finish(exit_code=1)

    def finish(self, *, exit_code: int) -> None:
        """Ends the run, once; any exit code but 0 marks it failed."""
        self._bear(lambda: self.experiment.finish(exit_code=exit_code))
        self.closed = True

    def _bear(self, call: Callable[[], Any], *, lacks: str | None = None) -> None:
        """What wandb raises ends its part in the run, not the run. Nothing is done once that part has ended.

        A table or a picture (`lacks`) that is refused costs those alone: they take more of a server than numbers do,
        and each of them waits for one that does not answer.
        """
        if self.closed or (lacks is not None and self._plain):
            return
        if self._bearing:  # a table is logged as a metric
            call()
            return
        self._bearing = True
        try:
            call()
        except Exception as error:
            if lacks is not None:
                self._plain = True
                self._say(f"W&B: {lacks}, and tables and pictures after it, are left out ({_why(error)})")
                return
            self.closed = True
            self._say(f"W&B: lost ({_why(error)}); the run goes on without it, metrics.jsonl holds every step")
            let_go(self.experiment)
        finally:
            self._bearing = False


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else 'no reason given'}"


def let_go(run: Any = None, *, timeout_s: float = LET_GO_TIMEOUT_S) -> None:
    """Ends `run` and wandb's own process, or what is left of them, which would else end with a traceback.

    In a thread, because it waits for uploads.
    """

    def end() -> None:
        import wandb

        with suppress(Exception):
            if run is not None:
                run.finish(exit_code=1)
        with suppress(Exception):
            wandb.teardown(exit_code=1)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(timeout_s)


def open_run(
    settings: WandbSettings,
    *,
    run_dir: Path,
    name: str,
    config: Mapping[str, Any],
    group: str | None,
    job_type: str | None,
    tags: Sequence[str],
    say: Callable[[str], None],
    init_timeout_s: float = INIT_TIMEOUT_S,
) -> WandbRunLogger | None:
    """Opens the run of one job and says in one line where it goes; None where W&B is disabled."""
    mode, why = choose_mode(settings.mode)
    if mode == "disabled":
        return None
    import wandb

    run_dir.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "project": settings.project,
        "entity": settings.entity,
        "name": name,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,  # a study names itself and its trials so
        "job_type": os.environ.get("WANDB_JOB_TYPE") or job_type,
        "tags": list(tags),
        "config": to_plain(config),
        "dir": str(run_dir),
        "reinit": "create_new",
    }
    quiet = wandb.Settings(
        init_timeout=init_timeout_s, finish_timeout=FINISH_TIMEOUT_S, quiet=True, silent=True, console="off"
    )
    run = None
    if mode == "online":
        try:
            with redirect_stderr(io.StringIO()):  # it would say where it found the key
                run = wandb.init(**options, mode="online", settings=quiet)
        except Exception as error:  # a bad key, no network, a server that fails: none of them may stop a training run
            why = _why(error)
    if run is None:
        try:
            run = wandb.init(**options, mode="offline", settings=quiet)
        except Exception:  # its process, which jobs share, died in an earlier one
            let_go()
            try:
                run = wandb.init(**options, mode="offline", settings=quiet)
            except Exception as error:
                say(f"W&B: left out ({_why(error)}); metrics.jsonl holds every step")
                return None
        say(f"W&B: offline ({why}); upload it later with: wandb sync {Path(run.dir).parent}")
    else:
        say(f"W&B: online, {run.url}")
    return WandbRunLogger(run, project=settings.project, run_dir=run_dir, say=say)


def choose_mode(asked: str) -> tuple[str, str]:
    """(`online` | `offline` | `disabled`, why). `auto` follows WANDB_MODE, then looks for a key and a network.

    Raises BadInputError for an unknown mode, and for `online` without a key, as wandb would wait for one to be typed.
    """
    if asked not in MODES:
        raise BadInputError(f"logger.wandb.mode={asked!r} is not allowed: choose one of {', '.join(MODES)}")
    from_environment = {"dryrun": "offline"}.get(wish := os.environ.get("WANDB_MODE", ""), wish)
    if asked == "auto" and from_environment in ("offline", "disabled"):
        return from_environment, "WANDB_MODE says so"
    if asked in ("offline", "disabled"):
        return asked, "logger.wandb.mode says so"
    url = base_url()
    if not has_key(url):
        if asked == "online":
            raise BadInputError(
                "logger.wandb.mode=online needs a key: set WANDB_API_KEY or run `wandb login`, or use mode=auto, which "
                "goes offline without one"
            )
        return "offline", "no key in WANDB_API_KEY or netrc"
    if not reachable(url):
        return "offline", f"{urlsplit(url).hostname} does not answer"
    return "online", ""


def base_url() -> str:
    """The server that wandb talks to: WANDB_BASE_URL, or what `wandb login --host` wrote, or the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    import wandb

    return str(wandb.setup().settings.base_url)


def has_key(url: str) -> bool:
    """Whether wandb would find credentials without asking: WANDB_API_KEY, an identity token, or netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    places = [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]
    for place in places:
        try:
            entries = netrc.netrc(place.expanduser()).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if entries.keys() & {urlsplit(url).netloc, PUBLIC_HOST}:
            return True
    return False


def reachable(url: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether the server accepts a connection within `timeout_s`; taken for granted behind a proxy.

    In a thread, because a name look-up without a network cannot be given a limit.
    """
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")):
        return True
    parts = urlsplit(url)
    answered = threading.Event()

    def connect() -> None:
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
            answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()
