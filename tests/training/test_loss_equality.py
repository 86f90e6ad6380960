"""A run's losses are those of the plain library under torch's AdamW: same weights, same batches, nothing else.

The other side of the comparison uses neither tasks nor strategy nor optimizer of this package, and its own arithmetic
for the schedule.
"""

import math
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from baoc import BaocStrategy
from baoc.config.schema import ReallocationConfig
from baoc.data import build_data
from baoc.models import build_model
from baoc.planning.planner import PlannerSettings
from baoc.tasks import OptimizerSettings, build_task
from baoc.training.session import SessionSettings
from tests.support.tiny import tiny_trainer

pytestmark = pytest.mark.slow
STEPS, BATCH, LR, DECAY = 50, 32, 3e-3, 0.01


class Losses(L.Callback):
    def __init__(self):
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))


def digits():
    return build_data("digits", task="vision", batch_size=BATCH, seed=2)


def model_depth(state: dict[str, torch.Tensor]) -> int:
    return len({name.split(".")[2] for name in state if name.startswith("vit.layers.")})


def plain_losses(state: dict[str, torch.Tensor]) -> list[float]:
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=model_depth(state),
        num_attention_heads=4,
        intermediate_size=256,
        layer_norm_eps=1e-6,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = ViTForImageClassification(config).train()
    net.load_state_dict(state)
    matrices = [p for p in net.parameters() if p.ndim >= 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    losses: list[float] = []
    loader, step = digits().train_dataloader(), 0
    while True:
        for batch in loader:
            if step == STEPS:
                return losses
            # ten per cent warm-up, then half a cosine to a tenth at the last step
            after = (step - 4) / (STEPS - 5)
            factor = (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * after)) / 2
            for group in optimizer.param_groups:
                group["lr"] = LR * factor
            loss = F.cross_entropy(net(pixel_values=batch["images"]).logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            step += 1


def strategy() -> BaocStrategy:
    settings = SessionSettings(
        planner=PlannerSettings(allocator="uniform_adamw"), reallocation=ReallocationConfig(mode="off")
    )
    return BaocStrategy("unlimited", device="cpu", settings=settings)


def test_fifty_steps_of_a_vision_run_are_those_of_the_plain_library(tmp_path: Path):
    """Under BaocStrategy, which is Lightning bit for bit where no budget binds (test_strategy)."""
    data = digits()
    model = build_model("vit", spec=data.spec, seed=0)
    start = {name.removeprefix("net."): value.clone() for name, value in model.state_dict().items()}
    losses, options = Losses(), OptimizerSettings(lr=LR, weight_decay=DECAY)
    trainer = tiny_trainer(
        max_steps=STEPS,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[losses],
        default_root_dir=tmp_path,
        strategy=strategy(),
    )
    trainer.fit(build_task("vision", model=model, optimizer=options), data)
    assert len(losses.seen) == STEPS and losses.seen[-1] < 0.8 * losses.seen[0]
    assert losses.seen == pytest.approx(plain_losses(start), abs=1e-5)
