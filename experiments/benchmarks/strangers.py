"""Training scripts of fourteen kinds, as other people write them, each with two lines of ours, on one GPU.

    python experiments/benchmarks/strangers.py OUT  # 4 minutes (--seconds 215) of an H200 -> strangers.csv

Each trains with torch's AdamW, then at `state_25` and at 75 % of the peak that AdamW was measured to have; both are
resumed from the middle in a fresh process. A row says if it trained, what it held beside budget and prediction, whether
the resumed run ends with the same bits, and whether plan and verdict were printed. Processes under a memory budget have
the card to themselves, because the driver does not tell processes apart in a container; the context in AdamW's peak is
the first script's. OUT/strangers.csv gets a row as soon as it is known, OUT/NAME_*.log has what a process printed.
"""

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.tracking.files import write_csv

STEPS, HALF, SHARE = 12, 6, 0.75
FIELDS = [
    "script", "budget", "parameters", "adamw_loss", "loss", "adamw_peak_bytes", "budget_bytes", "peak_bytes",
    "predicted_bytes", "adamw_state_bytes", "state_bytes", "held", "resumed_equal", "told", "seconds", "note", "device",
    "torch",
]  # fmt: skip


# -- what the scripts share: sizes, data of a step, one checkpoint ---------------------------------------------------


@dataclass
class Job:
    """One process: what it trains, within what, and from where. `budget=None` is torch's AdamW."""

    budget: str | None
    scale: float
    path: Path
    resume: bool
    device: str = "cpu"
    optimizers: list[Any] = field(default_factory=list)  # whoever has `budget_met` and `plan`

    def wide(self, width: int) -> int:
        """A width at this scale, a multiple of 32."""
        return max(32, round(width * self.scale / 32) * 32)

    def deep(self, depth: int) -> int:
        return max(1, round(depth * min(1, self.scale * 2)))

    def made(self, build: Callable[[], Any]) -> Any:
        """A network whose weights are drawn on the device, which takes seconds less."""
        with torch.device(self.device):
            return build()

    def normal(self, step: int, *shape: int) -> Any:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step)).to(self.device)

    def whole(self, step: int, high: int, *shape: int) -> Any:
        return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1000 + step)).to(self.device)

    def adamw(self, params: Any, *, model: Any, **options: Any) -> Any:
        """Theirs, or ours in its place."""
        if self.budget is None:
            return torch.optim.AdamW(params, fused=self.device == "cuda", **options)
        return self.own(BaocOptimizer(params, model=model, budget=self.budget, **options))

    def own(self, optimizer: Any) -> Any:
        self.optimizers.append(optimizer)
        return optimizer

    def loop(self, model: Any, parts: Iterable[Any], step: Callable[[int], Any]) -> Any:
        """Runs all steps, saves in the middle or begins there; `parts` are optimizers and schedules."""
        parts, first, loss = list(parts), 0, None
        if self.resume:
            saved = torch.load(self.path / "half.pt", weights_only=True, map_location="cpu")
            model.load_state_dict(saved["model"])
            for part, state in zip(parts, saved["parts"], strict=True):
                part.load_state_dict(state)
            torch.set_rng_state(saved["rng"])
            if self.device == "cuda":
                torch.cuda.set_rng_state(saved["cuda"])
            first = HALF
        for number in range(first, STEPS):
            loss = step(number)
            if number + 1 == HALF and not self.resume:
                cuda = torch.cuda.get_rng_state() if self.device == "cuda" else None
                state = {"model": model.state_dict(), "parts": [part.state_dict() for part in parts]}
                torch.save({**state, "rng": torch.get_rng_state(), "cuda": cuda}, self.path / "half.pt")
        return loss


