"""Language training end to end: equal to a plain loop, and learning within a few steps."""

import math

import lightning as L
import pytest
import torch

from baoc.data import build_data
from baoc.models import build_model
from baoc.tasks import OptimizerSettings, build_task
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.slow


def data(**settings):
    options = {"batch_size": 8, "seed": 5, "sequence_length": 32, "max_val_sequences": 64, **settings}
    return build_data("pysource", task="language", **options)


class Losses(L.Callback):
    def __init__(self):
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


@pytest.fixture(scope="module")
def spec():
    return data().spec


def test_fifty_steps_equal_a_plain_loop_with_the_librarys_model(spec):
    """transformers' Llama, torch.optim.AdamW and a loop of five lines, on the same batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = OptimizerSettings(lr=3e-3, weight_decay=0.1)
    model = build_model("llama", spec=spec, seed=1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(model.net.state_dict())
    plain.train()
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.lr_factor(step, num_steps=50))
    expected = []
    for _, batch in zip(range(50), data().train_dataloader(), strict=False):
        loss = plain(input_ids=batch["tokens"], labels=batch["tokens"], shift_labels=batch["targets"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*decayed, *others], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    task = build_task("language", model=model, spec=spec, optimizer=settings)
    losses = Losses()
    tiny_trainer(max_steps=50, gradient_clip_val=1.0, limit_val_batches=0, callbacks=[losses]).fit(task, data())

    assert losses.values == pytest.approx(expected, abs=1e-5)
    for ours, theirs in zip(model.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert expected[-1] < expected[0] - 1


def test_a_few_steps_beat_the_frequencies_of_bytes(spec):
    """Validation after 50 steps lies below the entropy of single bytes, so context is being used."""
    everything = data(batch_size=512, max_val_sequences=None).val_dataloader()
    held = torch.cat([batch["targets"].flatten() for batch in everything])
    shares = torch.bincount(held, minlength=256).double() / len(held)
    entropy = -(shares * shares.clamp_min(1e-12).log2()).sum().item()
    task = build_task("language", model=build_model("llama", spec=spec, seed=0), spec=spec)
    trainer = tiny_trainer(max_steps=50, check_val_every_n_epoch=None, val_check_interval=50, gradient_clip_val=1.0)
    trainer.fit(task, data(batch_size=16))
    bits = trainer.callback_metrics["val/bpb"].item()
    assert 2 < bits < entropy < 5.2
    assert trainer.callback_metrics["val/ppl"].item() == pytest.approx(2**bits, rel=1e-4)
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(bits * math.log(2), rel=1e-4)
