"""Single cases of single allocators: degenerate problems, refusals, baselines as published, a solver out of time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baoc.core.blocks import partition
from baoc.core.catalogue import NATIVE
from baoc.core.recipes import RECIPES, Recipe
from baoc.core.rule_tags import RULE_INFOS
from baoc.errors import BadInputError
from baoc.planning.allocators import (
    ALLOCATORS,
    NoFeasibleAllocation,
    exact,
    feasible,
    least_bytes,
    possible,
    program,
)
from baoc.planning.allocators.base import Ints, make_problem
from baoc.planning.allocators.moves import reduce_effort
from baoc.planning.allocators.recipe import RecipeAllocator, pick_spec, recipe_bytes, recipes_within
from baoc.planning.allocators.uniform import UNIFORM
from baoc.planning.candidates import build_candidates, undominated
from baoc.planning.cost import adamw_state_bytes
from baoc.planning.risk import RISKS
from baoc.types import Limits, Risk, Role
from tests.support.decision import brute_force, candidates, extremes, placed, random_candidates, transformer

BLOCKS = partition(transformer())
EVERYTHING = build_candidates(BLOCKS, specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])
PRIOR = undominated(EVERYTHING)
OPTIMISERS = ("exact", "lagrangian")

# two blocks: s0 is dear and quick, s1 cheap and slow
TRADE = candidates([(0.0, 10, 1.0), (1.0, 2, 3.0)], [(0.0, 10, 1.0), (2.0, 2, 3.0)])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_where_nothing_binds_every_block_keeps_adamw(name: str):
    for limits in (Limits(), Limits(state_bytes=adamw_state_bytes(BLOCKS))):
        allocation = ALLOCATORS[name](PRIOR, limits=limits)
        assert set(allocation.choices.values()) == {"adamw"}
        assert (allocation.risk, allocation.gap) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["exact", "lagrangian"])
def test_safe_specs_go_first(name: str):
    """Half the bytes cost storage only, a tenth no block its v."""
    adamw = adamw_state_bytes(BLOCKS)
    half = ALLOCATORS[name](PRIOR, limits=Limits(state_bytes=adamw // 2))
    assert {NATIVE[spec].rule for spec in half.choices.values()} == {"adamw"}
    tenth = ALLOCATORS[name](PRIOR, limits=Limits(state_bytes=adamw // 10))
    assert not {"sign", "lion", "signum"} & {NATIVE[spec].rule for spec in tenth.choices.values()}
    assert half.risk < tenth.risk


@pytest.mark.parametrize("name", OPTIMISERS)
def test_equal_risks_go_to_fewer_bytes(name: str):
    options = candidates([(1.0, 10, 0.0), (1.0, 4, 0.0), (1.0, 4, 0.0)])
    assert ALLOCATORS[name](options, limits=Limits()).choices == {"b0": "s1"}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_limit_between_two_sums(name: str):
    assert ALLOCATORS[name](TRADE, limits=Limits(state_bytes=12)).choices == {"b0": "s1", "b1": "s0"}
    assert ALLOCATORS[name](TRADE, limits=Limits(state_bytes=12, step_s=4.0)).risk == 1.0


@pytest.mark.parametrize("name", [*OPTIMISERS, "random"])
def test_limits_that_can_be_met_apart_but_not_together(name: str):
    """4 bytes alone and 2 s alone are possible; within 12 bytes it takes 4 s, and within 3 s 20 bytes."""
    with pytest.raises(NoFeasibleAllocation) as error:
        ALLOCATORS[name](TRADE, limits=Limits(state_bytes=12, step_s=3.0))
    assert (error.value.least_state_bytes, error.value.least_step_s) == (20, 4.0)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_limit_that_cannot_be_met_leaves_the_other_out_of_account(name: str):
    with pytest.raises(NoFeasibleAllocation, match="the least is 4 state bytes, 2 s") as error:
        ALLOCATORS[name](TRADE, limits=Limits(state_bytes=3, step_s=1.0))
    assert (error.value.least_state_bytes, error.value.least_step_s) == (4, 2.0)
    assert (error.value.least_host_bytes, error.value.least_link_s) == (0, 0.0)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_what_weights_save_is_charged_less(name: str):
    """s1 keeps 2 bytes and saves 3: both blocks take -2 together, and no less."""
    options = {
        block: [replace(c, cost=replace(c.cost, saved_bytes=3, streamed_bytes=1)) if c.spec == "s1" else c for c in row]
        for block, row in TRADE.items()
    }
    for limit, chosen in ((-2, ["s1", "s1"]), (8, ["s1", "s1"]), (9, ["s1", "s0"]), (20, ["s0", "s0"])):
        allocation = ALLOCATORS[name](options, limits=Limits(state_bytes=limit))
        assert list(allocation.choices.values()) == chosen
        assert (allocation.saved_bytes, allocation.transfer_bytes) == (3 * chosen.count("s1"), 2 * chosen.count("s1"))
    with pytest.raises(NoFeasibleAllocation) as error:
        ALLOCATORS[name](options, limits=Limits(state_bytes=-3))
    assert (error.value.least_state_bytes, error.value.least_step_s) == (-2, 2.0)


def test_equal_blocks_are_told_apart_by_their_order():
    """Of forty equal layers the earlier ones keep the dearer spec, the same ones every time."""
    layer = [(0.0, 8, 0.0), (1.0, 4, 0.0), (3.0, 1, 0.0)]
    allocation = ALLOCATORS["exact"](candidates(*[layer] * 40), limits=Limits(state_bytes=200))
    chosen = list(allocation.choices.values())
    assert chosen == sorted(chosen)
    assert (allocation.risk, allocation.gap) == (30.0, 0.0)


def test_exact_solves_several_hundred_equal_blocks_at_once():
    layer = [(0.0, 8000, 0.0), (0.7, 4001, 0.0), (1.1, 2126, 0.0), (5.0, 8, 0.0)]
    allocation = ALLOCATORS["exact"](candidates(*[layer] * 400), limits=Limits(state_bytes=400 * 3000))
    assert allocation.gap == pytest.approx(0.0, abs=1e-9)


def test_candidates_are_arrays_by_limit():
    """A limit that is not given has no row, but for bytes and seconds; a spec that a block lacks spends nothing."""
    some = make_problem(candidates([(0.0, 10, 1.0)], [(0.0, 8, 2.0), (1.0, 2, 3.0)]), limits=Limits())
    assert some.kinds == ("state_bytes", "step_s") and some.limits.tolist() == [np.inf, np.inf]
    assert some.spent.tolist() == [[[10, 0], [8, 2]], [[1, 0], [2, 3]]] and some.limits.dtype == np.float64
    assert make_problem({}, limits=Limits()).risk.shape == (0, 1)
    assert make_problem(TRADE, limits=Limits(host_bytes=7)).kinds == ("state_bytes", "step_s", "host_bytes")
    assert make_problem(TRADE, limits=Limits(state_bytes=1, host_bytes=7)).limits.dtype == np.float64
    with pytest.raises(AssertionError, match=r"without a candidate: \['b'\]"):
        make_problem({"a": TRADE["b0"], "b": ()}, limits=Limits())


@pytest.mark.parametrize("name", ["step_s", "link_s"])
def test_limits_of_seconds_are_met_within_their_rounding(name: str):
    options = candidates([(0.0, 1, 3.0)])
    linked = {b: [replace(c, cost=replace(c.cost, link_s=3.0)) for c in row] for b, row in options.items()}
    for limit, met in ((3 * (1 - 5e-10), True), (3 * (1 - 2e-9), False)):
        assert make_problem(linked, limits=Limits(**{name: limit})).feasible(np.array([0])) is met


def test_exact_prints_nothing(capfd: pytest.CaptureFixture[str]):
    """HiGHS leaves debug lines on standard output for this one."""
    options = random_candidates(3, blocks=60, specs=24, timed=False)
    least, most, *_ = extremes(options)
    print("before")
    ALLOCATORS["exact"](options, limits=Limits(state_bytes=least + (most - least) // 3))
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_exact_meets_large_limits_to_the_byte():
    """Bytes of a 10-billion-parameter model: the solver's tolerance is thousands of them."""
    rng = np.random.default_rng(0)
    rows = [
        [(0.0, int(8e9), 0.0)] + [(rng.random(), int(rng.integers(1, 8e9)), 0.0) for _ in range(4)] for _ in range(5)
    ]
    options = candidates(*rows)
    for limit in rng.integers(10e9, 35e9, size=20).tolist():
        limits = Limits(state_bytes=limit)
        best = brute_force(options, limits=limits)
        if best is not None:
            allocation = ALLOCATORS["exact"](options, limits=limits)
            assert allocation.state_bytes <= limit
            assert allocation.risk == pytest.approx(best)