def layers(width: int, depth: int) -> Any:
    """Encoder layers of torch, pre-norm, with dropout."""
    make = nn.TransformerEncoderLayer
    return nn.ModuleList(
        make(width, 8, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(depth)
    )


# -- the scripts -----------------------------------------------------------------------------------------------------


def nanogpt(job: Job) -> tuple[Any, Any]:
    """Decay groups, bf16 autocast, accumulation, clipping, a rate by hand, tied embedding, recomputed layers."""
    from torch.utils.checkpoint import checkpoint

    width = job.wide(1024)

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe, self.h = (
                nn.Embedding(1024, width),
                nn.Embedding(256, width),
                layers(width, job.deep(10)),
            )
            self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 1024, bias=False)
            nn.init.normal_(self.wte.weight, std=0.02)
            self.lm_head.weight = self.wte.weight

        def forward(self, ids):
            x = self.wte(ids[:, :-1]) + self.wpe.weight[: ids.shape[1] - 1]
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            for block in self.h:
                x = checkpoint(block, x, mask, use_reentrant=False)
            return nn.functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), ids[:, 1:].flatten())

    model = job.made(GPT)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = job.adamw(groups, model=model, lr=3e-4, betas=(0.9, 0.95))

    def step(number):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1, (number + 1) / 4) * 0.5 * (1 + math.cos(math.pi * number / STEPS))
        for part in range(2):
            with torch.autocast(job.device, torch.bfloat16):
                loss = model(job.whole(2 * number + part, 1024, 4, 129)) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 2 * loss

    return model, job.loop(model, [optimizer], step)


def timm_like(job: Job) -> tuple[Any, Any]:
    """Groups with a rate per layer as create_optimizer_v2 makes them, taken over by `from_optimizer`; a schedule."""
    width, depth = job.wide(1024), job.deep(10)

    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch_embed, self.cls_token = nn.Conv2d(3, width, 8, 8), nn.Parameter(torch.zeros(1, 1, width))
            self.pos_embed, self.blocks = nn.Parameter(torch.randn(1, 65, width) * 0.02), layers(width, depth)
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

        def forward(self, x):
            x = self.patch_embed(x).flatten(2).mT
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x[:, 0]))

    model, groups = job.made(ViT), {}
    for name, param in model.named_parameters():
        at = int(name.split(".")[1]) + 1 if name.startswith("blocks") else 0 if "embed" in name else depth + 1
        decay = 0.0 if param.ndim < 2 or name in ("cls_token", "pos_embed") else 0.05
        scale = 0.9 ** (depth + 1 - at)
        new = {"params": [], "weight_decay": decay, "lr_scale": scale, "lr": 3e-4 * scale}
        groups.setdefault((at, decay), new)["params"].append(param)
    optimizer = torch.optim.AdamW(list(groups.values()), lr=3e-4, fused=job.device == "cuda")
    if job.budget is not None:
        optimizer = job.own(BaocOptimizer.from_optimizer(optimizer, model, budget=job.budget))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(number):
        logits, labels = model(job.normal(number, 16, 3, 64, 64)), job.whole(number, 10, 16)
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return model, job.loop(model, [optimizer, schedule], step)


def diffusion_unet(job: Job) -> tuple[Any, Any]:
    """diffusers' UNet and noise schedule, where they are installed."""
    from diffusers.models.unets.unet_2d import UNet2DModel
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    wide = job.wide(320)
    model = job.made(lambda: UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=2,
        block_out_channels=(wide, 2 * wide, 2 * wide),
        norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ))  # fmt: skip
    noise = DDPMScheduler(100)
    optimizer = job.adamw(model.parameters(), model=model, lr=1e-4)

    def step(number):
        x, e = job.normal(number, 2, 3, 32, 32), job.normal(number + 9999, 2, 3, 32, 32)
        times = job.whole(number, 100, 2)
        loss = nn.functional.mse_loss(model(noise.add_noise(x, e, times), times).sample, e)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, job.loop(model, [optimizer], step)


def lstm(job: Job) -> tuple[Any, Any]:
    """Packed sequences, two directions, gradients clipped by value; no dropout, whose state cuDNN does not give."""
    from torch.nn.utils.rnn import pack_padded_sequence

    width = job.wide(1600)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.out = nn.Embedding(2000, width, padding_idx=0), nn.Linear(2 * width, 5)
            self.rnn = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)

        def forward(self, x, lengths):
            packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
            _, (last, _) = self.rnn(packed)
            return self.out(torch.cat([last[-1], last[-2]], 1))

    model = job.made(Tagger)
    optimizer = job.adamw(model.parameters(), model=model, lr=3e-4)

    def step(number):
        lengths = job.whole(number, 20, 16).cpu() + 1
        logits, labels = model(job.whole(number, 1999, 16, 20) + 1, lengths), job.whole(number, 5, 16)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, job.loop(model, [optimizer], step)


def moe(job: Job) -> tuple[Any, Any]:
    """Experts that a batch may not reach: their gradients are None."""
    width = job.wide(1344)

    def expert():
        return nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.router = nn.Linear(32, width), nn.Linear(width, 8, bias=False)
            self.experts, self.out = nn.ModuleList(expert() for _ in range(8)), nn.Linear(width, 10)

        def forward(self, x):
            x = self.inp(x)
            gate, chosen = self.router(x).softmax(-1).max(-1)
            y = x.clone()
            for at in chosen.unique().tolist():
                y[chosen == at] = x[chosen == at] + gate[chosen == at, None] * self.experts[at](x[chosen == at])
            return self.out(y)

    model = job.made(MoE)
    optimizer = job.adamw(model.parameters(), model=model, lr=3e-4)

    def step(number):
        loss = nn.functional.cross_entropy(model(job.normal(number, 6, 32)), job.whole(number, 10, 6))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return model, job.loop(model, [optimizer], step)


def encoder_decoder(job: Job) -> tuple[Any, Any]:
    """nn.Transformer with the schedule of "Attention is all you need"."""
    width = job.wide(1024)

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.src, self.tgt, self.gen = nn.Embedding(1000, width), nn.Embedding(1000, width), nn.Linear(width, 1000)
            self.core = nn.Transformer(width, 8, job.deep(4), job.deep(4), 4 * width, 0.1, batch_first=True)

        def forward(self, a, b):
            mask = nn.Transformer.generate_square_subsequent_mask(b.shape[1], device=a.device)
            return self.gen(self.core(self.src(a), self.tgt(b), tgt_mask=mask))

    model = job.made(Translator)
    optimizer = job.adamw(model.parameters(), model=model, lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) ** -0.5, (k + 1) / 4))

    def step(number):
        a = job.whole(number, 1000, 8, 24)
        b = a.flip(1)
        loss = nn.functional.cross_entropy(model(a, b[:, :-1]).flatten(0, 1), b[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    return model, job.loop(model, [optimizer, schedule], step)


def conv(job: Job) -> tuple[Any, Any]:
    """A residual net with batch norms, accumulation and mixed precision with a gradient scaler."""

    class Residual(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.one, self.two = nn.Conv2d(inputs, outputs, 3, 2, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)
            self.skip = nn.Conv2d(inputs, outputs, 1, 2)
            self.n1, self.n2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

        def forward(self, x):
            return (self.skip(x) + self.n2(self.two(self.n1(self.one(x)).relu()))).relu()

    c = job.wide(192)

    def net():
        stages = [Residual(a, b) for a, b in pairwise([c, 2 * c, 4 * c, 8 * c])]
        tail = [nn.Conv2d(8 * c, 8 * c, 3, 1, 1, bias=False), nn.BatchNorm2d(8 * c), nn.ReLU()] * 2
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * c, 10)]
        return nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), nn.ReLU(), *stages, *tail, *head)

    model = job.made(net)
    optimizer = job.adamw(model.parameters(), model=model, lr=3e-4)
    scaler = torch.amp.GradScaler(job.device, init_scale=256.0, enabled=job.device == "cuda")

    def step(number):
        for part in range(2):
            with torch.autocast(job.device, torch.float16, enabled=job.device == "cuda"):
                logits = model(job.normal(2 * number + part, 8, 3, 64, 64))
                loss = nn.functional.cross_entropy(logits, job.whole(2 * number + part, 10, 8)) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return 2 * loss

    return model, job.loop(model, [optimizer, scaler], step)


def unfreezing(job: Job) -> tuple[Any, Any]:
    """A head first, its backbone from the fourth step on, by add_param_group."""
    width = job.wide(4096)

    def net():
        body = [part for _ in range(job.deep(7)) for part in (nn.Linear(width, width), nn.ReLU())]
        backbone = nn.Sequential(nn.Linear(256, width), nn.ReLU(), *body)
        return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(width, 10)})

    model = job.made(net)
    model["backbone"].requires_grad_(False)
    optimizer = job.adamw(model["head"].parameters(), model=model, lr=3e-4)

    def unfreeze():
        model["backbone"].requires_grad_(True)
        optimizer.add_param_group({"params": list(model["backbone"].parameters()), "lr": 1e-4})

    def step(number):
        if number == 3:
            unfreeze()
        logits = model["head"](model["backbone"](job.normal(number, 32, 256)))
        loss = nn.functional.cross_entropy(logits, job.whole(number, 10, 32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    if job.resume:
        unfreeze()
    return model, job.loop(model, [optimizer], step)


def fitted(job: Job, module: Any, *, loss: str, strategy: Any = None, **options: Any) -> tuple[Any, Any]:
    """A fit of Lightning whose epochs are one step long, because Lightning begins a loader anew where it resumes."""
    import lightning as L

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch + 1 == HALF and not job.resume:
                trainer.save_checkpoint(job.path / "half.ckpt")

    if job.budget is not None:
        options["strategy"] = job.own(BaocStrategy(budget=job.budget))
    quiet = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = L.Trainer(
        max_epochs=STEPS, callbacks=[Save()], accelerator="auto", devices=1, **quiet, **options,
    )  # fmt: skip
    where = job.path / "half.ckpt" if job.resume else None
    trainer.fit(module, ckpt_path=where, weights_only=False if where else None)
    return module, trainer.callback_metrics[loss]


def one_batch(*tensors: Any) -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*tensors), batch_size=len(tensors[0]))


def lightning_autoencoder(job: Job) -> tuple[Any, Any]:
    """Lightning's first example, in bf16, clipped."""
    import lightning as L

    class Autoencoder(L.LightningModule):
        def __init__(self):
            super().__init__()
            width = job.wide(18432)
            self.encoder = nn.Sequential(nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, 64))
            self.decoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3072))

        def train_dataloader(self):
            return one_batch(job.normal(0, 64, 3072).cpu())

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=job.budget is None and job.device == "cuda")

    return fitted(job, job.made(Autoencoder), loss="train_loss", precision="bf16-mixed")


