"""Training loops as strangers write them, with BaocOptimizer in AdamW's place: they train, hold the budget, and go on
from a checkpoint bit for bit."""

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence

from baoc import BaocOptimizer
from baoc.errors import BadInputError

pytestmark = pytest.mark.slow  # they train by loops of others

STEPS = 4


def drawn(step: int, *shape: int, below: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(step)
    return torch.randint(below, shape, generator=rng) if below else torch.randn(*shape, generator=rng)


class Tagger(nn.Module):
    """A packed LSTM."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(40, 16, padding_idx=0), nn.LSTM(16, 16, 2, bidirectional=True, dropout=0.2)
        self.out = nn.Linear(32, 5)

    def loss(self, step: int) -> torch.Tensor:
        words, lengths = drawn(step, 10, 6, below=40), drawn(step, 6, below=9) + 1
        _, (last, _) = self.rnn(pack_padded_sequence(self.words(words), lengths, enforce_sorted=False))
        return cross_entropy(self.out(torch.cat([last[-1], last[-2]], 1)), drawn(step, 6, below=5))


class Experts(nn.Module):
    """A mixture whose experts a batch may not reach: their gradients are None."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def loss(self, step: int) -> torch.Tensor:
        x = drawn(step, 2, 16)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        reached = zip(x, weight, chosen, strict=True)
        return torch.stack([(w * self.experts[int(k)](row)).square().sum() for row, w, k in reached]).sum()


class Translator(nn.Module):
    """An encoder and decoder that share an embedding with the head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 16)
        nn.init.normal_(self.words.weight, std=0.02)
        self.core = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.words.weight

    def loss(self, step: int) -> torch.Tensor:
        source = drawn(step, 4, 8, below=30)
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        made = self.core(self.words(source), self.words(source.flip(1)[:, :-1]), tgt_mask=mask)
        return cross_entropy(self.head(made).flatten(0, 1), source.flip(1)[:, 1:].flatten())


class Conv(nn.Module):
    """Grouped and transposed convolutions, batch norm, spectral norm, channels last."""

    def __init__(self):
        super().__init__()
        parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 4, 2, 2))
        head = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        self.net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
        self.net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def loss(self, step: int) -> torch.Tensor:
        images = drawn(step, 4, 3, 10, 10).to(memory_format=torch.channels_last)
        return cross_entropy(self.net(images), drawn(step, 4, below=3))


def plainly(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    loss(step).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def accumulating(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    for part in range(3):
        (loss(3 * step + part) / 3).backward()
    torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad()


def by_closure(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, extra: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        return value

    assert optimizer.step(closure).requires_grad


def scaled(optimizer: Any, loss: Callable[[int], torch.Tensor], step: int, scaler: Any) -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        value = loss(step)
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "way"), [(Tagger, accumulating), (Experts, by_closure), (Translator, scaled), (Conv, plainly)]
)
def test_a_loop_goes_on_bit_for_bit(kind: Any, way: Any):
    torch.manual_seed(0)
    first = kind()

    def made(model: nn.Module) -> tuple[BaocOptimizer, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)  # the first steps overflow
        return BaocOptimizer(model, budget="state_25", lr=1e-2, verbose=False), scaler

    optimizer, scaler = made(first)
    for step in range(STEPS):
        if step == STEPS // 2:
            kept = {"model": first.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            torch.save({**kept, "rng": torch.get_rng_state()}, file := io.BytesIO())
        way(optimizer, first.loss, step, scaler)
    assert optimizer.budget_met
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second = kind()
    optimizer, scaler = made(second)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["rng"])
    for step in range(STEPS // 2, STEPS):
        way(optimizer, second.loss, step, scaler)
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def loss(self, step: int) -> torch.Tensor:
        x = drawn(step, 8, 16)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("before", "after"), [(3, 1), (False, 2)])
def test_a_run_goes_on_with_another_number_of_recomputed_layers(before: bool | int, after: bool | int):
    torch.manual_seed(0)
    model = Deep()
    optimizer = BaocOptimizer(model, budget="state_25", checkpointing=before, verbose=False)
    for step in range(3):
        plainly(optimizer, model.loss, step, None)
    other = Deep()
    other.load_state_dict(model.state_dict())
    resumed = BaocOptimizer(other, budget="state_25", checkpointing=after, verbose=False)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        plainly(optimizer, model.loss, step, None)
        plainly(resumed, other.loss, step, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_lazy_head_is_asked_for_one_batch():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    with pytest.raises(BadInputError, match=r"'0\.weight' has no shape yet, as its layer is lazy: run one batch"):
        BaocOptimizer(model, budget="state_25", verbose=False)
    model(drawn(0, 2, 1, 6, 6))
    optimizer = BaocOptimizer(model, budget="state_25", verbose=False)
    plainly(optimizer, lambda step: cross_entropy(model(drawn(step, 2, 1, 6, 6)), drawn(step, 2, below=3)), 1, None)
    assert optimizer.budget_met


class Lookahead:
    """Slow weights beside the fast ones, kept in the state of the optimizer that it wraps, as timm's does."""

    def __init__(self, base: torch.optim.Optimizer):
        self.base, self.param_groups, self.zero_grad = base, base.param_groups, base.zero_grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step(closure)
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.base.state[param]
            state["count"] = state.get("count", 0) + 1
            slow = state.setdefault("slow_buffer", param.clone())
            if state["count"] % 2 == 0:
                param.copy_(slow.lerp_(param, 0.5))


@pytest.mark.parametrize("budget", ["unlimited", "state_25"])
def test_what_a_wrapper_keeps_in_the_states_is_saved_moved_and_no_part_of_the_budget(budget: str):
    torch.manual_seed(0)
    first = Deep()
    optimizer = BaocOptimizer(first, budget=budget, lr=1e-2, verbose=False)
    bytes_alone, wrapped = optimizer.state_bytes(), Lookahead(optimizer)
    for step in range(3):
        plainly(wrapped, first.loss, step, None)
    assert optimizer.state_bytes() == bytes_alone
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file := io.BytesIO())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for stepped_before in (0, 1):  # one that has no such entries, and one that has others
        second = Deep()
        resumed = BaocOptimizer(second, budget=budget, lr=1e-2, verbose=False)
        for step in range(stepped_before):
            plainly(Lookahead(resumed), second.loss, step, None)
        second.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        other = copy.deepcopy((second, resumed))
        if stepped_before == 0:
            states = [resumed.state[param] for param in second.parameters()]
            resumed.migrate({next(iter(resumed.specs)): "adamw_int8"})
            assert [state["count"] for state in states] == [3] * len(states)
            assert all("slow_buffer" in resumed.state[param] for param in second.parameters())
        for network, its in ((second, resumed), other)[stepped_before == 0 :]:
            for step in range(3, 6):
                plainly(Lookahead(its), network.loss, step, None)
    for step in range(3, 6):
        plainly(wrapped, first.loss, step, None)
    for network in (second, other[0]):
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), network.parameters(), strict=True))


def by_clearing(optimizer: Any, before: Any) -> None:
    optimizer.state.clear()


def by_a_new_state(optimizer: Any, before: Any) -> None:
    optimizer.state = defaultdict(dict)


def by_setstate(optimizer: Any, before: Any) -> None:
    optimizer.__setstate__({"state": defaultdict(dict)})


def by_loading(optimizer: Any, before: Any) -> None:
    optimizer.load_state_dict(before)


def of_some(optimizer: Any, before: Any) -> None:
    for param in optimizer.param_groups[0]["params"][2:4]:
        del optimizer.state[param]


def by_empty_ones(optimizer: Any, before: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param] = {}


def of_some_by_empty_ones(optimizer: Any, before: Any) -> None:
    first, second = optimizer.param_groups[0]["params"][2:4]
    optimizer.state[first] = {}
    del optimizer.state[second]
    assert not optimizer.state[second]  # a defaultdict's read makes one


def by_clearing_each(optimizer: Any, before: Any) -> None:
    for state in tuple(optimizer.state.values()):
        state.clear()


def by_clearing_in_a_loop(optimizer: Any, before: Any) -> None:
    for state in optimizer.state.values():
        state.clear()


def by_emptying_its_own(optimizer: Any, before: Any) -> None:
    own = {param: dict(optimizer.state[param]) for param in optimizer.state}
    for param, state in own.items():
        optimizer.state[param] = state
    optimizer.step()  # without gradients
    for state in own.values():
        state.clear()


def by_popping(optimizer: Any, before: Any) -> None:
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state.pop(param)


def by_updating(optimizer: Any, before: Any) -> None:
    optimizer.state |= {param: {} for param in optimizer.state}


def by_clearing_a_new_state(optimizer: Any, before: Any) -> None:
    if type(optimizer.state) is not defaultdict:
        optimizer.state = defaultdict(dict)
    optimizer.state.clear()


ALL = [
    by_clearing, by_a_new_state, by_setstate, by_loading, by_empty_ones, by_clearing_each, by_clearing_in_a_loop,
    by_popping, by_updating, by_clearing_a_new_state,
]  # fmt: skip


