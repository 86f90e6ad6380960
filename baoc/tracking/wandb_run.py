"""One W&B run per job: online if there is a key and a network, otherwise offline.

The mode is chosen before `wandb.init`, which would wait 90 s for a network and ask for a key on the terminal. Every job
opens a run of its own; wandb would let it log into the run that a crashed job left open.
"""

import io
import netrc
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger

from baoc.errors import BadInputError
from baoc.types import to_plain

INIT_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 60.0  # data that is not uploaded by then stays in the run folder for `wandb sync`
PUBLIC_HOST = "api.wandb.ai"
KEPT = "metrics.jsonl holds every step"
_USED_IDS: set[str] = set()  # values of WANDB_RUN_ID that a run of this process has


class WandbRunLogger(WandbLogger):
    """Lightning's W&B logger for one run, which a failed fit closes with exit code 1. wandb handles network outages
    itself. If a call of wandb raises, because its process is gone or refuses, this is printed once, and training goes
    on without W&B."""

    def __init__(
        self,
        run: Any,
        *,
        project: str,
        run_dir: Path,
        say: Callable[[str], None] = print,
        offline_folder: Path | None = None,
        kept: str = KEPT,
    ):
        """`offline_folder`: where an offline run is kept until it is uploaded. `kept`: what else holds its values."""
        super().__init__(experiment=run, project=project, save_dir=run_dir)
        self._offline_folder = offline_folder
        self.closed = self._guarding = self._media_refused = False
        self._say, self._kept = say, kept
        self._guard(lambda: run.define_metric("trainer/global_step", hidden=True))
        self._guard(lambda: run.define_metric("*", step_metric="trainer/global_step", step_sync=True))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self._guard(super().log_hyperparams, *args, **kwargs)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._guard(super().log_metrics, metrics, step)  # a failed fit logs after `finalize`

    def log_table(self, key: str, *args: Any, **kwargs: Any) -> None:
        self._guard(super().log_table, key, *args, media=key, **kwargs)

    def log_image(self, key: str, *args: Any, **kwargs: Any) -> None:
        self._guard(super().log_image, key, *args, media=key, **kwargs)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        self._guard(lambda: self.experiment.summary.update(values))

    def finalize(self, status: str) -> None:
        """Called by Lightning after each fit and validation; ends the run after a failure only."""
        self._guard(super().finalize, status)
        if status != "success":
            self.finish(exit_code=1)

    def finish(self, *, exit_code: int) -> None:
        """Ends the run, once; an exit code other than 0 marks it as failed."""
        if self.closed:
            return
        self._guard(lambda: self.experiment.finish(exit_code=exit_code))
        folder = self._offline_folder
        if not self.closed and folder is not None and not any(folder.glob("*.wandb")):  # wandb itself does not notice
            self._say(f"W&B: lost ({folder} was removed or moved during the run); {self._kept}")
        self.closed = True

    def _guard(self, call: Callable[..., Any], *args: Any, media: str | None = None, **kwargs: Any) -> None:
        """Runs `call(*args, **kwargs)`; after an exception closes the W&B run, and later calls do nothing. An exception
        while logging `media` (a table or a picture) stops media only: a server may refuse them and still take numbers,
        and each of them would wait for an answer again."""
        if self.closed or (media is not None and self._media_refused):
            return
        if self._guarding:  # log_table calls log_metrics
            call(*args, **kwargs)
            return
        self._guarding = True
        try:
            call(*args, **kwargs)
        except Exception as error:
            if media is not None:
                self._media_refused = True
                self._say(f"W&B: {media}, and tables and pictures after it, are left out ({_describe(error)})")
                return
            self.closed = True
            self._say(f"W&B: lost ({_describe(error)}); the run goes on without it, {self._kept}")
            close_wandb(self.experiment)
        finally:
            self._guarding = False


def _describe(error: Exception) -> str:
    kind = type(error).__name__
    lines = str(error).splitlines()[: 3 if kind == "ValidationError" else 1]  # W&B names a wrong setting in the second
    return f"{kind}: {' '.join(' '.join(lines).split())[:160] or 'no reason given'}"


def _left_out(error: Exception, *, kept: str) -> str:
    return f"W&B: left out ({_describe(error)}); {kept}"


def close_wandb(run: Any = None) -> None:
    """Ends `run` and wandb's own process, which would otherwise end with a traceback. Runs in a thread with a timeout,
    because it waits for uploads."""

    def end() -> None:
        import wandb

        with suppress(Exception):
            if run is not None:
                run.finish(exit_code=1)
        with suppress(Exception):
            wandb.teardown(exit_code=1)

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(CLOSE_TIMEOUT_S)