def lightning_gan(job: Job) -> tuple[Any, Any]:
    """Lightning's GAN: two optimizers that the module steps itself."""
    import lightning as L

    width, fused = job.wide(4096), job.budget is None and job.device == "cuda"
    bce = nn.functional.binary_cross_entropy_with_logits

    class GAN(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            body = [nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
            self.generator = nn.Sequential(*body, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3072))
            more = [nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
            self.discriminator = nn.Sequential(nn.Linear(3072, width), nn.LeakyReLU(0.2), *more, nn.Linear(width, 1))

        def train_dataloader(self):
            return one_batch(job.normal(0, 64, 3072).cpu())

        def training_step(self, batch, batch_idx):
            ones, zeros = torch.ones(64, 1, device=self.device), torch.zeros(64, 1, device=self.device)
            for_g, for_d = self.optimizers()
            fake = self.generator(job.normal(self.current_epoch, 64, 128))
            self.toggle_optimizer(for_g)
            loss = bce(self.discriminator(fake), ones)
            for_g.zero_grad()
            self.manual_backward(loss)
            for_g.step()
            self.untoggle_optimizer(for_g)
            self.toggle_optimizer(for_d)
            judged = bce(self.discriminator(batch[0]), ones) + bce(self.discriminator(fake.detach()), zeros)
            for_d.zero_grad()
            self.manual_backward(judged)
            for_d.step()
            self.untoggle_optimizer(for_d)
            self.log("g_loss", loss)

        def configure_optimizers(self):
            both = (self.generator, 1e-4), (self.discriminator, 2e-4)
            return [torch.optim.AdamW(m.parameters(), lr=lr, betas=(0.5, 0.999), fused=fused) for m, lr in both]

    return fitted(job, job.made(GAN), loss="g_loss")


def lightning_cli(job: Job) -> tuple[Any, Any]:
    """LightningCLI, with the strategy named in its arguments; needs jsonargparse."""
    import lightning as L
    from lightning.pytorch.cli import LightningCLI

    class Model(L.LightningModule):
        def __init__(self, width: int = 64, depth: int = 2, lr: float = 1e-4):
            super().__init__()
            self.save_hyperparameters()
            body = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
            self.net = nn.Sequential(nn.Linear(3072, width), *body, nn.Linear(width, 10))

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            fused = job.budget is None and job.device == "cuda"
            return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=fused)

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return one_batch(job.normal(0, 32, 3072).cpu(), job.whole(0, 10, 32).cpu())

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch + 1 == HALF and not job.resume:
                trainer.save_checkpoint(job.path / "half.ckpt")

    off = [f"--trainer.{name}=false" for name in ("logger", "enable_checkpointing", "enable_progress_bar")]
    sizes = [f"--model.width={job.wide(4096)}", f"--model.depth={job.deep(6)}", f"--trainer.max_epochs={STEPS}"]
    arguments = ["fit", *sizes, *off, "--trainer.devices=1"]
    if job.budget is not None:
        arguments += ["--trainer.strategy=baoc.BaocStrategy", f"--trainer.strategy.budget={job.budget}"]
    if job.resume:
        arguments += [f"--ckpt_path={job.path / 'half.ckpt'}", "--weights_only=false"]
    cli = LightningCLI(
        Model, Data, args=arguments, seed_everything_default=1, save_config_callback=None,
        trainer_defaults={"callbacks": [Save()]},
    )  # fmt: skip
    if job.budget is not None:
        job.own(cli.trainer.strategy)
    return cli.model, cli.trainer.callback_metrics["train_loss"]


def trained(job: Job, model: Any, rows: list[Any]) -> tuple[Any, Any]:
    """Hugging Face's Trainer with decay groups, accumulation, warm-up and its own checkpoints."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from baoc.integrations.hf import with_budget

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == HALF and not job.resume

    arguments = TrainingArguments(
        str(job.path), max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        learning_rate=3e-4, weight_decay=0.1, warmup_steps=2, logging_steps=4, save_strategy="no", report_to=[], seed=1,
        disable_tqdm=True,
        optim="adamw_torch_fused" if job.device == "cuda" else "adamw_torch",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Save()])
    if job.budget is not None:
        trainer = with_budget(trainer, budget=job.budget)
    trainer.train(resume_from_checkpoint=str(job.path / f"checkpoint-{HALF}") if job.resume else None)
    if job.budget is not None:
        from baoc.integrations.hf import budgeted

        job.own(budgeted(trainer.optimizer))
    return model, next(line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line)


def trainer_causal_lm(job: Job) -> tuple[Any, Any]:
    """run_clm's way: the Trainer on a GPT-2 from a config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": job.wide(1024), "n_layer": job.deep(9), "n_head": 8, "n_positions": 64}
    rows = [{"input_ids": (ids := job.whole(k, 1024, 64).cpu()), "labels": ids} for k in range(256)]
    return trained(job, job.made(lambda: GPT2LMHeadModel(GPT2Config(vocab_size=1024, **sizes))), rows)


def trainer_text_classes(job: Job) -> tuple[Any, Any]:
    """run_glue's way: the Trainer on a BERT from a config, with dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    width = job.wide(1024)
    sizes = {"hidden_size": width, "num_hidden_layers": job.deep(9), "num_attention_heads": 8}
    rows = [{"input_ids": job.whole(k, 1000, 32).cpu(), "labels": k % 2} for k in range(256)]
    config = BertConfig(vocab_size=1024, intermediate_size=4 * width, **sizes)
    return trained(job, job.made(lambda: BertForSequenceClassification(config)), rows)


def accelerate_lm(job: Job) -> tuple[Any, Any]:
    """run_clm_no_trainer's way: accelerate with bf16, accumulation, clipping, save_state and load_state, a Llama."""
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

    width = job.wide(1024)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=job.device == "cpu")
    config = LlamaConfig(
        vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=job.deep(9),
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    model = job.made(lambda: LlamaForCausalLM(config))
    plain = ("bias", "norm")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if any(k in n for k in plain) == bare],
            "weight_decay": decay,
        }
        for bare, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = job.adamw(groups, model=model, lr=3e-4)
    schedule = get_scheduler("linear", optimizer, 2, STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loss = None
    if job.resume:
        accelerator.load_state(str(job.path / "half"))
    for number in range(HALF if job.resume else 0, STEPS):
        for part in range(2):
            with accelerator.accumulate(model):
                ids = job.whole(2 * number + part, 1024, 4, 64)
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if number + 1 == HALF and not job.resume:
            accelerator.save_state(str(job.path / "half"))
    return accelerator.unwrap_model(model), loss


SCRIPTS: dict[Callable[[Job], tuple[Any, Any]], tuple[str, ...]] = {  # and the libraries that each needs
    nanogpt: (), timm_like: (), lstm: (), moe: (), encoder_decoder: (), conv: (), unfreezing: (),
    diffusion_unet: ("diffusers",), lightning_autoencoder: ("lightning",), lightning_gan: ("lightning",),
    lightning_cli: ("lightning", "jsonargparse"), trainer_causal_lm: ("transformers", "accelerate"),
    trainer_text_classes: ("transformers", "accelerate"), accelerate_lm: ("transformers", "accelerate"),
}  # fmt: skip
NAMES = {script.__name__: script for script in SCRIPTS}


# -- one process -----------------------------------------------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    """Imports, asks for the card, trains, and prints what came of it as one line of JSON."""
    for library in SCRIPTS[NAMES[options.child]]:
        __import__(library)
    print("READY", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel in ("flash", "mem_efficient", "cudnn"):  # whose backward adds in any order
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
    torch.manual_seed(0)
    budget = options.budget or None
    job = Job(budget=budget, scale=options.scale, path=options.out, resume=options.resume)
    job.device = "cuda" if torch.cuda.is_available() else "cpu"
    model, loss = NAMES[options.child](job)
    digest = hashlib.blake2b()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    told: dict[str, Any] = {
        "loss": loss.item() if isinstance(loss, torch.Tensor) else loss,
        "weights": digest.hexdigest(),
        "torch": torch.__version__,
    }
    told["parameters"] = sum(param.numel() for param in model.parameters())
    told["device"] = torch.cuda.get_device_name() if job.device == "cuda" else "cpu"
    if job.device == "cuda":
        told["context_bytes"], told["reserved_bytes"] = current_context_bytes("cuda"), torch.cuda.max_memory_reserved()
        told["peak_bytes"] = told["context_bytes"] + told["reserved_bytes"]
    narrators = [each for one in job.optimizers for each in getattr(one, "narrators", None) or [one.narrator]]
    if narrators:
        told["met"] = all(each.budget_met for each in narrators)
        told["predicted_bytes"] = max(each.plan.peak_bytes or 0 for each in narrators)
        told["state_bytes"] = int(sum(each.values()["memory/state_gib"] for each in narrators) * 2**30)
    print("\nTOLD " + json.dumps(told | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


# -- all of them -----------------------------------------------------------------------------------------------------


class Runs:
    """Starts processes; those under a memory budget run one at a time, though others import meanwhile."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder, self.alone, self.began = options, folder, threading.Lock(), time.monotonic()

    def __call__(self, name: str, tag: str, *, budget: str = "", resume: bool = False, alone: bool) -> dict[str, Any]:
        if time.monotonic() - self.began > self.options.seconds:
            return {"error": "not begun: out of time"}
        where = self.folder / f"{name}_{tag.split('-')[0]}"
        where.mkdir(exist_ok=True)
        command = [sys.executable, __file__, str(where), "--child", name, f"--scale={self.options.scale}"]
        command += [f"--budget={budget}"] * bool(budget) + ["--resume"] * resume
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, text=True, cwd=where, env=variables, **pipes)
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or (lines[-1] and lines[-1].strip() != "READY"):
            lines.append(process.stdout.readline())
        try:
            if alone:
                with self.alone:
                    rest, _ = process.communicate("\n", timeout=100)
            else:
                rest, _ = process.communicate("\n", timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            rest = process.communicate()[0] + "\nTimeoutError: took over 100 s"
        printed = "".join(lines) + rest
        (self.options.out / f"{name}_{tag}.log").write_text(printed)
        found = re.search(r"^TOLD (\{.*\})", printed, re.M)
        if found is None:
            errors = [line for line in printed.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
            return {"error": (errors or printed.strip().splitlines() or ["no word"])[-1][:300]}
        spoke = "plan for budget" in printed and re.search(r"\d+ steps, .*; budget ", printed) is not None
        return json.loads(found[1]) | {"told": spoke}


def row(name: str, budget: str, whole: dict[str, Any], again: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    found = {key: whole[key] for key in FIELDS if key in whole}
    number = whole.get("parameters", 0)
    found |= {
        "script": name,
        "budget": budget,
        "adamw_loss": plain.get("loss"),
        "adamw_peak_bytes": plain.get("peak_bytes"),
    }
    found["adamw_state_bytes"] = 8 * number
    found["resumed_equal"] = "weights" in whole and whole["weights"] == again.get("weights")
    wrong = {"AdamW": plain, "trained": whole, "resumed": again}
    found["note"] = "; ".join(f"{what}: {one['error']}" for what, one in wrong.items() if "error" in one)
    if "weights" in whole:
        limit = int(budget[:-1]) if budget.endswith("b") else None
        found["budget_bytes"] = limit if limit is not None else 2 * number  # a quarter of 8 bytes a parameter
        held = whole.get("peak_bytes") if limit is not None else whole["state_bytes"]
        found["held"] = None if held is None else held <= found["budget_bytes"]
        if limit is None:  # others were on the card meanwhile: its context is not known
            found |= {"peak_bytes": None, "predicted_bytes": None}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--budgets", nargs="*", choices=("state", "memory"), default=("state", "memory"))
    parser.add_argument("--scale", type=float, default=1.0, help="of widths; 1 has about 120M parameters")
    parser.add_argument(
        "--at-once", type=int, default=10, help="processes that import or train at state_25 side by side"
    )
    parser.add_argument("--seconds", type=float, default=215, help="no process begins later")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--budget", default="", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.child:
        child(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []

    def record(new: dict[str, Any]) -> None:
        rows.append(new)
        write_csv(options.out / "strangers.csv", rows, columns=FIELDS)

    def absent(name: str) -> str:
        return ", ".join(library for library in SCRIPTS[NAMES[name]] if find_spec(library) is None)

    for name in options.only:
        if lacking := absent(name):
            record({"script": name, "note": f"not run: {lacking} is not installed"})
    names = [name for name in options.only if not absent(name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        run = Runs(options, Path(folder))

        def by_state(name: str) -> dict[str, Any]:
            plain = run(name, "adamw", alone=False)
            if context and "reserved_bytes" in plain:
                plain["peak_bytes"] = context + plain["reserved_bytes"]
            if "state" in options.budgets:
                whole = run(name, "state", budget="state_25", alone=False)
                again = run(name, "state-resumed", budget="state_25", resume=True, alone=False)
                record(row(name, "state_25", whole, again, plain))
            return plain

        def by_memory(name: str, plain: dict[str, Any]) -> None:
            if plain.get("peak_bytes"):
                budget = f"{int(SHARE * plain['peak_bytes'])}b"
                whole = run(name, "memory", budget=budget, alone=True)
                again = run(name, "memory-resumed", budget=budget, resume=True, alone=True)
                record(row(name, budget, whole, again, plain))

        context = run(names[0], "alone", alone=True).get("context_bytes", 0)
        plains = list(pool.map(by_state, names))
        if "memory" in options.budgets:
            list(pool.map(by_memory, names, plains))
        seconds = time.monotonic() - run.began
    table(rows)
    print(f"{len(rows)} rows, {seconds:.0f} s, {options.out / 'strangers.csv'}")
    return sum(
        not (one.get("held") and one.get("resumed_equal") and one.get("told")) for one in rows if "budget" in one
    )


def table(rows: list[dict[str, Any]]) -> None:
    def mib(value: Any) -> str:
        return f"{value / 2**20:.0f}" if value else "-"

    def loss(value: Any) -> str:
        return "-" if value is None else f"{value:.3f}"

    form = "{:22}{:>10}{:>8}{:>8}{:>7}{:>8}{:>10}{:>7}{:>7}{:>6}{:>8}{:>6} {}"
    head = (
        "script", "budget", "AdamW", "loss", "peak", "AdamW's", "predicted", "limit", "state", "held", "resumed",
        "told",
    )  # fmt: skip
    print(form.format(*head, "note (MiB)"))
    for one in sorted(rows, key=lambda one: (list(NAMES).index(one["script"]), one.get("budget", "").endswith("b"))):
        budget = one.get("budget", "-")
        print(
            form.format(
                one["script"], "75 %" if budget.endswith("b") else budget,
                loss(one.get("adamw_loss")), loss(one.get("loss")),
                mib(one.get("peak_bytes")), mib(one.get("adamw_peak_bytes")), mib(one.get("predicted_bytes")),
                mib(one.get("budget_bytes")), mib(one.get("state_bytes")), str(one.get("held", "-")),
                str(one.get("resumed_equal", "-")), str(one.get("told", "-")), one.get("note", "")[:160],
            )
        )  # fmt: skip


if __name__ == "__main__":
    if "--child" in sys.argv:
        import torch
        from torch import nn

        from baoc import BaocOptimizer, BaocStrategy
        from baoc.profiling.memory import current_context_bytes
    sys.exit(main())
