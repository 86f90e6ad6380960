"""Recipes: what each role runs by name, by file and by override, on networks whose parts can be told and others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from baoc import BaocOptimizer, BaocStrategy
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra, write_config
from baoc.core.blocks import part_of, partition
from baoc.core.recipes import RECIPES, Recipe, find_recipe, recipe_from_node, recipe_node
from baoc.errors import BadInputError, InfeasibleBudgetError
from baoc.planning.allocators.recipe import pick_spec
from baoc.planning.planner import Planner, PlannerSettings
from baoc.profiling import describe
from baoc.training.run import session_settings
from baoc.types import Budget, ParamInfo, Part, Plan, Role
from tests.support.paths import read_config
from tests.support.tiny import TinyBatches, tiny_trainer

LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    given: dict[str, Any] = {"vocab_size": 128, **LLAMA, **sizes, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**given))


def plan(network: nn.Module, recipe: Recipe | str, *, state: float | None = None, **settings: str) -> Plan:
    budget = Budget(name="b", state_fraction=state)
    given = PlannerSettings(recipe=find_recipe(recipe), **settings)  # pyright: ignore[reportArgumentType]
    return Planner(describe(network), budget=budget, settings=given).propose()


def parts(network: nn.Module) -> dict[str, str]:
    return {info.name: part.value for info in describe(network) if (part := part_of(info)) is not None}


# -- parts ------------------------------------------------------------------------------------------------------------


def test_parts_of_a_llama_are_told_by_name():
    found = parts(llama())
    layer = {name.removeprefix("model.layers.0."): part for name, part in found.items() if ".layers.0." in name}
    assert layer == {
        "self_attn.q_proj.weight": "qk", "self_attn.k_proj.weight": "qk", "self_attn.v_proj.weight": "vo",
        "self_attn.o_proj.weight": "vo", "mlp.gate_proj.weight": "in", "mlp.up_proj.weight": "in",
        "mlp.down_proj.weight": "out",
    }  # fmt: skip
    assert len(found) == 14, "neither embedding, head nor norms have parts"


def test_query_key_and_value_in_one_tensor_have_no_part():
    from transformers import GPT2Config, GPT2LMHeadModel

    found = parts(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16)))
    layer = {name.removeprefix("transformer.h.0."): part for name, part in found.items()}
    assert layer == {"attn.c_proj.weight": "vo", "mlp.c_fc.weight": "in", "mlp.c_proj.weight": "out"}
    assert parts(nn.TransformerEncoderLayer(16, 2, 32)) == {
        "self_attn.out_proj.weight": "vo", "linear1.weight": "in", "linear2.weight": "out",
    }  # fmt: skip


@pytest.mark.parametrize(("shape", "part"), [((64, 16), Part.IN), ((16, 64), Part.OUT), ((16, 16), None)])
def test_an_mlp_whose_names_do_not_tell_is_told_by_its_shape(shape: tuple[int, int], part: Part | None):
    assert part_of(ParamInfo(name="ff.net.0.weight", shape=shape, dtype="float32", role=Role.MLP)) is part


def test_blocks_by_part_divide_those_of_the_model_but_not_the_users():
    infos = describe(llama())
    declared = {"mine": [info.name for info in infos if "layers.0.mlp" in info.name]}
    patterns = [("theirs", r".*layers\.1\.mlp\..*")]
    blocks = partition(infos, declared=declared, patterns=patterns, by="layer_part")
    assert {block.name: block.part for block in blocks if block.role is Role.MLP} == {
        "mine.in": Part.IN, "mine.out": Part.OUT, "theirs": None,
    }  # fmt: skip


# -- what blocks run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_built_and_stepped(name: str):
    torch.manual_seed(0)
    network = llama(num_hidden_layers=1)
    before = {n: p.detach().clone() for n, p in network.named_parameters()}
    optimizer = BaocOptimizer(network, budget="unlimited", recipe=name, lr=1e-2)
    tokens = torch.randint(128, (2, 16))
    losses = []
    for _ in range(3):
        loss = network(tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert not any(torch.equal(before[n], p.to(before[n].dtype)) for n, p in network.named_parameters())
    assert optimizer.state_bytes() == optimizer.plan.allocation.state_bytes
    by_role = {block.role: optimizer.specs[block.name] for block in optimizer.blocks}
    assert by_role[Role.EMBEDDING] == RECIPES[name].specs["embedding"]
    assert by_role[Role.HEAD] == RECIPES[name].specs["head"]


@pytest.fixture(scope="module")
def reference() -> tuple[ParamInfo, ...]:
    with torch.device("meta"):
        return describe(
            llama(
                vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
            )
        )


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_says_its_share_of_the_state(name: str, reference: tuple[ParamInfo, ...]):
    given = PlannerSettings(recipe=RECIPES[name])
    made = Planner(reference, budget=Budget(name="b"), settings=given).propose()
    assert RECIPES[name].share == pytest.approx(made.allocation.state_bytes / made.state_bytes_adamw, abs=1e-4)
    assert RECIPES[name].description and RECIPES[name].source


def test_the_most_special_role_counts():
    recipe = Recipe(
        name="r",
        specs={"hidden": "lion", "mlp": "signum", "mlp_in": "sign", "first": "adamw_int8", "attention_qk": "rmsprop"},
    )
    chosen = plan(llama(), recipe).allocation.choices
    assert chosen == {
        "embedding": "adamw", "head": "adamw", "norm": "adamw", "layer0.norm": "adamw", "layer1.norm": "adamw",
        **{f"layer0.{part}": "adamw_int8" for part in ("attention.qk", "attention.vo", "mlp.in", "mlp.out")},
        "layer1.attention.qk": "rmsprop", "layer1.attention.vo": "lion", "layer1.mlp.in": "sign",
        "layer1.mlp.out": "signum",
    }  # fmt: skip


def test_blocks_of_the_users_choice_stay_and_go_by_the_coarser_role():
    chosen = plan(llama(), "slimadam", blocks_by="layer").allocation.choices
    assert "layer0" in chosen and "layer0.attention.qk" not in chosen
    kept = plan(llama(), "slimadam", blocks_by="layer_role")
    assert "layer0.attention" in kept.allocation.choices and kept.basis is not None
    assert "; blocks here are not all divided by attention_qk, attention_vo: the others go by" in kept.basis.text
    assert "layer0.attention.qk" in plan(llama(), "slimadam").allocation.choices
    assert "layer0.attention" in plan(llama(), "muon8").allocation.choices, "which tells no parts"


def test_the_plan_says_which_blocks_fall_back_and_why():
    recipe = Recipe(name="r", specs={"hidden": "muon_int8", "norm": "muon_int8"}, fallback=("foam_l2", "lion_int8"))
    made = plan(llama(), recipe)
    texts = {reason.block: (reason.spec, reason.text) for reason in made.reasons}
    assert texts["layer0.mlp"] == ("muon_int8", "the recipe's spec for hidden")
    spec, text = texts["layer0.norm"]
    assert spec == "lion_int8", "FOAM does not fold vectors either"
    assert "falls back: the recipe asks muon_int8 of norm, but muon needs matrices" in text


def test_weights_are_those_of_the_recipe_but_for_norms():
    made = plan(llama(), replace(RECIPES["muon8_lean"], weights="split8"))
    assert set(made.allocation.choices.values()) == {"muon_int8+split8", "adamw_int8+split8", "adamw"}
    assert made.allocation.choices["norm"] == "adamw"


def test_a_budget_below_the_recipe_is_refused_with_its_bytes_and_what_fits():
    held = plan(llama(), "muon8_lean")
    share = held.allocation.state_bytes / held.state_bytes_adamw
    assert plan(llama(), "muon8_lean", state=share + 1e-6).allocation == held.allocation
    with pytest.raises(InfeasibleBudgetError, match=r"recipe=muon8_lean, which keeps .*recipes that fit: ") as error:
        plan(llama(), "muon8_lean", state=share - 1e-3)
    assert error.value.least_feasible_bytes == held.allocation.state_bytes


# -- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: find_recipe("muon8_leen"), r"no such recipe; did you mean muon8_lean"),
        (lambda: find_recipe("MUON8_LEAN"), r"no such recipe; did you mean muon8_lean"),
        (lambda: find_recipe("nowhere.yaml"), r"recipe=nowhere.yaml: there is no such file; give the path of one with"),
        (lambda: find_recipe({}), r"recipe={} must hold roles and specs, such as `hidden: muon_int8`"),
        (lambda: find_recipe({"hidden": None}), r"recipe={'hidden': None} must hold roles and specs"),
        (lambda: find_recipe({"base": "raced"}), r'recipe="raced" is of run.py, .* give the file of the race'),
        (lambda: find_recipe("a\0.yaml"), r"recipe=a\x00.yaml cannot be read: embedded null"),
        (lambda: find_recipe("~no-such-user/a.yaml"), r"recipe=~no-such-user/a.yaml: there is no such file"),
        (lambda: Recipe(name="none"), r"a recipe is called 'none': give it a name of one line, other than none"),
        (lambda: find_recipe({"hidden": {"muon": 1}}), r"recipe.hidden={'muon': 1}: there is no such optimizer spec"),
        (lambda: find_recipe({"hidden": "muon", "name": [1]}), r"recipe.name=\[1\] is not allowed: it must be text"),
        (lambda: Recipe(name="r", specs={"mpl": "sign"}), r"unknown key recipe.mpl .*did you mean recipe.mlp\?"),
        (lambda: Recipe(name="r", specs={"mlp": "foam_l9"}), r"recipe.mlp=foam_l9: there is no such .*did you mean"),
        (lambda: Recipe(name="r", specs={"mlp": "adamw@updated"}), r"recipe.mlp: adamw@updated was removed"),
        (lambda: Recipe(name="r", lr={"muom": 2.0}), r"unknown key recipe.lr.muom; did you mean recipe.lr.muon"),
        (lambda: Recipe(name="r", lr={"muon": -2.0}), r"recipe.lr.muon=-2.0 is not allowed"),
        (lambda: Recipe(name="r", lr={"muon": 1e6}), r"recipe.lr.muon=1000000.0 is .*above 0 and below a million"),
        (lambda: Recipe(name="r", betas={"head": (0.9, 0.9)}), r"unknown key recipe.betas.head"),
        (lambda: Recipe(name="r", betas={"muon": (0.9, 1.0)}), r"recipe.betas.muon=.* two numbers in \[0, 1\)"),
        (lambda: Recipe(name="r", betas={"muon": (False, 0.9)}), r"recipe.betas.muon=.* two numbers in \[0, 1\)"),
        (lambda: Recipe(name="r", weights="split4"), r"recipe.weights=split4 is not allowed: choose one of native"),
        (lambda: PlannerSettings(allocator="recipe"), r"allocator=recipe needs a recipe: name one"),
        (
            lambda: PlannerSettings(allocator="lagrangian", recipe=RECIPES["muon"]),
            r"recipe=muon and allocator=lagrangian exclude each other",
        ),
        (lambda: compose(["recipe=muon", "allocator=exact"]), r"recipe=muon and allocator=exact exclude each other"),
        (lambda: compose(["recipe.mlp=sign"]), r"recipe.mlp changes a recipe, and none is named"),
        (lambda: from_hydra(compose(["recipe=muon", "recipe.mpl=sign"])), r"unknown key recipe.mpl"),
        (lambda: from_hydra(compose(["recipe=muon", "recipe.name=none"])), r"a recipe is called 'none'"),
        (lambda: compose(["recipe=~/nowhere ä.yaml"]), r"recipe=~/nowhere ä.yaml: there is no such file"),
        (lambda: from_hydra(compose(["recipe=muon", "recipe.lr={mun: 2}"])), r"did you mean recipe.lr.muon\?"),
        (lambda: from_hydra(compose(["recipe=muon", "recipe.mlp={a: sign}"])), r"recipe.mlp={'a': 'sign'}: there is"),
        (
            lambda: compose(["recipe=raced", "recipe.mlp=sign"]),
            r"recipe.mlp changes a recipe, and recipe=raced is what",
        ),
        (lambda: compose(["recipe=muon", "recipe.base=adamw"]), r"recipe.base is a key of files; here recipe=NAME"),
    ],
)
def test_what_is_typed_wrong_says_what_to_do(make: object, text: str):
    with pytest.raises(BadInputError, match=text):
        make()  # pyright: ignore[reportCallIssue]


# -- doors ------------------------------------------------------------------------------------------------------------


def test_overrides_change_a_recipe_and_the_configuration_keeps_all_of_it(tmp_path: Path):
    words = ["recipe=muon8_lean", "recipe.mlp=foam_l2_int8", "recipe.lr.muon=2", "recipe.betas.foam=[.9,.95]"]
    run = from_hydra(compose(words))
    assert run.allocator.name == "recipe" and run.recipe is not None
    assert run.recipe.title == "muon8_lean (changed)"
    assert run.recipe.specs == {**RECIPES["muon8_lean"].specs, "mlp": "foam_l2_int8"}
    assert run.recipe.lr == {"muon": 2}
    assert run.recipe.betas == {"muon": (0.95, 0.95), "foam": (0.9, 0.95)}
    write_config(run, path=tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == run
    settings = session_settings(run).planner
    assert settings.recipe == run.recipe and settings.keep_fp32_roles == ()


@pytest.mark.parametrize(
    "words",
    [
        ["recipe.lr={muon: 2, norm: 0.5}", "recipe.blocks={layers.0.mlp: sign}"],
        ["recipe.lr.muon=2", "recipe.lr.norm=0.5", "recipe.blocks.layers.0.mlp=sign"],
    ],
)
def test_keys_of_a_group_come_one_by_one_or_together(words: list[str]):
    run = from_hydra(compose(["recipe=muon8_lean", *words]))
    assert run.recipe is not None
    assert run.recipe.lr == {"muon": 2, "norm": 0.5} and run.recipe.blocks == {"layers.0.mlp": "sign"}


def test_a_recipe_comes_from_a_file(tmp_path: Path):
    file = tmp_path / "für uns (1)" / "mine.yaml"  # which Hydra's grammar cannot read
    file.parent.mkdir()
    file.write_text(
        "base: muon8_lean\nhead: adamw\nlr: {<<: {embedding: 3}, embedding: 5e-1}\ndescription: 1e-3 was the best rate"
    )
    found = find_recipe(str(file))
    assert (found.name, found.description) == ("mine", "1e-3 was the best rate")
    assert found.specs == {**RECIPES["muon8_lean"].specs, "head": "adamw"} and found.lr == {"embedding": 0.5}
    words = [f"recipe={file}", "recipe.lr.muon=3"]
    run = from_hydra(compose(words))
    assert run.recipe is not None and run.recipe.lr == {"embedding": 0.5, "muon": 3}


def test_a_file_whose_base_leads_back_to_it_is_told(tmp_path: Path):
    (file := tmp_path / "mine.yaml").write_text(f"base: {tmp_path}/other.yaml")
    (tmp_path / "other.yaml").write_text(f"base: {file}")
    with pytest.raises(BadInputError, match=r".yaml leads back to itself by its base: name another base"):
        find_recipe(str(file))


@pytest.mark.parametrize("text", ["mlp: sign\nmlp: adamw", "{mlp: sign, mlp: sign}", "lr: {mlp: 2, 'mlp': 3}"])
def test_a_key_that_is_written_twice_is_told(text: str, tmp_path: Path):
    (file := tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInputError, match=r"mine.yaml cannot be read: mlp is written twice: leave one\n +in .* line"):
        find_recipe(str(file))


@pytest.mark.parametrize("name", RECIPES)
def test_plain_values_give_the_recipe_back(name: str):
    assert recipe_from_node(recipe_node(RECIPES[name])) == replace(RECIPES[name], share=None)


class _Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_a_strategy_takes_a_recipe():
    strategy = BaocStrategy("unlimited", recipe="muon8_lean", device="cpu")
    tiny_trainer(strategy=strategy, max_steps=2).fit(_Module(), train_dataloaders=TinyBatches())
    assert strategy.reallocator is not None
    optimizer = strategy.reallocator.optimizer
    specs = {block.role: optimizer.specs[block.name] for block in optimizer.blocks}
    assert (specs[Role.OTHER], specs[Role.HEAD], specs[Role.NORM]) == ("muon_int8", "adamw_int8", "adamw")
    assert (0.95, 0.95) in [options.betas for options in optimizer.options()], "of Muon"


def test_a_pick_is_told_by_role():
    block = partition(describe(llama()), by="layer_part")[1]
    assert pick_spec(block, recipe=RECIPES["slimadam"]).role == "attention_qk"


def test_the_page_has_a_row_for_each_recipe():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    rows = [f"| `{r.name}` | {r.share:.1%} | {r.description} | {r.source} |" for r in RECIPES.values()]
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows
