"""Averaged weights: the formula, what bf16 weights keep beside them, standing in for validation, and exact resume."""

import pytest
import torch
from torch import nn

from baoc.callbacks.checkpoint import SafeCheckpoint
from baoc.errors import BadInputError, CheckpointError
from baoc.optim import BlockwiseOptimizer
from baoc.optim.weights import split_weights_
from baoc.tasks import build_task
from baoc.tasks import ema as ema_module
from baoc.tasks.ema import EmaWeights
from tests.support.tiny import TinyBatches, TinyLoader, TinyModule, tiny_trainer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def change(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_average_follows_the_formula_with_its_warm_up():
    model, ema = network(), EmaWeights(0.3)
    ema.start(model)
    expected = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    for step in range(12):
        change(model, step)
        ema.update(model)
        decay = min(0.3, (1 + step) / (10 + step))  # .3 from the fourth step on
        for name, parameter in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    for name, average in ema.averages.items():
        torch.testing.assert_close(average.double(), expected[name], atol=1e-6, rtol=0)
    assert ema.num_updates == 12


def test_averages_lie_in_one_piece_of_the_counted_size():
    model, ema = network(), EmaWeights(0.9)
    ema.start(model)
    storages = {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in ema.averages.values()}
    assert list(storages.values()) == [ema.nbytes(model)]
    assert ema.nbytes(model) == 4 * (16 + 8 + 8 + 8 + 12 + 4)  # sizes 15, 5, 5, 5, 10, 2 in whole 16 bytes
    assert all(average.data_ptr() % 16 == 0 for average in ema.averages.values())


def test_frozen_parameters_have_no_average_and_thawed_ones_get_one():
    model, ema = network(), EmaWeights(0.9)
    model[0].requires_grad_(False)
    ema.update(model)
    assert set(ema.averages) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    before = {name: average.clone() for name, average in ema.averages.items()}
    model[0].requires_grad_(True)
    ema.start(model)
    assert torch.equal(ema.averages["0.weight"], model[0].weight)
    assert all(torch.equal(ema.averages[name], average) for name, average in before.items())
    assert ema.num_updates == 1


class Keeper(torch.optim.Optimizer):
    """An optimizer that may keep a correction beside a bf16 weight, as split weights do."""

    def __init__(self, params):
        super().__init__(params, {})


@pytest.mark.parametrize("chunk", [2**22, 7])
def test_corrections_of_split_weights_are_taken_in(chunk, monkeypatch):
    monkeypatch.setattr(ema_module, "CHUNK", chunk)
    exact = nn.Linear(5, 4, bias=False)
    model = nn.Linear(5, 4, bias=False).to(torch.bfloat16)
    optimizer = Keeper(model.parameters())
    correction = optimizer.state[model.weight]["correction"] = torch.zeros(4, 5, dtype=torch.int8)
    wanted, ema, rounded = EmaWeights(0.9), EmaWeights(0.9), EmaWeights(0.9)
    for average in (wanted, ema, rounded):
        average.start(exact)
    for step in range(3):
        change(exact, step)
        split_weights_(model.weight.data, correction, values=exact.weight.detach())
        wanted.update(exact)
        ema.update(model, optimizer=optimizer)
        rounded.update(model)
    assert ema.averages["weight"].dtype is torch.float32
    torch.testing.assert_close(ema.averages["weight"], wanted.averages["weight"], atol=6e-5, rtol=0)
    assert not torch.allclose(rounded.averages["weight"], wanted.averages["weight"], atol=1e-3, rtol=0)


def test_corrections_on_the_host_are_taken_in_as_those_on_the_device():
    models = [nn.Linear(5, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        BlockwiseOptimizer(model, f"adamw+split8{where}", lr=1e-4)
        for model, where in zip(models, ("", "@streamed"), strict=True)
    ]
    averages = [EmaWeights(0.9), EmaWeights(0.9)]
    for step in range(3):
        for model, optimizer, ema in zip(models, optimizers, averages, strict=True):
            torch.manual_seed(step)
            model(torch.randn(3, 5).bfloat16()).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model, optimizer=optimizer)
    assert all(torch.equal(averages[0].averages[name], average) for name, average in averages[1].averages.items())


def test_small_weights_of_any_strides_are_averaged_in_float32():
    model, ema = nn.Conv2d(4, 4, 3).to(torch.bfloat16, memory_format=torch.channels_last), EmaWeights(0.9)
    assert not model.weight.is_contiguous()
    start = model.weight.detach().float().clone()
    ema.start(model)
    change(model, 0)
    ema.update(model)
    torch.testing.assert_close(ema.averages["weight"], start.lerp(model.weight.detach().float(), 0.9))


def test_swapping_moves_no_number_and_gives_the_weights_back():
    model, ema = network(), EmaWeights(0.9)
    ema.start(model)
    change(model, 0)
    pointers = [p.data_ptr() for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    with ema.swapped(model):
        assert [p.data_ptr() for p in model.parameters()] == [a.data_ptr() for a in ema.averages.values()]
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def test_weights_come_back_after_an_error():
    model, ema = network(), EmaWeights(0.9)
    ema.start(model)
    pointer = model[0].weight.data_ptr()
    with pytest.raises(ZeroDivisionError), ema.swapped(model):
        _ = 1 / 0
    assert model[0].weight.data_ptr() == pointer


@pytest.mark.parametrize("decay", [0, 1, -0.5, 1.5])
def test_impossible_decay_is_refused(decay):
    with pytest.raises(BadInputError, match=f"ema_decay must be above 0 and below 1 .0 keeps no average., not {decay}"):
        EmaWeights(decay)


@pytest.mark.parametrize("name", ["vision", "language", "diffusion"])
def test_every_task_takes_a_decay_and_0_keeps_none(name):
    model = network()
    model.null_label = 3
    task = build_task(name, model=model, ema_decay=0.99)
    assert [callback.decay for callback in task.configure_callbacks()] == [0.99]
    assert build_task(name, model=model, ema_decay=0.0).configure_callbacks() == []


class Averaged(TinyModule):
    """Remembers with which weights each step and each validation was run."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.ema = EmaWeights(0.9)
        self.trained, self.validated = [], []

    def configure_callbacks(self):
        return [self.ema]

    def training_step(self, batch, batch_idx):
        self.trained.append(self.net[0].weight.detach().clone())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.net[0].weight.detach().clone())
        super().validation_step(batch, batch_idx)


def fit(*, seed=0, ckpt_path=None, **options):
    torch.manual_seed(seed)
    module = Averaged()
    trainer = tiny_trainer(**({"max_steps": 6, "limit_val_batches": 1} | options))
    trainer.fit(module, TinyLoader(num_batches=12), TinyBatches(), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


def test_validation_sees_averages_and_training_the_weights():
    module, _ = fit(val_check_interval=3)
    assert len(module.validated) == 2
    assert torch.equal(module.validated[-1], module.ema.averages["net.0.weight"])
    assert not torch.equal(module.validated[-1], module.net[0].weight)
    average = module.trained[0].clone()
    for step, weight in enumerate([*module.trained[1:], module.net[0].weight.detach()]):
        average.lerp_(weight, 1 - min(0.9, (1 + step) / (10 + step)))
    torch.testing.assert_close(module.ema.averages["net.0.weight"], average)


def test_accumulated_micro_batches_are_one_step():
    module, trainer = fit(max_steps=3, accumulate_grad_batches=4)
    assert trainer.global_step == module.ema.num_updates == 3


def test_averages_change_nothing_about_training():
    module, _ = fit(val_check_interval=2)
    torch.manual_seed(0)
    plain = TinyModule(dropout=0.0)
    tiny_trainer(max_steps=6).fit(plain, TinyLoader(num_batches=12), TinyBatches())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), plain.parameters(), strict=True))


def test_checkpoint_after_a_validation_holds_weights_and_averages_apart(tmp_path):
    module, _ = fit(
        val_check_interval=6,
        callbacks=[SafeCheckpoint(tmp_path, monitor="val/loss")],
        enable_checkpointing=True,
    )
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight)
    assert torch.equal(saved["callbacks"]["EmaWeights"]["averages"]["net.0.weight"], module.validated[-1])


def test_checkpoint_is_validated_with_its_averages(tmp_path):
    module, trainer = fit()
    trainer.save_checkpoint(tmp_path / "at6.ckpt")
    other = Averaged()
    tiny_trainer(limit_val_batches=1).validate(
        other, TinyBatches(), ckpt_path=tmp_path / "at6.ckpt", weights_only=True, verbose=False
    )
    assert torch.equal(other.validated[0], module.ema.averages["net.0.weight"])
    assert torch.equal(other.net[0].weight, module.net[0].weight)


def test_averages_of_another_model_are_refused():
    model, ema = network(), EmaWeights(0.9)
    ema.load_state_dict({"num_updates": 3, "averages": {"0.weight": torch.zeros(2, 2)}})
    with pytest.raises(CheckpointError, match=r"average of 0.weight in the checkpoint has shape \(2, 2\), the param"):
        ema.start(model)


def test_checkpoint_is_handed_on_before_it_was_used():
    ema = EmaWeights(0.9)
    state = {"num_updates": 3, "averages": {"0.weight": torch.zeros(2, 2)}}
    ema.load_state_dict(state)
    assert ema.state_dict() == state


def test_rounded_copies_stand_in_where_a_module_sees_bf16_only():
    module, _ = fit(precision="bf16-true", val_check_interval=6)
    assert {weight.dtype for weight in module.validated} == {torch.bfloat16}
    assert {average.dtype for average in module.ema.averages.values()} == {torch.float32}
    assert torch.equal(module.validated[-1], module.ema.averages["net.0.weight"].bfloat16())
    assert module.ema.validation_bytes(module) == 2 * sum(p.numel() for p in module.parameters())
