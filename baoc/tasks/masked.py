"""Prediction of masked tokens (Devlin et al. 2019, arXiv 1810.04805)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.tasks.base import Task, logits_of, seed_from_key
from baoc.types import DataSpec, TextDataSpec

_REPLACED, _RANDOM = 0.8, 0.1  # of the chosen tokens: by the mask token, by any token; the rest stays


class MaskedTask(Task):
    """Cross-entropy in float32 of `share` of the tokens of batches `{"tokens"}` (B, T), judged by val/loss.

    Of the chosen tokens 80 % become the mask token of `spec`, 10 % any token. What is chosen in training follows from
    the step and the micro-batch, in validation from the batch alone, so that every run is judged by the same tokens.
    """

    quality: ClassVar[tuple[str, bool]] = ("val/loss", False)
    task_family = "language"

    def __init__(
        self,
        model: nn.Module,
        *,
        spec: DataSpec | None = None,
        share: float = 0.15,
        mask_seed: int = 0,
        ema_decay: float = 0.0,
        **base: Any,
    ):
        if not 0 < share < 1:
            raise BadInputError(f"task.share must lie between 0 and 1, not {share}; 0.15 masks one token in seven")
        if not isinstance(spec, TextDataSpec) or spec.mask_token is None:
            raise BadInputError(
                "task=masked needs text whose tokenizer has a mask token: set dataset.tokenizer=model with model=hf, "
                "or the folder of such a tokenizer"
            )
        options = {"share": float(share), "mask_seed": int(mask_seed), "ema_decay": float(ema_decay)}
        super().__init__(model, spec=spec, **options, **base)
        self._share, self._seed = float(share), int(mask_seed)
        self._mask, self._vocabulary = spec.mask_token, spec.vocab_size

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch["tokens"], key=f"train {self.global_step} {batch_idx}")
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self._loss(batch["tokens"], key=f"val {batch_idx}")
        self.log("val/loss", loss, prog_bar=True, batch_size=len(batch["tokens"]))

    def _loss(self, tokens: Tensor, *, key: str) -> Tensor:
        given, chosen = self.masked(tokens, key=key)
        logits = logits_of(self.model(given), task="masked", shape="(B, T, vocabulary)")
        losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none")
        return (losses * chosen.flatten()).sum() / chosen.sum().clamp(min=1)

    def masked(self, tokens: Tensor, *, key: str) -> tuple[Tensor, Tensor]:
        """The masked inputs, and the tokens to predict. Drawn on the CPU, alike on every device."""
        generator = torch.Generator().manual_seed(seed_from_key(f"{self._seed} {key}"))
        draw, kind = (torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device) for _ in range(2))
        any_token = torch.randint(self._vocabulary, tokens.shape, generator=generator, device="cpu").to(tokens.device)
        chosen = draw < self._share
        given = tokens.where(~(chosen & (kind < _REPLACED)), torch.full_like(tokens, self._mask))
        replaced = chosen & (kind >= _REPLACED) & (kind < _REPLACED + _RANDOM)
        return given.where(~replaced, any_token), chosen
