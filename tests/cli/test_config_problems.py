"""What a wrong command line is told: each of Hydra's refusals in our words, and each name that no registry holds."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hypothesis import given, settings
from hypothesis import strategies as st

from baoc.cli.failures import failure_of
from baoc.config.compose import compose
from baoc.config.from_hydra import from_hydra
from baoc.config.nodes import check_choices, with_option_names

PROBLEMS = [
    (["model=vitt"], "model=vitt: there is no such model; did you mean vit?\nallowed: dit, hf, llama, "),
    (
        ["allocator=exakt"],
        "allocator=exakt: there is no such allocator; did you mean exact?\nallowed: exact, lagrangian",
    ),
    (["experiments=digits_state_26"], "there is no such experiment; did you mean digits_state_25"),
    (["sweeps=frontier_visio"], "there is no such sweep; did you mean frontier_vision"),
    (["modell=vit"], "unknown key modell; did you mean model or mode?\na run has: name, seed, mode"),
    (["seeed=1"], "unknown key seeed; did you mean seed?"),
    (["trainer.max_stps=3"], "unknown key trainer.max_stps; did you mean trainer.max_steps"),
    (["model.size.x=1"], "unknown key model.size.x: model.size is a value, not a group of keys"),
    (["hydra.foo=1"], "Could not override 'hydra.foo'"),
    (["hydra.run.dir=null"], "hydra.run.dir=null is not allowed: field 'hydra.run.dir' is not Optional"),
    (
        ["hydra.sweeper.ntrials=4"],
        "unknown key hydra.sweeper.ntrials; did you mean hydra.sweeper.n_trials?\nhydra.sw",
    ),
    (["hydra.sweeper.n_trials=4"], "hydra.sweeper.n_trials is a setting of a study: start one with -m sweeps=NAME"),
    (["hydra.sweeper.space.x.low=4"], "space.x.low has no such key: ++hydra.sweeper.space.x.low=VALUE adds"),
    (["+trainer.foo=1"], "unknown key trainer.foo"),
    (["+trainer.accelerator=gpu"], "trainer.accelerator is decided by BAOC: set device=auto|cpu|cuda"),
    (["+optim.momentum=.9"], "unknown key optim.momentum\noptim has: lr, betas"),
    (["+risk.weights.drop_q=2"], "unknown key risk.weights.drop_q; did you mean risk.weights.drop_"),
    (["task.num_samples=3"], "task.num_samples is an option of task=diffusion (model=dit|unet) only: choose one"),
    (["dataset.tokenizer=x"], "dataset.tokenizer is an option of dataset=chat|pysource|text|c4|fineweb_edu only"),
    (["model.dropot=1"], "unknown key model.dropot; did you mean model.dropout?"),
    (["model.lora.rnk=1"], "unknown key model.lora.rnk; did you mean model.lora.rank?"),
    (["model.compile.x=1"], "unknown key model.compile.x: model.compile is a value, not a group of keys"),
    (["+seed=1"], "seed is there already: write seed=VALUE, without a +"),
    (
        ["recipe=muon", "recipe.betas=[.9,.95]"],
        "recipe.betas is a group of keys, not a list: set one, as in recipe.betas.KEY=VALUE",
    ),
    (["risk.weights=[1]"], "risk.weights is a group of keys, not a list: set one, as in risk.weights.KEY=VALUE"),
    (["budget.schedule={step: 1}"], "budget.schedule is a list, not a group of keys: give all of it, as in budget.sch"),
    *(
        ([word], "unknown key optim.betas.x: optim.betas is a value, not a group of keys")
        for word in ("optim.betas.x=1", "+optim.betas.x=1", "++optim.betas.x=1", "~optim.betas.x")
    ),
    (["budget.schedule.0.step=1"], "unknown key budget.schedule.0.step: budget.schedule is a value, not a group"),
    (["budget={memory: 20mb, step_time: 2}"], "set its limits one by one, as in budget=20mb budget.step_time=1.2"),
    (["~foo"], "~foo removes what is not there"),
    (["allocator=greedy"], "allocator=greedy was removed: it reported no gap and never chose better"),
    (["blocks.merge=1.0"], "blocks.merge was removed: no measured run tied blocks by their statistics: choose"),
    (["reallocation.interval=50"], "reallocation.interval was removed: no decision after the first was shown"),
    (["reallocation.mode=interval"], "reallocation=interval was removed: no decision after the first was shown"),
    (["risk=shadow"], "risk=shadow was removed: it measured likeness to fp32 AdamW"),
    (["~optim.eps"], "optim.eps is missing: it was removed from the configuration"),
    (["~model.dropout"], "model.dropout is missing: it was removed from the configuration"),
    (["~risk"], "risk is missing: it was removed"),
    (["~model"], "a value refers to what is not there: Interpolation key 'model.name' not found"),
    (["allocator=[[]]"], "allocator cannot be [[]]: choose one of its options, such as allocator=exact"),
    (["blocks=[1,2]"], "blocks cannot be [1,2]: choose one of its options, such as blocks=auto"),
    (["model=[null]"], "model cannot be [null]: choose one of its options, such as model=dit"),
    (["model=1"], "model cannot be 1: choose one of its options, such as model=dit"),
    (["task={a: 1}"], "task cannot be {a: 1}: choose one of its options, such as task=diffusion"),
    (["hydra.sweeper=3"], "hydra.sweeper is a group of keys: set one of them, as in hydra.sweeper.KEY=VALUE"),
    (["hydra.launcher=null"], "hydra.launcher is a group of keys"),
    (
        ['risk=${oc.decode:"1"}'],
        'risk cannot be ${oc.decode:"1"}: choose one of its options, such as risk=measured',
    ),
    (["~reallocation=1e309"], "reallocation cannot be 1e309: choose one of its options, such as reallocation="),
    (["++model.name=${budget}"], "model.name must be one name, not "),
    ([f"optim.lr=1{'0' * 400}"], "optim.lr is a number of about 401 digits: it must be below 9.2e18"),
    ([f"budget=1{'0' * 400}b"], "a memory size of 402 characters is more than any device has: write one like 8gb"),
    (["budget=null"], "a group cannot be null: choose one of its options, such as budget=unlimited"),
    (["trainer.max_steps"], "cannot read 'trainer.max_steps': missing EQUAL"),
    (["name=a=b"], "quote a value that holds , = or spaces"),
    (["optim.lr=1e-3;"], "cannot read 'optim.lr=1e-3;': ';' needs quotes around the value"),
    (["name=ü"], "cannot read 'name=ü': 'ü' needs quotes around the value"),
    (["budget=4gb,300mb"], "budget=4gb,300mb names several values: add -m to make one run for each of them"),
    (["seed=range(3)"], "seed=range(3) names several values: add -m"),
    (["seed=${nope}"], "a value refers to what is not there: Interpolation key 'nope' not found"),
    (["name=???"], "a value refers to what is not there: Missing mandatory value: name"),
    ([f"optim.lr=1{'0' * 5000}"], "a number of more than 4300 digits is given: no setting takes one"),
    (
        ["optim.lr=1e38"],
        "optim.lr=1e+38 is not allowed: it must be above 0, or null for what suits the model, and at most 1e30",
    ),
    (["optim.eps=1e-45"], "optim.eps=1e-45 is not allowed: it must be at least 1.18e-38, as fp32 rounds less"),
    (["optim.lr=inf"], "optim.lr=inf is not allowed: it must be a finite number"),
    (["trainer.val_check_interval=0"], "trainer.val_check_interval=0 is not allowed: it must be more than 0"),
    (
        ["trainer.limit_val_batches=1e9"],
        "=1000000000.0 is not allowed: it must be more than 0, since 0 trains or validates nothing: a whole",
    ),
    (["trainer.max_epochs=0"], "trainer.max_epochs=0 is not allowed: it must be more than 0"),
    (["trainer.max_time=foo"], "trainer.max_time=foo is not allowed: it must be days:hours:minutes:seconds"),
    (["allocator.name=best"], "there is no allocator 'best'"),
    (["risk.name=guess"], "there is no risk 'guess'"),
    (["task.name=audio"], "there is no task 'audio'"),
    (["dataset.name=cifar"], "there is no dataset 'cifar'"),
    (["model.size=giant"], "there is no size of model vit 'giant'"),
    (["catalogue.specs=[adamm]"], "adamm"),
    (
        ["catalogue.keep_fp32_roles=[heads]"],
        "there is no role in catalogue.keep_fp32_roles 'heads' (did you mean head?)",
    ),
    (
        ["resume=/no/such/run"],
        "resume=/no/such/run is not allowed: it must be auto, or a run folder or checkpoint that",
    ),
]
QUICK = ("model=vitt", "hydra.foo=1", "blocks.merge=1.0", "~reallocation=1e309", "seed=range(3)", "resume=/no/such/run")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [pytest.param(*case, marks=[] if case[0][0] in QUICK else pytest.mark.slow) for case in PROBLEMS],
)
def test_a_wrong_command_is_told_what_is_allowed(overrides: list[str], message: str):
    with pytest.raises((HydraException, ValueError)) as caught:
        from_hydra(compose(overrides))
    failure = failure_of(caught.value)
    assert message in failure.message
    assert (failure.exit_code, failure.details) == (2, "")


@pytest.mark.parametrize(
    ("override", "character"),
    [
        ("seed=3\n", r"\n"), ("name=a\n;b", r"\n"), ("seed=3\r", r"\r"), ("seed=3\r\n", r"\r"),
        ("name=\u2028", r"\u2028"), ("na;me=1", ";"), ("name=a b;", ";"), ("name=a;b;", ";"),
    ],
)  # fmt: skip
def test_the_character_in_the_way_is_named_in_lines_too(override: str, character: str):
    with pytest.raises(HydraException) as caught:
        OverridesParser.create().parse_overrides([override])
    assert f"'{character}' needs quotes around the value" in failure_of(caught.value).message


@given(st.text("=a1;,'\"\\\n\r\t\u2028 ^{}[]()$:#ü", max_size=12), st.sampled_from(["", "seed=", "name='a"]))
@settings(max_examples=200, deadline=None)
def test_no_override_is_too_odd_for_a_sentence(text: str, before: str):
    try:
        OverridesParser.create().parse_overrides([before + text])
    except OverrideParseException as error:
        assert failure_of(error).message.startswith(f"cannot read {before + text!r}: ")


def test_keys_of_the_sweeper_may_be_given_together():
    check_choices(["hydra.sweeper={max_batch_size: 2}"])


PATHS = [
    "~/images", "~jo/images", "/daten/jürgen", "/データ/犬", "/a b (copy)/[1]/{x}", "/a/#1 & co!", "/it's",
    "/a=b;c^d",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["dataset.path", "model.pretrained", "+resume"])
def test_a_path_of_any_characters_needs_no_quotes_of_hydras(path: str, key: str):
    (word,) = with_option_names([f"{key}={path}"])
    assert OverridesParser.create().parse_override(word).value() == path


@pytest.mark.parametrize(
    "word",
    [
        "dataset.path=null", "dataset.path=a/b,c", "dataset.path='a,b'", "dataset.path=${oc.env:HOME}/ü",
        "dataset.path=choice(a,b)", "dataset.path=", "resume=auto", "~dataset.path", "name=ü", "optim.lr=1",
        "dataset.path=/a,'/b(1)'", "resume=runs/a,'runs/b=c,d'", 'dataset.path=/a,"/b,c"', "dataset.path=/a, '/ü'",
        "dataset.path=range(1,3)", "dataset.path=tag(a,choice(x,y))", "dataset.path=[/ü]", "dataset.path={a:1}",
    ],
)  # fmt: skip
def test_other_words_stay_as_they_are(word: str):
    assert with_option_names([word]) == [word]


def test_paths_of_a_sweep_are_quoted_one_by_one():
    (word,) = with_option_names(["dataset.path=~/a,/ü/b"])
    assert list(OverridesParser.create().parse_override(word).sweep_string_iterator()) == ["'~/a'", "'/ü/b'"]
    assert word == "dataset.path='~/a','/ü/b'"
    assert with_option_names([word]) == [word]
    assert with_option_names(["resume='a,b',/c(1),d"]) == ["resume='a,b','/c(1)',d"]