@pytest.mark.parametrize("way", [*ALL, of_some, of_some_by_empty_ones, by_emptying_its_own])
def test_states_start_afresh_as_those_of_torch_do(way: Callable[[Any, Any], None]):
    """Dead units that are revived, agents that begin anew, Reptile: all reset AdamW by its `state`."""
    ended = []
    for make in (torch.optim.AdamW, partial(BaocOptimizer, budget="unlimited", verbose=False)):
        torch.manual_seed(0)
        model = Deep()
        optimizer: Any = make(model.parameters(), lr=1e-2)
        before = optimizer.state_dict()
        for step in range(8):
            if step in (3, 6):
                way(optimizer, before)
            plainly(optimizer, model.loss, step, None)
        ended.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(*ended, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", ALL)
def test_states_of_every_spec_start_afresh(way: Callable[[Any, Any], None]):
    torch.manual_seed(0)
    model = Deep()
    optimizer = BaocOptimizer(model, budget="state_15", lr=1e-2, verbose=False)
    before = optimizer.state_dict()
    for step in range(3):
        plainly(optimizer, model.loss, step, None)
    other = copy.deepcopy(model)
    fresh = BaocOptimizer(other, budget="state_15", lr=1e-2, verbose=False)
    fresh.num_steps = optimizer.num_steps if way is not by_loading else 0  # the phase of dithered codes goes on
    assert fresh.specs == optimizer.specs
    way(optimizer, before)
    for step in range(3):
        plainly(optimizer, model.loss, step, None)
        plainly(fresh, other.loss, step, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_that_is_cleared_and_written_again_is_what_was_written():
    model = Deep()
    optimizer = BaocOptimizer(model, budget="unlimited", verbose=False)
    for step in range(3):
        plainly(optimizer, model.loss, step, None)
    for state in optimizer.state.values():
        saved = dict(state)
        state.clear()
        state.update(saved)
    plainly(optimizer, model.loss, 3, None)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def test_clearing_a_state_of_before_a_migration_leaves_the_new_one():
    model = Deep()
    optimizer = BaocOptimizer(model, budget="unlimited", verbose=False)
    plainly(optimizer, model.loss, 0, None)
    earlier = list(optimizer.state.values())
    optimizer.migrate(dict.fromkeys(optimizer.specs, "adamw_int8"))
    for state in earlier:
        state.clear()
    plainly(optimizer, model.loss, 1, None)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_moments_of_adamw_are_told_where_they_are():
    """Code that splats or prunes reads `exp_avg` of each parameter."""
    model = Deep()
    optimizer = BaocOptimizer(model, budget="state_25", verbose=False)
    plainly(optimizer, model.loss, 0, None)
    state = optimizer.state[next(model.parameters())]
    assert state.get("exp_avg") is None and "exp_avg" not in state
    copied = copy.deepcopy(optimizer.state)
    assert type(copied) is defaultdict and {type(each) for each in copied.values()} == {dict}  # none of ours in pickles
    with pytest.raises(BadInputError, match=r"has no exp_avg: .* keeps .*\. to_adamw_state_dict\(\) gives exp_avg"):
        state["exp_avg"]
    with pytest.raises(KeyError):  # which code may try for
        state["exp_avg_sq"]
    with pytest.raises(KeyError, match="momentum_buffer"):
        state["momentum_buffer"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("made", [torch.jit.script, torch.fx.symbolic_trace, nn.DataParallel], ids=lambda f: f.__name__)
def test_networks_that_are_wrapped_or_rewritten_have_the_plan_of_their_own(made: Callable[[Any], Any]):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = made(copy.deepcopy(plain))
    both = (
        (plain, BaocOptimizer(plain, budget="state_25", verbose=False)),
        (
            model,
            BaocOptimizer(model.parameters(), model=model, budget="state_25", verbose=False),
        ),
    )
    for network, optimizer in both:
        for step in range(2):
            plainly(optimizer, lambda at, net=network: net(drawn(at, 4, 8)).square().mean(), step, None)
    assert sorted(both[0][1].specs.values()) == sorted(both[1][1].specs.values())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_compiled_training_step_calls_it_as_it_is():
    torch.manual_seed(0)
    model = Deep()
    other = copy.deepcopy(model)
    optimizers = [BaocOptimizer(net, budget="state_25", verbose=False) for net in (model, other)]

    def train(optimizer: BaocOptimizer, net: Deep, x: torch.Tensor) -> None:
        for layer in net.layers:
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="aot_eager")
    for step in range(2):
        train(optimizers[0], model, drawn(step, 8, 16))
        compiled(optimizers[1], other, drawn(step, 8, 16))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
