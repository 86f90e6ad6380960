"""Values of `baoc.types` for tests: a plan with mixed specs, a result, a point of a frontier."""

from baoc.types import (
    Allocation,
    Block,
    Budget,
    Candidate,
    Cost,
    FrontierPoint,
    Limits,
    ParamInfo,
    Plan,
    Quality,
    Reason,
    Risk,
    Role,
    RunResult,
)
from baoc.units import GIB, MIB


def block(name: str, *, depth: int | None = None, role: Role = Role.MLP) -> Block:
    param = ParamInfo(name=f"{name}.weight", shape=(8, 4), dtype="float32", role=role, depth=depth)
    return Block(name=name, params=(param,), role=role, depth=depth)


def candidate(name: str, spec: str, state_bytes: int, risk: float) -> Candidate:
    terms = {"drop_m": risk} if risk else {}
    return Candidate(block=name, spec=spec, cost=Cost(state_bytes=state_bytes), risk=Risk(total=risk, terms=terms))


def make_plan(
    *, layers: int = 2, cheap_from: int = 1, budget: Budget | None = None, binding: bool = True, gap: float | None = 0.0
) -> Plan:
    """`layers` attention and mlp blocks and a head; mlp blocks of layer `cheap_from` and above run `sign`."""
    blocks = [block(f"layers.{i}.{part}", depth=i) for i in range(layers) for part in ("attention", "mlp")]
    blocks.append(block("head", role=Role.HEAD))
    choices, candidates, reasons = {}, {}, []
    for b in blocks:
        options = (candidate(b.name, "sign", 8, 0.5), candidate(b.name, "adamw", 260, 0.0))
        cheap = b.name.endswith("mlp") and (b.depth or 0) >= cheap_from
        choices[b.name] = "sign" if cheap else "adamw"
        candidates[b.name] = options
        up, down = ("adamw", None) if cheap else (None, "sign")
        reasons.append(Reason(block=b.name, spec=choices[b.name], cheaper=down, dearer=up, text="because"))
    num_cheap = sum(spec == "sign" for spec in choices.values())
    state = 8 * num_cheap + 260 * (len(blocks) - num_cheap)
    return Plan(
        blocks=tuple(blocks),
        candidates=candidates,
        allocation=Allocation(choices=choices, state_bytes=state, risk=0.5 * num_cheap, allocator="exact", gap=gap),
        budget=budget or Budget(name="state_50", state_fraction=0.5),
        limits=Limits(),
        risk_model="prior",
        binding=binding,
        peak_bytes=5 * MIB,
        state_bytes_adamw=260 * len(blocks),
        least_feasible_bytes=8 * len(blocks),
        most_useful_bytes=260 * len(blocks),
        reasons=tuple(reasons),
    )


def make_result(**changes: object) -> RunResult:
    values: dict[str, object] = {
        "schema": 1,
        "task": "vision",
        "model": "vit",
        "name": "vit_8gb",
        "allocator": "exact",
        "risk": "prior",
        "num_params": 200_000,
        "budget": {"kind": "memory", "name": "8gb", "limit": 8 * GIB},
        "budget_bytes": 8 * GIB,
        "budget_met": True,
        "binding": False,
        "least_feasible_bytes": MIB,
        "peak_bytes": 5 * MIB,
        "peak_bytes_predicted": 6 * MIB,
        "state_bytes": MIB,
        "state_bytes_predicted": MIB,
        "state_bytes_adamw": 4 * MIB,
        "step_ms": 12.5,
        "samples_per_s": 5120.0,
        "quality": Quality(name="val/loss", value=0.1824, higher_is_better=False),
        "metrics": {"val/loss": 0.1824, "val/acc": 0.953},
        "risk_total": 0.0,
        "allocation_gap": 0.0,
        "num_reallocations": 1,
        "num_steps": 400,
        "seed": 0,
        "commit": "abc",
        "versions": {},
        "command": "python run.py",
    }
    return RunResult(**(values | changes))  # pyright: ignore[reportArgumentType]


def point(label: str, **changes: object) -> FrontierPoint:
    values: dict[str, object] = {
        "run": label,
        "task": "vision",
        "model": "vit",
        "label": label,
        "quality": 0.18,
        "peak_bytes": 5 * MIB,
        "state_bytes": MIB,
        "samples_per_s": 5000.0,
    }
    return FrontierPoint(**(values | changes))  # pyright: ignore[reportArgumentType]
