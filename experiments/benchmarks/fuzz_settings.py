"""Random settings, again and again: each command line ends in a run, or in one sentence and an exit code, never in a
traceback.

    python experiments/benchmarks/fuzz_settings.py --tries 2000  # 12 minutes of a CPU core -> fuzz_settings.csv
    python experiments/benchmarks/fuzz_settings.py --tries 500 --trained  # seconds a try -> fuzz_trained.csv

A try changes one to three settings of a run or of a study to a value of a wrong type, null, a list, a group, a huge
number, an unknown or misspelled key, or an interpolation, by every operator of the command line. A run goes through the
command itself with mode=plan; a study is read, and the first of its points composed. With `--trained` a try is a run of
two steps, of which four to eight settings get values that are allowed one by one, and at most one gets a wrong one:
most tries get past the first check. The table gets a line per try as soon as it is over, with the number of steps
trained; the exit code is the number of tracebacks and of tries that took over a minute.
"""

import argparse
import io
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a data set that is drawn is not downloaded
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hydra import compose as compose_hydra
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from baoc.cli.failures import failure_of, report
from baoc.cli.main import main
from baoc.config import assets
from baoc.config.compose import VERSION_BASE, compose
from baoc.config.from_hydra import from_hydra, to_conf
from baoc.config.nodes import register
from baoc.config.options import GROUPS
from baoc.sweep.space_check import check_space
from baoc.sweep.study import add_overrides
from baoc.sweep.study_config import Domain, EarlyStop, StudyConfig, read_study
from experiments.benchmarks.shared import append_row, results_folder

