"""A language model's parameters, and planners of a large one within a device's memory."""

from dataclasses import replace

from baoc.planning.planner import Planner, PlannerSettings
from baoc.types import Budget, Footprint, ParamInfo, Role
from tests.support.planners import NO_TEMPORARIES

WIDTH, LAYERS, VOCABULARY = 64, 3, 256


def llama() -> list[ParamInfo]:
    def matrix(name: str, rows: int, cols: int, role: Role, depth: int | None = None) -> ParamInfo:
        return ParamInfo(name=name, shape=(rows, cols), dtype="float32", role=role, depth=depth)

    params = [matrix("embed_tokens.weight", VOCABULARY, WIDTH, Role.EMBEDDING)]
    for i in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            params.append(matrix(f"layers.{i}.self_attn.{name}.weight", WIDTH, WIDTH, Role.ATTENTION, i))
        params.append(matrix(f"layers.{i}.mlp.up_proj.weight", 4 * WIDTH, WIDTH, Role.MLP, i))
        params.append(matrix(f"layers.{i}.mlp.down_proj.weight", WIDTH, 4 * WIDTH, Role.MLP, i))
        params.append(
            ParamInfo(name=f"layers.{i}.norm.weight", shape=(WIDTH,), dtype="float32", role=Role.NORM, depth=i)
        )
    return [*params, matrix("lm_head.weight", VOCABULARY, WIDTH, Role.HEAD)]


LARGE = [replace(param, shape=tuple(64 * side for side in param.shape)) for param in llama()]
WEIGHTS_BYTES = 4 * sum(param.numel for param in LARGE)
FOOTPRINT = Footprint(
    device="cuda:0",
    micro_batch=1,
    weights_bytes=WEIGHTS_BYTES,
    gradients_bytes=WEIGHTS_BYTES,
    forward_backward_bytes=WEIGHTS_BYTES,
    validation_bytes=0,
    resident_bytes=2 * WEIGHTS_BYTES,
    step_temporary_bytes=NO_TEMPORARIES,
)


def within(num_bytes: int, *, host_bytes: int | None = None, **settings: object) -> Planner:
    """A planner of the large one that is offered weights with corrections."""
    budget = Budget(name="some", memory_bytes=num_bytes, host_memory_bytes=host_bytes)
    given = {"risk": "measured", "family": None, "specs": ("*", "*+split8")} | settings
    return Planner(LARGE, budget=budget, settings=PlannerSettings(**given), footprint=FOOTPRINT)  # pyright: ignore
