"""What else trains all parameters of Llama 1.3B in 8 GiB, 3.4B in 16 and 6.7B in 24: other optimizers, the same cap.

    python experiments/benchmarks/llama_peers.py OUT  # 3 minutes (--seconds) of an H200 -> llama_peers.csv

The runs to stand beside are `python run.py experiments=llama_1b_8gb` and its siblings, of which
`budget_ratio.py OUT --only llama_1b_8gb ...` makes rows.

Each peer trains the network of those experiments (transformers' Llama, bf16 between layers) on the same tokens in the
same order, 8 sequences of 1,024 a step, in a process of its own whose allocator may hold the cap and no more
(`torch.cuda.set_per_process_memory_fraction`; the CUDA context is not counted, which favours peers by .5 GiB). All
recompute every layer and make logits of 1,024 tokens at a time. A peer that cannot release gradients accumulates over
micro-batches of 8, 4, 2 or 1 sequences, the largest that fits; what fits in none is a row that says so. Packages that
are not installed are rows, too.

APOLLO (arXiv 2412.05270, algorithm 1, rank 256, scaling by channel) and AdaLomo (arXiv 2310.10195, algorithm 1) are our
own, as short as their papers give them, with gradients released in backward, which both allow.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from baoc.tracking.files import write_csv

BATCH, LENGTH = 8, 1024
CASES = {"1b": 8, "3b": 16, "7b": 24}  # size -> GiB
RATES = {"1b": 4e-4, "3b": 3e-4, "7b": 3e-4}
Row = dict[str, object]
# What steps weights: `step` after backward, or `released` in it, one parameter at a time.
Make = Callable[[Sequence[nn.Parameter], float], Any]


class Apollo:
    """AdamW in a random space of `rank` numbers a channel; its norms scale the gradient's channels."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, *, rank: int = 256, refresh: int = 200):
        self.lr, self.rank, self.refresh = lr, rank, refresh
        self.state: dict[nn.Parameter, dict[str, Any]] = {p: {"step": 0, "seed": i} for i, p in enumerate(params)}

    @torch.no_grad()
    def release(self, param: nn.Parameter) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        state["step"] += 1
        update = self._adam(grad.float(), state) if grad.ndim < 2 else self._scaled(grad, state)
        param.add_(update.to(param.dtype), alpha=-self.lr)
        param.grad = None

    def _scaled(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        wide = grad.shape[0] <= grad.shape[1]
        g = (grad if wide else grad.mT).float()  # channels are columns
        random = torch.Generator(grad.device).manual_seed(1000 * state["seed"] + state["step"] // self.refresh)
        rank = min(self.rank, len(g))
        low = torch.randn(rank, len(g), generator=random, device=g.device).div_(rank**0.5) @ g
        scale = torch.linalg.vector_norm(self._adam(low, state), dim=0) / torch.linalg.vector_norm(low, dim=0).add(1e-8)
        update = g * scale
        return update if wide else update.mT

    @staticmethod
    def _adam(g: Tensor, state: dict[str, Any], *, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
        m, v = (state.setdefault(name, torch.zeros_like(g)) for name in "mv")
        m.lerp_(g, 1 - betas[0])
        v.lerp_(g * g, 1 - betas[1])
        step = state["step"]
        return m / (1 - betas[0] ** step) / (v / (1 - betas[1] ** step)).sqrt_().add_(1e-8)


class AdaLomo:
    """The gradient over the root of its factored second moment, clipped to RMS 1, times the RMS of the weights."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, *, beta: float = 0.999):
        self.lr, self.beta = lr, beta
        self.state: dict[nn.Parameter, dict[str, Any]] = {p: {"step": 0} for p in params}

    @torch.no_grad()
    def release(self, param: nn.Parameter) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        g = grad.float()
        state["step"] += 1
        square, undo = g * g, 1 - self.beta ** state["step"]
        if g.ndim < 2:
            v = state.setdefault("v", torch.zeros_like(g)).lerp_(square, 1 - self.beta) / undo
        else:
            row = state.setdefault("row", torch.zeros_like(g[:, 0])).lerp_(square.mean(1), 1 - self.beta)
            col = state.setdefault("col", torch.zeros_like(g[0])).lerp_(square.mean(0), 1 - self.beta)
            v = torch.outer(row, col).div_(row.mean().clamp(min=1e-30) * undo)
        update = g.div_(v.sqrt_().add_(1e-8))
        update /= update.square().mean().sqrt().clamp(min=1.0)
        size = param.float().square().mean().sqrt().clamp(min=1e-3)
        param.add_(update.mul_(size).to(param.dtype), alpha=-self.lr)
        param.grad = None


class Released:
    """An optimizer for each parameter, stepped when its gradient has come, as torch's tutorial has it."""

    def __init__(self, params: Sequence[nn.Parameter], make: Callable[[nn.Parameter], Any]):
        self.optimizers = {param: make(param) for param in params}

    def release(self, param: nn.Parameter) -> None:
        self.optimizers[param].step()
        self.optimizers[param].zero_grad()


def of_package(package: str, make: Callable[[Any, Sequence[nn.Parameter], float], Any]) -> Make:
    return lambda params, lr: make(import_module(package), params, lr)


# name -> dtype of the weights, how it is made, and whether it releases gradients
PEERS: dict[str, tuple[torch.dtype, Make, bool]] = {
    "torch AdamW, fp32 weights": (torch.float32, lambda ps, lr: torch.optim.AdamW(ps, lr=lr, fused=True), False),
    "torch AdamW, bf16 weights and states": (
        torch.bfloat16, lambda ps, lr: torch.optim.AdamW(ps, lr=lr, fused=True), False),
    "bitsandbytes AdamW8bit, bf16 weights": (
        torch.bfloat16, of_package("bitsandbytes", lambda bnb, ps, lr: bnb.optim.AdamW8bit(ps, lr=lr)), False),
    "bitsandbytes PagedAdamW8bit, bf16 weights": (
        torch.bfloat16, of_package("bitsandbytes", lambda bnb, ps, lr: bnb.optim.PagedAdamW8bit(ps, lr=lr)), False),
    "torchao CPU offload of AdamW, bf16 weights": (
        torch.bfloat16,
        of_package("torchao.optim", lambda ao, ps, lr: ao.CPUOffloadOptimizer(
            ps, torch.optim.AdamW, offload_gradients=True, lr=lr, fused=True)), False),
    "flashoptim AdamW, 8-bit states, bf16+8": (
        torch.bfloat16,
        of_package("flashoptim", lambda flash, ps, lr: flash.FlashAdamW(
            ps, lr=lr, quantize=True, master_weight_bits=24)), False),
    "flashoptim AdamW, 8-bit states, bf16+8, released": (
        torch.bfloat16,
        of_package("flashoptim", lambda flash, ps, lr: Released(ps, lambda p: flash.FlashAdamW(
            [p], lr=lr, quantize=True, master_weight_bits=24))), True),
    "APOLLO rank 256 (own), bf16 weights, released": (torch.bfloat16, Apollo, True),
    "AdaLomo (own), bf16 weights, released": (torch.bfloat16, AdaLomo, True),
}  # fmt: skip


def build(size: str, dtype: torch.dtype, device: str) -> nn.Module:
    """The experiment's network, made on the device in `dtype`, its layers recomputed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from baoc.models import choose_size

    shape = choose_size("llama", size=size).size.settings
    shapes: dict[str, Any] = dict(
        vocab_size=32000, hidden_size=shape["width"], intermediate_size=shape["hidden"], use_cache=False,
        num_hidden_layers=shape["depth"], num_attention_heads=shape["heads"], max_position_embeddings=LENGTH,
        attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    config = LlamaConfig(**shapes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, logits of one sequence at a time, which backward makes again."""
    from torch.utils.checkpoint import checkpoint

    def part(features: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(features).float(), wanted, reduction="sum")

    features = model.model(input_ids=tokens).last_hidden_state
    parts = [checkpoint(part, f, t, use_reentrant=False) for f, t in zip(features, targets, strict=True)]
    return torch.stack(parts).sum() / targets.numel()


def train(size: str, peer: str, batches: Sequence[tuple[Tensor, Tensor]], *, steps: int, device: str) -> Row:
    """Steps of the largest micro-batch that fits."""
    dtype, make, releases = PEERS[peer]
    torch.manual_seed(0)
    model = build(size, dtype, device)
    params = list(model.parameters())
    optimizer = make(params, RATES[size])
    if releases:
        for param in params:
            param.register_post_accumulate_grad_hook(optimizer.release)
    micro, done = BATCH, False
    while not done:
        times, losses = [], []
        try:
            for index in range(steps):
                began = time.perf_counter()
                losses.append(step(model, optimizer, batches[index], micro=micro, releases=releases, device=device))
                times.append(time.perf_counter() - began)
            done = True
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
            if micro == 1 or releases:
                raise
            micro //= 2
            torch.cuda.empty_cache()
    seconds = median(times[2:] or times)
    return {
        "micro_batch": micro, "step_ms": f"{1e3 * seconds:.1f}", "tokens_per_s": f"{BATCH * LENGTH / seconds:.0f}",
        "peak_gib": f"{torch.cuda.max_memory_reserved() / 2**30:.2f}" if device == "cuda" else "",
        "first_loss": f"{losses[0]:.3f}", "last_loss": f"{losses[-1]:.3f}", "steps": len(losses),
        "flops_ms": f"{1e3 * floor_s(model):.1f}",
    }  # fmt: skip


def floor_s(model: nn.Module) -> float:
    """Seconds of a step's products at 770 TFLOP/s, what an H200's largest product reached: 6 per weight and token, and
    2 for the recomputed pass."""
    return 8 * sum(p.numel() for p in model.parameters() if p.ndim > 1) * BATCH * LENGTH / 770e12


def step(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], *, micro: int, releases: bool,
         device: str) -> float:  # fmt: skip
    total = 0.0
    for tokens, targets in zip(*(part.to(device).split(micro) for part in batch), strict=True):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(model, tokens, targets) * (micro / BATCH)
        loss.backward()
        total += loss.detach()
    if not releases:
        optimizer.step()
        optimizer.zero_grad()
    return float(total)  # waits for the device


def tokens(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The batches that a run of the experiments has first."""
    from baoc.data import build_data

    data = build_data(
        "pysource", task="language", path=None, batch_size=BATCH, accumulate=1, seed=0, tokenizer="bpe",
        vocab_size=32000, sequence_length=LENGTH, val_fraction=0.05, max_val_sequences=16, text_column="text",
        pattern=None,
    )  # fmt: skip
    data.setup("fit")
    found = cycle(data.train_dataloader())
    return [(batch["tokens"], batch["targets"]) for batch in (next(found) for _ in range(steps))]


def child(size: str, peer: str, batches: Sequence[tuple[Tensor, Tensor]], *, steps: int, told: Path) -> None:
    row: Row = {}
    try:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CASES[size] * 2**30 / total)
        row = train(size, peer, batches, steps=steps, device="cuda")
    except torch.OutOfMemoryError:
        row = {"why": f"does not fit {CASES[size]} GiB"}
    except ImportError as error:
        row = {"why": f"not installed: {error}"}
    except Exception as error:
        row = {"why": f"{type(error).__name__}: {str(error)[:200]}"}
    told.write_text(json.dumps(row))


def in_a_process(size: str, peer: str, batches: Sequence[tuple[Tensor, Tensor]], *, steps: int, seconds: float,
                 folder: Path) -> Row:  # fmt: skip
    told = folder / f"{size}.json"
    told.unlink(missing_ok=True)
    pid = os.fork()  # before transformers is imported: it imports torchao where it is there, which enters CUDA
    if pid == 0:
        child(size, peer, batches, steps=steps, told=told)
        os._exit(0)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"why": f"cut after {seconds:.0f} s"}
        time.sleep(0.1)
    return json.loads(told.read_text()) if told.is_file() else {"why": "ended without a word"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=170.0, help="of all cases; those after are left out")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.seconds
    batches, rows = tokens(asked.steps), []
    columns = ("size", "cap_gib", "peer", "tokens_per_s", "step_ms", "flops_ms", "micro_batch", "peak_gib",
               "first_loss", "last_loss", "steps", "why", "torch")  # fmt: skip
    for size in asked.only:
        for peer in asked.peers:
            left = end - time.monotonic()
            found = {"why": "no time was left"} if left < 8 else in_a_process(
                size, peer, batches, steps=asked.steps, seconds=min(left, 60), folder=asked.out
            )  # fmt: skip
            rows.append({"size": size, "cap_gib": CASES[size], "peer": peer, "torch": torch.__version__, **found})
            write_csv(asked.out / "llama_peers.csv", rows, columns=columns)
            print(" | ".join(str(rows[-1].get(key, "")) for key in columns[:-1]), flush=True)


if __name__ == "__main__":
    main()
