"""Prediction of masked tokens (Devlin et al. 2019, arXiv 1810.04805)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.tasks.base import Task, logits_of, seed_from_key
from baoc.types import DataSpec, TextDataSpec

_MASK_SHARE, _RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the others do not change


class MaskedTask(Task):
    """Cross-entropy in float32 of `share` of the tokens of batches `{"tokens"}` (B, T), judged by val/loss.

    Of the chosen tokens 80 % become the mask token of `spec` and 10 % a random token. In training the choice follows
    from the step and the micro-batch; in validation from the number of the sample, so that it is the same at every
    batch size, and val/loss is the mean over all chosen tokens.
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
        self._mask_token, self._vocabulary = spec.mask_token, spec.vocab_size
        self._num_validated = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens = batch["tokens"]
        draws = self._draws(tokens.shape, key=f"train {self.global_step} {batch_idx}")
        loss, _ = self._loss(tokens, draws)
        self.log("train/loss", loss.detach(), prog_bar=True, sync_dist=True, batch_size=len(tokens))
        return loss

    def on_validation_epoch_start(self) -> None:
        self._num_validated = 0

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tokens = batch["tokens"]
        start, self._num_validated = self._num_validated, self._num_validated + len(tokens)
        draws = [self._draws(tokens.shape[1:], key=f"val {number}") for number in range(start, self._num_validated)]
        loss, num_chosen = self._loss(tokens, torch.stack(draws, dim=1))
        self.log("val/loss", loss, prog_bar=True, batch_size=int(num_chosen))

    def _loss(self, tokens: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(mean loss over the chosen tokens, their number)."""
        inputs, chosen = self.mask_tokens(tokens, draws)
        logits = logits_of(self.model(inputs), task="masked", shape="(B, T, vocabulary)")
        losses = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="none")
        return (losses * chosen.flatten()).sum() / chosen.sum().clamp(min=1), chosen.sum()

    def _draws(self, shape: torch.Size, *, key: str) -> Tensor:
        """Uniform numbers (3, *shape) in [0, 1), the same on every device and in every precision of the network."""
        generator = torch.Generator().manual_seed(seed_from_key(f"{self._seed} {key}"))
        return torch.rand((3, *shape), generator=generator, dtype=torch.float32, device="cpu")

    def mask_tokens(self, tokens: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs (B, T) int64 with masks in, chosen (B, T) bool: the positions that count), by `draws` (3, B, T)."""
        choice, kind, token = draws.to(tokens.device)
        chosen = choice < self._share
        inputs = tokens.masked_fill(chosen & (kind < _MASK_SHARE), self._mask_token)
        randomised = chosen & (kind >= _MASK_SHARE) & (kind < _MASK_SHARE + _RANDOM_SHARE)
        return inputs.where(~randomised, (token * self._vocabulary).long()), chosen