WORDS = ("a", "no", "off", "''", "''''", "'a,b'", "'1'", "../x", "x=y", "ä", "\\", "*", "8gb", "auto", "state_10")
NUMBERS = ("0", "-1", "1", "2", "3", "7", "64", "0.1", "1.0", "1e-3", "10000", "0.5", "-0.0")
EDGES = ("1e309", "-1e309", "nan", "inf", "1e-320", "4294967296", "9" * 19)
HUGE = ("1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000)
LISTS = ("[]", "[[]]", "[1,2]", "[null]", "[a]", "[[a,b]]", "[true]", "[[1,2],[3,4]]", "[0.9,2]")
GROUPED = ("{}", "{a: 1}", "{name: x}", "{1: 2}", "{a: {b: c}}", "{null: 1}", "[{step: 1}]", "{choices: []}")
ODD = ("null", "true", "false", "???", "${budget}", "${nope}", "${oc.env:NOPE}", '${oc.decode:"1"}', "1,2", "range(3)")
POOLS = (WORDS, NUMBERS, NUMBERS, NUMBERS, EDGES, HUGE, LISTS, GROUPED, ODD)
OPERATORS = (*[""] * 9, "+", "++", "~")
MODELS = ("vit", "vit", "llama", "dit", "unet")
LIMIT_S, SLOW = 60, -2  # what a try may take, and its code where it took longer
MEMORY_BYTES = 24 * 2**30  # of address space: what a try may ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    number: int
    words: str
    exit_code: int
    seconds: float
    steps: int  # that were logged
    said: str  # the first line
    traceback: str  # the last one


def keys_of(node: Mapping[str, Any], *, path: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, groups too."""
    for name, value in node.items():
        yield f"{path}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, path=f"{path}{name}.")


@cache
def run_keys(model: str) -> list[str]:
    """Those of every run, and the options of a model, its task and its data."""
    plain = to_conf(from_hydra(compose([f"model={model}"])))
    groups = ["risk.weights.drop_m", "experiments", "debug", "recipe.mlp", *(f"{group}.name" for group in GROUPS)]
    return [key for key in keys_of(plain) if key not in ("device", "mode")] + groups


def study_keys() -> list[str]:
    own = [item.name for item in fields(StudyConfig)]
    own += [f"early_stop.{item.name}" for item in fields(EarlyStop)]
    own += [f"objectives.{name}" for name in ("quality", "state_bytes", "speed")]
    own += [f"space.{key}.{item.name}" for key in ("optim.lr", "budget", "risk") for item in fields(Domain)]
    return [f"hydra.sweeper.{key}" for key in own]


def misspelled(key: str, *, source: random.Random) -> str:
    """The key with one letter left out, doubled or replaced."""
    at = source.randrange(len(key))
    return key[:at] + source.choice(("", key[at] * 2, "q")) + key[at + 1 :]


def override(key: str, *, source: random.Random) -> str:
    if source.random() < 0.1:
        key = misspelled(key, source=source)
    operator, value = source.choice(OPERATORS), source.choice(source.choice(POOLS))
    if operator == "~" and source.random() < 0.7:
        return f"~{key}"
    return f"{operator}{key}={value}"


TINY = (
    "device=cpu", "batch_size=4", "trainer.max_steps=2", "trainer.limit_val_batches=1", "checkpoint.export=false",
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
)  # fmt: skip
# What the values of some keys may be, where the default does not tell; a try without a GPU asks for none.
ALLOWED = {
    "objective": ("quality", "throughput", "peak"),
    "batch_size": ("1", "2", "4", "6"),
    "micro_batch": ("1", "2", "auto", "null"),
    "budget": ("8gb", "state_25", "state_50", "state_10", "auto", "unlimited", "64mb", "21mb", "{state_fraction: 0.3}"),
    "budget.schedule": ("[{step: 1, budget: state_50}]", "[]"),
    "blocks.by": ("auto", "layer_role", "layer_part", "layer", "role", "tensor", "model"),
    "catalogue.specs": ("['*']", "[adamw,adamw_int8,sign]", "['*_int8']", "['*int4','lion*']", "['*@*']"),
    "catalogue.keep_fp32_roles": ("[]", "[head]", "[embedding,norm]"),
    "recipe": ("none", "none", "muon8_lean", "adamw8"),
    "risk": ("measured", "prior", "statistics"),
    "allocator": ("exact", "lagrangian", "random", "uniform_adamw8bit", "uniform_foam8bit"),
    "reallocation.mode": ("off", "once"),
    "reallocation.warmup_steps": ("1", "2", "40"),
    "model.activations": ("null", "bf16"),
    "model.checkpointing": ("true", "false", "1", "auto", "null"),
    "model.freeze": ("[]", "['*bias']", "['*norm*']"),
    "trainer.precision": ("auto", "32-true", "bf16-mixed", "bf16-true"),
    "trainer.max_steps": ("1", "2", "3"),
    "trainer.limit_train_batches": ("1", "2", "0.5", "null"),
    "trainer.overfit_batches": ("0", "1", "2"),
    "trainer.val_check_interval": ("1", "2"),
    "trainer.num_sanity_val_steps": ("0", "1"),
    "trainer.gradient_clip_val": ("null", "0.5", "1"),
    "trainer.gradient_clip_algorithm": ("norm", "value"),
    "trainer.deterministic": ("true", "false", "warn"),
    "trainer.profiler": ("null", "simple"),
    "trainer.reload_dataloaders_every_n_epochs": ("0", "1"),
    "optim.lr": ("0.001", "0.1", "1e-5", "null"),
    "optim.betas": ("[0.9,0.999]", "[0,0]", "[0.5,0.9]"),
    "optim.schedule": ("cosine", "constant"),
    "optim.backend": ("auto", "eager", "native"),
    "optim.matching": ("displacement", "rms"),
    "optim.nonfinite": ("skip_element", "skip_step", "raise"),
    "optim.release_gradients": ("true", "false", "null"),
    "logger.names": ("[jsonl]", "[csv,jsonl]"),
    "checkpoint.every_n_steps": ("1", "2", "null"),
    "checkpoint.keep": ("1", "2", "3"),
    "task.ema_decay": ("0.9", "0"),
    "task.num_samples": ("2", "0"),
    "seed": ("0", "1", "4294967295"),
}


def trained_words(number: int, *, seed: int) -> list[str]:
    """A run of a try with `--trained`; the same for the same seed."""
    source = random.Random(f"trained {seed} {number}")
    model = source.choice(("vit", "vit", "vit", "vit", "llama", "llama", "dit", "unet"))
    chosen = source.sample(list(ALLOWED), source.randrange(4, 9))
    own = set(run_keys(model))
    words = [f"{key}={source.choice(ALLOWED[key])}" for key in chosen if key in own or "." not in key]
    if model in ("dit", "unet") and "task.num_samples" not in chosen:
        words.append("task.num_samples=2")
    wrong = [override(source.choice(run_keys(model)), source=source)] if source.random() < 0.5 else []
    return [f"model={model}", *TINY, *words, *wrong]


def words_of(number: int, *, seed: int) -> list[str]:
    """The command line of a try; the same for the same seed."""
    source = random.Random(f"{seed} {number}")
    if source.random() < 0.3:
        found = [override(source.choice(study_keys()), source=source) for _ in range(source.choice((1, 1, 2)))]
        found = [word if word[0] in "~+" or ".space." not in word else f"++{word}" for word in found]
        return ["-m", f"sweeps={source.choice(list(assets.option_files('sweeps')))}", *found]
    model = source.choice(MODELS)
    keys = run_keys(model)
    return [f"model={model}", *(override(source.choice(keys), source=source) for _ in range(source.choice((1, 1, 2))))]


def study_of(words: list[str]) -> None:
    """Reads the study of a command line and composes its points, as the sweeper does before it trains."""
    register(words)
    with initialize_config_dir(config_dir=str(assets.conf()), version_base=VERSION_BASE, job_name="baoc"):
        config = compose_hydra(config_name="config", overrides=words, return_hydra_config=True)
    study = read_study(OmegaConf.to_container(config.hydra.sweeper, resolve=True))  # pyright: ignore
    study = add_overrides(study, [word for word in words if not word.lstrip("+~").startswith("hydra.")])
    calls: list[int] = []

    def composed(overrides: list[str]) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise StopIteration
        return compose(overrides)

    with suppress(StopIteration):
        check_space(study, compose=composed)


def ends(words: list[str], *, folder: Path) -> int:
    """The exit code of a command line."""
    if words[0] != "-m":
        plan = () if TINY[0] in words else ("mode=plan",)
        return main([*words, *plan, f"hydra.run.dir={folder}"])
    try:
        study_of(words[1:])
    except (Exception, SystemExit) as error:
        failure = failure_of(error)
        report(failure)
        return failure.exit_code
    return 0


def too_long(*_: object) -> None:
    raise TimeoutError(f"a try took longer than {LIMIT_S} s")


def tried(number: int, *, seed: int, trained: bool = False) -> Try:
    words = trained_words(number, seed=seed) if trained else words_of(number, seed=seed)
    said, start, steps = io.StringIO(), time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(said):
        signal.alarm(LIMIT_S)
        try:
            code = ends(words, folder=Path(folder) / "run")
        except TimeoutError:
            code = SLOW
        except BaseException as error:  # which the command itself would let through
            code = -1
            said.write(f"Traceback\n{type(error).__name__}: {error}\n")
        finally:
            signal.alarm(0)
        with suppress(OSError):
            steps = (Path(folder) / "run" / "metrics.jsonl").read_text().count('"train/loss"')
    if f"longer than {LIMIT_S} s" in said.getvalue():  # the command took the alarm for a fault of its own
        code = SLOW
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    faulty = code in (-1, 1) or (code != SLOW and any(line.startswith("Traceback") for line in lines))
    told = next((line for line in lines if line.startswith("baoc:")), lines[0] if lines else "")
    return Try(
        number=number,
        words=" ".join(word if len(word) < 80 else f"{word[:80]}..." for word in words),
        exit_code=code,
        seconds=round(time.perf_counter() - start, 3),
        steps=steps,
        said=told[:200],
        traceback=next((line for line in reversed(lines) if "Error" in line), lines[-1])[:200] if faulty else "",
    )


def apart(number: int, *, seed: int) -> Try:
    """The same with `trained`, in a process of its own: runs leave threads, hooks and settings behind."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send(tried(number, seed=seed, trained=True))
    )
    process.start()
    theirs.close()
    found = None
    with suppress(EOFError):
        found = ours.recv() if ours.poll(2 * LIMIT_S) else None
    process.join(LIMIT_S)
    process.kill()  # where it hangs, or its threads do
    process.join()
    words, code = " ".join(trained_words(number, seed=seed)), process.exitcode or 0
    return found or Try(
        number=number, words=words, exit_code=code, seconds=0.0, steps=0, said="", traceback=f"it died by {code}"
    )


def run_tries() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tries", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first try, to go on with a campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", action="store_true", help="runs of two steps, mostly of right values")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, too_long)
    path = results_folder() / ("fuzz_trained.csv" if given.trained else "fuzz_settings.csv")
    if not given.first:
        path.unlink(missing_ok=True)
    if given.trained:
        import baoc.training.run  # noqa: F401  # once, for all that are forked from here
    faults, trained, codes = 0, 0, {}
    for number in range(given.first, given.first + given.tries):
        found = apart(number, seed=given.seed) if given.trained else tried(number, seed=given.seed)
        append_row(path, found)
        codes[found.exit_code] = codes.get(found.exit_code, 0) + 1
        trained += found.steps > 0
        if found.traceback or found.exit_code == SLOW:
            faults += 1
            print(f"{number}: {found.words}\n    {found.traceback or 'too long'}", flush=True)
    shown = ", ".join(f"exit {code}: {count}" for code, count in sorted(codes.items()))
    print(f"{given.tries} tries, {trained} trained, {faults} faults; {shown}")
    return min(faults, 100)


if __name__ == "__main__":
    sys.exit(run_tries())