def test_exact_out_of_time_falls_back_and_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    options = random_candidates(1, blocks=20, specs=8)
    least, most, *_ = extremes(options)
    limits = Limits(state_bytes=(least + most) // 2)
    lagrangian = ALLOCATORS["lagrangian"](options, limits=limits)

    def out_of_time(*_: Any, **__: Any) -> Any:
        raise program.Undecided("time limit reached")

    monkeypatch.setattr(program, "solve", out_of_time)
    allocation = ALLOCATORS["exact"](options, limits=limits)
    assert allocation.allocator == "exact"
    assert (allocation.choices, allocation.gap) == (lagrangian.choices, lagrangian.gap)


def test_exact_takes_the_better_of_an_unproven_answer_and_the_lagrangian_s(monkeypatch: pytest.MonkeyPatch):
    options = random_candidates(1, blocks=20, specs=8)
    least, most, *_ = extremes(options)
    limits = Limits(state_bytes=(least + most) // 2)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "approximate", lambda _: pytest.fail("what is proven needs no other answer"))
        proven = ALLOCATORS["exact"](options, limits=limits)

    def poor(problem: Any, **_: Any) -> tuple[Ints, float]:
        choice = problem.least(problem.spent[0])
        return choice, 0.5 * proven.risk

    monkeypatch.setattr(exact, "minimise", poor)
    allocation, lagrangian = (ALLOCATORS[name](options, limits=limits) for name in OPTIMISERS)
    assert allocation.risk < 1.1 * proven.risk
    assert (allocation.choices, allocation.gap) == (lagrangian.choices, pytest.approx(lagrangian.gap))
    assert allocation.gap is not None and (1 - allocation.gap) * allocation.risk <= proven.risk * (1 + 1e-9)


@pytest.mark.parametrize("answer", [None, "worse", program.Undecided("time limit reached")])
def test_effort_is_what_moves_leave_where_the_solver_has_nothing_better(monkeypatch: pytest.MonkeyPatch, answer: Any):
    options = placed(3)
    problem = make_problem(
        options, limits=Limits(state_bytes=sum(c[0].cost.state_bytes for c in options.values()) // 2)
    )
    free = np.where(problem.risk == 0, -problem.effort, np.inf).argmin(axis=1)  # no risk, all beside the device
    answers = iter([(free, 0.0), (free, 0.0) if answer == "worse" else answer])

    def minimise(*_: Any, **__: Any) -> Any:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(exact, "minimise", minimise)
    monkeypatch.setattr(exact, "approximate", lambda _: pytest.fail("no risk is proven by itself"))
    found, bound = exact.prove(problem)
    assert found.tolist() == reduce_effort(problem, free).tolist() != free.tolist() and bound == 0


def test_lagrangian_certifies_a_thousand_blocks_under_two_limits():
    options = random_candidates(7, blocks=1000, specs=24)
    least, most, fastest, slowest = extremes(options)
    limits = Limits(state_bytes=least + (most - least) // 4, step_s=fastest + 0.5 * (slowest - fastest))
    allocation = ALLOCATORS["lagrangian"](options, limits=limits)
    assert allocation.gap is not None and allocation.gap < 1e-3
    assert allocation.state_bytes <= limits.state_bytes


@pytest.mark.parametrize(
    ("name", "attention", "outer"),
    [
        ("uniform_adamw", "adamw", {"embedding": "adamw", "head": "adamw", "norm": "adamw"}),
        ("uniform_adamw8bit", "adamw_int8", {"embedding": "adamw_int8", "head": "adamw_int8", "norm": "adamw_int8"}),
        ("uniform_foam", "foam_l2", {"embedding": "adamw", "head": "adamw", "norm": "adamw"}),  # as published
        ("uniform_adafactor", "adafactor", {"embedding": "adafactor", "head": "adafactor", "norm": "adamw"}),
        ("uniform_sign", "sign", {"embedding": "sign", "head": "sign", "norm": "sign"}),
    ],
)
def test_uniform_baselines(name: str, attention: str, outer: dict[str, str]):
    choices = ALLOCATORS[name](EVERYTHING, limits=Limits()).choices
    assert choices["layer1.attention"] == attention
    assert {block: choices[block] for block in outer} == outer


def test_a_uniform_baseline_without_adamw_to_fall_back_on_takes_the_least_risk():
    few = build_candidates(
        BLOCKS, specs={s: NATIVE[s] for s in ("adafactor", "sign", "lion")}, rules=RULE_INFOS, risk=RISKS["prior"]
    )
    choices = ALLOCATORS["uniform_adafactor"](few, limits=Limits()).choices
    assert (choices["head"], choices["norm"]) == ("adafactor", "lion")


def test_every_uniform_baseline_runs_the_spec_it_names():
    blocks = partition(transformer(width=256))
    options = build_candidates(blocks, specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])
    for allocator in UNIFORM:
        choices = allocator(options, limits=Limits()).choices
        assert choices["layer1.attention"] == allocator.spec
        assert allocator.traits.every_candidate


def test_a_uniform_baseline_that_applies_nowhere_is_no_adamw_run():
    """4 columns cannot be folded by 8."""
    narrow = partition(transformer(width=4))
    options = build_candidates(narrow, specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])
    with pytest.raises(BadInputError) as told:
        ALLOCATORS["uniform_foam_l3"](options, limits=Limits())
    assert str(told.value) == (
        "allocator=uniform_foam_l3: foam_l3 applies to none of the 12 blocks (or is not among catalogue.specs): select "
        "it there, or choose another allocator"
    )


def test_random_differs_by_seed_and_spends_the_budget():
    limits = Limits(state_bytes=adamw_state_bytes(BLOCKS) // 4)
    runs = [ALLOCATORS["random"](EVERYTHING, limits=limits, seed=seed) for seed in range(5)]
    assert len({tuple(run.choices.values()) for run in runs}) == 5
    for run in runs:
        assert 0.9 * limits.state_bytes <= run.state_bytes <= limits.state_bytes  # pyright: ignore[reportOptionalOperand]


def test_candidates_carry_the_role_that_baselines_go_by():
    assert {c.role for c in EVERYTHING["head"]} == {Role.HEAD}


def test_a_recipe_is_what_each_role_asks_or_what_stands_in_for_it():
    recipe = Recipe(
        name="mine",
        specs={"attention": "lion_int8", "hidden": "muon", "norm": "muon", "head": "muon"},
        fallback=("foam_l1", "signum"),
    )
    wished = {
        block.name: (pick_spec(block, recipe=recipe).role, pick_spec(block, recipe=recipe).spec) for block in BLOCKS
    }
    assert wished["layer0.attention"] == ("attention", "lion_int8") and wished["layer1.mlp"] == ("hidden", "muon")
    assert wished["norm"] == ("norm", "signum") and wished["embedding"] == ("embedding", "foam_l1")
    assert wished["head"] == ("head", "foam_l1")
    texts = {block.name: pick_spec(block, recipe=recipe).text for block in BLOCKS}
    assert texts["layer1.mlp"] == "the recipe's spec for hidden"
    assert (
        texts["head"] == "falls back: the recipe asks muon of head, but muon is for hidden matrices, not for the head"
    )
    given = ALLOCATORS["recipe"]
    assert isinstance(given, RecipeAllocator) and given.traits.every_candidate
    chosen = replace(given, picks={block.name: pick_spec(block, recipe=recipe) for block in BLOCKS[1:]})
    options = build_candidates(BLOCKS, specs=NATIVE, rules=RULE_INFOS, risk=RISKS["prior"])
    allocation = chosen(options, limits=Limits())
    assert allocation.choices == {**{block: spec for block, (_, spec) in wished.items()}, "embedding": "adamw"}
    safer = {
        block: [replace(c, risk=Risk(total=-1.0)) if c.spec == "sign" else c for c in row]
        for block, row in options.items()
    }
    assert chosen(safer, limits=Limits()).choices == allocation.choices, "fp32 AdamW, not what has the least risk"
    with pytest.raises(NoFeasibleAllocation) as error:
        chosen(options, limits=Limits(state_bytes=allocation.state_bytes - 1))
    assert error.value.least_state_bytes == allocation.state_bytes
    everywhere = replace(chosen, picks={block.name: pick_spec(block, recipe=recipe) for block in BLOCKS})
    assert recipe_bytes(BLOCKS, recipe=recipe) == everywhere(options, limits=Limits()).state_bytes


def test_recipes_within_a_room_come_from_the_largest_to_the_least():
    sizes = {name: recipe_bytes(BLOCKS, recipe=recipe) for name, recipe in RECIPES.items()}
    assert sizes["adamw"] == adamw_state_bytes(BLOCKS)
    room = sizes["adamw8"]
    found = recipes_within(BLOCKS, by_part=BLOCKS, state_bytes=room)
    assert found[0][1] == room and found == sorted(found, key=lambda entry: -entry[1])
    assert dict(found) == {name: size for name, size in sizes.items() if size <= room}


# two blocks in one row each: dear and quick, cheap and slow, and what is neither
MIDDLE = candidates(*[[(0.0, 10, 1e-6), (1.0, 2, 10e-6), (3.0, 4, 4e-6)]] * 2)
BETWEEN = Limits(state_bytes=8, step_s=8e-6)  # only twice the third


@pytest.mark.parametrize(
    ("limits", "chosen"),
    [
        (Limits(), ["s1", "s1"]),
        (Limits(step_s=14e-6), ["s1", "s2"]),
        (Limits(step_s=10e-6), ["s2", "s2"]),
        (BETWEEN, ["s2", "s2"]),
        (Limits(state_bytes=3), None),
        (Limits(state_bytes=7, step_s=8e-6), None),
    ],
)
def test_the_least_bytes_within_limits_and_whether_there_are_any(limits: Limits, chosen: list[str] | None):
    found = least_bytes(MIDDLE, limits=limits)
    assert (None if found is None else sorted(c.spec for c in found)) == chosen
    assert possible(MIDDLE, limits=limits) == (chosen is not None)


def test_a_start_is_found_by_the_least_a_mixture_moves_or_the_program(monkeypatch: pytest.MonkeyPatch):
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("not asked for")

    mixed, apart = make_problem(MIDDLE, limits=BETWEEN), make_problem(TRADE, limits=Limits(state_bytes=12, step_s=4.0))
    with monkeypatch.context() as patch:
        patch.setattr(feasible, "minimise", never)
        moved = feasible.search(apart)
        assert moved is not None and apart.feasible(moved) and sorted(moved.tolist()) == [0, 1]
        patch.setattr(feasible, "repair", lambda problem, choice: choice if problem.feasible(choice) else None)
        found = feasible.search(mixed)  # of shares of the limits, which are bytes and millionths of a second
        assert found is not None and found.tolist() == [2, 2]
        patch.setattr(feasible, "repair", never)
        assert feasible.search(make_problem(MIDDLE, limits=Limits(state_bytes=3, step_s=8e-6))) is None
        cheap = feasible.search(make_problem(MIDDLE, limits=Limits(state_bytes=8)))
        assert cheap is not None and cheap.tolist() == [1, 1]
    monkeypatch.setattr(feasible, "repair", lambda *_: None)
    solved = feasible.search(apart)
    assert solved is not None and sorted(solved.tolist()) == [0, 1]


def test_limits_that_are_the_least_to_the_byte_are_met_and_counted(monkeypatch: pytest.MonkeyPatch):
    """The least bytes are those of a choice that is not the quickest, nor the safest of them."""
    options = candidates([(0.0, 2, 3.0), (1.0, 2, 1.0), (0.5, 2, 1.0)], [(0.0, 2, 3.0), (0.0, 9, 1.0)])
    with monkeypatch.context() as patch:
        patch.setattr(feasible, "repair", lambda *_: pytest.fail("what is least is there at once"))
        for limits, chosen in (
            (Limits(state_bytes=4, step_s=4.0), [2, 0]),
            (Limits(state_bytes=11, step_s=2.0), [2, 1]),
        ):
            found = feasible.search(make_problem(options, limits=limits))
            assert found is not None and found.tolist() == chosen
    hosted = {
        b: [replace(c, cost=replace(c.cost, host_bytes=host)) for c, host in zip(row, (3, 1, 2), strict=True)]
        for b, row in candidates([(0.0, 2, 1.0), (0.0, 2, 3.0), (0.0, 2, 2.0)]).items()
    }
    between = feasible.search(make_problem(hosted, limits=Limits(state_bytes=2, step_s=2.0, host_bytes=2)))
    assert between is not None and between.tolist() == [2]
    error = program.no_feasible(make_problem(options, limits=Limits(state_bytes=4, step_s=3.9)))
    assert (error.least_state_bytes, error.least_step_s) == (11, 4.0)


def test_mixtures_are_of_each_pair_of_limits():
    three = make_problem(TRADE, limits=Limits(state_bytes=12, step_s=None, host_bytes=1, link_s=1.0))
    weights = np.array(feasible.mixtures(three))
    assert weights.shape == (3 * 9, 4) and weights.sum(1) == pytest.approx(1)
    assert (weights[:, 1] == 0).all() and ((weights > 0).sum(1) == 2).all()
    assert weights[:9, 0] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert weights[:9, 2] == pytest.approx(1 - weights[:9, 0])
