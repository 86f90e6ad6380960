"""Values for tests of the decision core: a small network, and candidate sets; no torch."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from baoc.core.blocks import role_of
from baoc.types import (
    Candidate,
    Cost,
    GradientStats,
    Limits,
    ParamInfo,
    Risk,
)


def param(name: str, *shape: int, module_type: str = "Linear", depth: int | None = None) -> ParamInfo:
    role = role_of(name, shape=shape, module_type=module_type)
    return ParamInfo(name=name, shape=shape, dtype="float32", role=role, depth=depth)


def transformer(*, width: int = 64, layers: int = 3, vocabulary: int = 100) -> list[ParamInfo]:
    """Parameters of a pre-norm transformer with biases, by the names that libraries use."""
    params = [param("embed_tokens.weight", vocabulary, width, module_type="Embedding")]
    for i in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            params.append(param(f"layers.{i}.self_attn.{name}.weight", width, width, depth=i))
            params.append(param(f"layers.{i}.self_attn.{name}.bias", width, depth=i))
        params.append(param(f"layers.{i}.mlp.up_proj.weight", 4 * width, width, depth=i))
        params.append(param(f"layers.{i}.mlp.down_proj.weight", width, 4 * width, depth=i))
        params.append(param(f"layers.{i}.input_layernorm.weight", width, module_type="RMSNorm", depth=i))
    params.append(param("norm.weight", width, module_type="RMSNorm"))
    params.append(param("lm_head.weight", vocabulary, width))
    return params


def stats(**changes: float | Mapping[str, float]) -> GradientStats:
    """Statistics of a gradient without anything special, with `changes`."""
    values = {
        "num_samples": 20,
        "coherence": 0.1,
        "noise": 10.0,
        "anisotropy": 1.5,
        "snr_fan_in": 1.0,
        "snr_fan_out": 1.0,
        "factor_residual": 0.3,
        "spread": 0.8,
        "descent_share": 0.1,
        "fold_residual": {f"fan_in:{level}": 1 - 2.0**-level for level in (1, 2, 3, 8)},
    }
    return GradientStats(**{**values, **changes})  # pyright: ignore[reportArgumentType]


Row = tuple[float, int, float]  # risk, bytes, seconds
Candidates = dict[str, list[Candidate]]


def candidates(*blocks: Sequence[Row]) -> Candidates:
    """Block i is called b<i>, its candidate j is called s<j>."""
    return {
        f"b{i}": [
            Candidate(
                block=f"b{i}", spec=f"s{j}", cost=Cost(state_bytes=held, step_s=step_s), risk=Risk(total=risk, terms={})
            )
            for j, (risk, held, step_s) in enumerate(block)
        ]
        for i, block in enumerate(blocks)
    }


def random_candidates(seed: int, *, blocks: int, specs: int, timed: bool = True, ties: bool = False) -> Candidates:
    """Blocks of sizes over three decades, spec 0 the dearest and without risk; `ties` draws from few values."""
    rng = np.random.default_rng(seed)
    made: list[list[Row]] = []
    for _ in range(blocks):
        size = 4.0 if ties else 10 ** rng.uniform(1, 4)
        rows: list[Row] = [(0.0, int(8 * size), size * 1e-6 if timed else 0.0)]
        for _ in range(int(rng.integers(1, specs)) if specs > 1 else 0):
            risk = float(rng.integers(0, 4)) if ties else size * float(rng.lognormal(-3, 1))
            held = int(rng.integers(0, 5)) if ties else int(size * rng.uniform(0, 6))
            rows.append((risk, held, size * float(rng.uniform(0.3, 2)) * 1e-6 if timed else 0.0))
        made.append(rows)
    return candidates(*made)


def brute_force(candidates: Mapping[str, Sequence[Candidate]], *, limits: Limits) -> float | None:
    """Least risk of all combinations within the limits; None where there is none."""
    best: float | None = None
    for chosen in product(*candidates.values()):
        held = sum(c.cost.state_bytes for c in chosen)
        step_s = sum(c.cost.step_s for c in chosen)
        if limits.state_bytes is not None and held > limits.state_bytes:
            continue
        if limits.step_s is not None and step_s > limits.step_s * (1 + 1e-9):
            continue
        risk = sum(c.risk.total for c in chosen)
        best = risk if best is None else min(best, risk)
    return best


def extremes(candidates: Mapping[str, Sequence[Candidate]]) -> tuple[int, int, float, float]:
    """(least bytes, most bytes, least seconds, most seconds) of any allocation."""
    held = [[c.cost.state_bytes for c in options] for options in candidates.values()]
    step_s = [[c.cost.step_s for c in options] for options in candidates.values()]
    return sum(map(min, held)), sum(map(max, held)), sum(map(min, step_s)), sum(map(max, step_s))


def placed(seed: int, *, blocks: int = 5) -> Candidates:
    """Each block on the device in two storages, and the same streamed."""
    rng = np.random.default_rng(seed)
    made: Candidates = {}
    for index in range(blocks):
        size = int(10 ** rng.uniform(2, 4))
        rows = [
            (0.0, Cost(state_bytes=8 * size, step_s=3e-9 * size)),
            (1e-4 * size, Cost(state_bytes=2 * size, step_s=2e-9 * size)),
            (0.0, Cost(state_bytes=8, host_bytes=8 * size, step_s=3e-9 * size, link_s=8e-9 * size)),
            (1e-4 * size, Cost(state_bytes=8, host_bytes=2 * size, step_s=2e-9 * size, link_s=2e-9 * size)),
        ]
        name = f"b{index}"
        made[name] = [
            Candidate(block=name, spec=f"s{j}", cost=cost, risk=Risk(total=risk)) for j, (risk, cost) in enumerate(rows)
        ]
    return made


def share_of(options: Candidates, share: Sequence[float]) -> Limits:
    """Limits of bytes, host bytes and seconds of the link that are these shares of what `placed` could take."""
    total = sum(c[0].cost.state_bytes for c in options.values()) / 8
    return Limits(
        state_bytes=int(8 * total * share[0]),
        step_s=3e-9 * total,
        host_bytes=int(8 * total * share[1]),
        link_s=8e-9 * total * share[2],
    )