def open_run(
    *,
    project: str,
    entity: str | None,
    mode: str,
    run_dir: Path,
    name: str,
    config: Mapping[str, Any],
    group: str | None,
    job_type: str | None,
    tags: Sequence[str],
    say: Callable[[str], None],
    kept: str = KEPT,
) -> WandbRunLogger | None:
    """Opens the run of one job and prints its address; None if W&B is disabled or cannot start."""
    try:
        mode, why = choose_mode(mode)
    except BadInputError:
        raise
    except Exception as error:  # W&B's own settings or its address in the environment, which it does not take
        say(_left_out(error, kept=kept))
        return None
    if mode == "disabled":
        return None
    import wandb

    run_dir.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "project": project,
        "entity": entity,
        "name": name,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,  # set by a study for its trials
        "job_type": os.environ.get("WANDB_JOB_TYPE") or job_type,
        "tags": list(tags),
        "config": to_plain(config),
        "dir": str(run_dir),
        "reinit": "create_new",
        "id": choose_run_id(),
    }
    quiet = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, quiet=True, silent=True, console="off"
    )
    tries: list[Literal["online", "offline"]] = (
        ["offline", "offline"] if mode == "offline" else ["online", "offline", "offline"]
    )
    while True:
        try:
            with redirect_stderr(io.StringIO()):  # it prints where it found the key
                run = wandb.init(**options, mode=tries[0], settings=quiet)
            break
        except Exception as error:  # a bad key, no network or a failing server must not stop a training run
            if tries == ["offline"]:
                say(_left_out(error, kept=kept))
                return None
            if tries.pop(0) == "online":
                why = _describe(error)
            else:
                close_wandb()  # wandb's process, which jobs share, died during an earlier job
    folder = None if tries[0] == "online" else Path(run.dir).parent
    if folder is None:
        say(f"W&B: online, {run.url}")
    else:
        say(f"W&B: offline ({why}); upload it later with: wandb sync {folder}")
    return WandbRunLogger(run, project=project, run_dir=run_dir, say=say, offline_folder=folder, kept=kept)


def choose_run_id() -> str | None:
    """WANDB_RUN_ID for the first run of this process; a random one for later jobs and for trials of a study, which
    would all log into that run. None lets wandb draw one."""
    run_id = os.environ.get("WANDB_RUN_ID")
    if not run_id:
        return None
    if run_id in _USED_IDS or os.environ.get("WANDB_JOB_TYPE") == "trial":
        return uuid.uuid4().hex[:8]
    _USED_IDS.add(run_id)
    return run_id


def choose_mode(setting: str) -> tuple[str, str]:
    """(`online` | `offline` | `disabled`, reason). `auto` follows WANDB_MODE, then checks for a key and a network.
    Raises BadInputError for `online` without a key, since wandb would ask for one on the terminal."""
    environment_mode = {"dryrun": "offline"}.get(variable := os.environ.get("WANDB_MODE", ""), variable)
    if environment_mode not in ("", "online", "offline", "disabled", "run", "shared"):
        raise BadInputError(
            f"WANDB_MODE={variable} in the environment is no mode of W&B: unset it, or set online, offline or disabled"
        )
    if setting == "auto" and environment_mode in ("offline", "disabled"):
        return environment_mode, "WANDB_MODE says so"
    if setting in ("offline", "disabled"):
        return setting, "logger.wandb.mode says so"
    url = base_url()
    if not has_key(url):
        if setting == "online":
            raise BadInputError(
                "logger.wandb.mode=online needs a key: set WANDB_API_KEY or run `wandb login`, or use mode=auto, which "
                "goes offline without one"
            )
        return "offline", "no key in WANDB_API_KEY or netrc"
    if not reachable(url):
        return "offline", f"{urlsplit(url).hostname} does not answer"
    return "online", ""


def base_url() -> str:
    """The W&B server: WANDB_BASE_URL, the host of `wandb login --host`, or the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    import wandb

    return str(wandb.setup().settings.base_url)


def has_key(url: str) -> bool:
    """Whether wandb finds credentials without asking: WANDB_API_KEY, an identity token, or netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    netrc_files = [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]
    for file in netrc_files:
        try:
            entries = netrc.netrc(file.expanduser()).hosts
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
            continue
        if entries.keys() & {urlsplit(url).netloc, PUBLIC_HOST}:
            return True
    return False


def reachable(url: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether the server accepts a connection within `timeout_s`; assumed true behind a proxy. Runs in a thread, since
    a name look-up without a network has no timeout."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")):
        return True
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
            connected.set()
        except OSError:
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return connected.is_set()
