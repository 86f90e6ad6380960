"""The language task: loss, bits per byte, perplexity, and the loss that goes through the head part by part."""

import math

import pytest
import torch
from torch.nn import functional as F

from baoc.errors import BadInputError
from baoc.models import build_model
from baoc.tasks import build_task
from baoc.tasks.language import LanguageTask
from baoc.types import TextDataSpec
from tests.support.tiny import tiny_trainer

SPEC = TextDataSpec(
    dataset="x", vocab_size=40, sequence_length=8, num_train=9, num_val=9, bytes_per_token=2.5, sha256=""
)


def model(seed: int = 0):
    return build_model("llama", spec=SPEC, seed=seed)


def batch(size: int = 4, *, seed: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 40, (size, 9), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class Batches:
    """Batches in a row; a list would be several loaders to Lightning."""

    def __init__(self, *batches: dict[str, torch.Tensor]):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def step(task: LanguageTask, given: dict[str, torch.Tensor]) -> torch.Tensor:
    task.log = lambda *_, **__: None
    return task.training_step(given, 0)


def test_loss_is_the_mean_over_all_tokens_of_the_next_one():
    network, given = model(), batch()
    loss = step(LanguageTask(network), given)
    logits = network(given["tokens"])
    expected = -logits.log_softmax(-1).gather(-1, given["targets"][..., None]).mean()
    torch.testing.assert_close(loss, expected)
    assert abs(loss.item() - math.log(40)) < 0.1


def test_loss_is_computed_in_float32():
    network = model().bfloat16()
    loss = step(LanguageTask(network), batch())
    assert loss.dtype == torch.float32
    logits = network(batch()["tokens"]).flatten(0, 1)
    assert loss == F.cross_entropy(logits.float(), batch()["targets"].flatten())


@pytest.mark.parametrize("chunk", [5, 100])
def test_chunked_loss_and_its_gradients_are_those_of_the_whole(chunk):
    whole, parts = model(), model()
    given = batch()
    one, other = step(LanguageTask(whole), given), step(LanguageTask(parts, loss_chunk=chunk), given)
    torch.testing.assert_close(one, other)
    one.backward()
    other.backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_chunked_loss_never_holds_all_logits():
    network, sizes = model(), []
    network.head.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape)))
    step(LanguageTask(network, loss_chunk=8), batch()).backward()
    assert sizes == [(8, 40)] * 8  # four parts, each computed again in the backward pass


def test_validation_logs_bits_per_byte_and_the_perplexity_of_the_mean_loss():
    task = LanguageTask(model(), spec=SPEC)
    batches = [batch(4, seed=1), batch(4, seed=2), batch(1, seed=3)]
    logged = tiny_trainer().validate(task, Batches(*batches), verbose=False)[0]
    with torch.no_grad():
        losses = [F.cross_entropy(task.model(b["tokens"]).flatten(0, 1), b["targets"].flatten()) for b in batches]
    mean = sum(loss.item() * len(b["tokens"]) for loss, b in zip(losses, batches, strict=True)) / 9
    assert logged["val/loss"] == pytest.approx(mean, rel=1e-5)
    assert logged["val/ppl"] == pytest.approx(math.exp(mean), rel=1e-5)
    assert logged["val/bpb"] == pytest.approx(mean / math.log(2) / 2.5, rel=1e-5)
    assert set(logged) == {"val/loss", "val/ppl", "val/bpb"}
    again = tiny_trainer().validate(task, Batches(batches[0]), verbose=False)[0]
    assert again["val/ppl"] == pytest.approx(math.exp(losses[0].item()), rel=1e-5)


def test_a_batch_without_tokens_is_told_even_where_it_has_positions():
    task, given = LanguageTask(model()), batch()
    with pytest.raises(KeyError, match="tokens"):
        task.validation_step({"positions": given["tokens"], "targets": given["targets"]}, 0)


def test_quality_is_bits_per_byte_and_less_is_better():
    assert LanguageTask.quality == ("val/bpb", False)
    assert LanguageTask(model()).bytes_per_token == 1.0


def test_checkpoint_rebuilds_the_task(tmp_path):
    task = build_task("language", model=model(), spec=SPEC, loss_chunk=4)
    trainer = tiny_trainer(max_steps=2)
    trainer.fit(task, Batches(batch(), batch()), Batches(batch()))
    trainer.save_checkpoint(tmp_path / "task.ckpt")
    held = torch.load(tmp_path / "task.ckpt", weights_only=True)
    assert held["hyper_parameters"]["loss_chunk"] == 4
    assert set(held["state_dict"]) == {f"model.{name}" for name in task.model.state_dict()}
    again = LanguageTask.load_from_checkpoint(tmp_path / "task.ckpt", model=model(1), spec=SPEC, weights_only=True)
    assert (again.loss_chunk, again.bytes_per_token) == (4, 2.5)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), task.parameters(), strict=True))


def test_impossible_chunks_are_refused():
    with pytest.raises(BadInputError, match=r"loss_chunk must be 0 \(all at once\) or a number of tokens, not -1"):
        LanguageTask(model(), loss_chunk=-1)
    with pytest.raises(BadInputError, match="loss_chunk=4 needs a model with `features` and `head`"):
        LanguageTask(torch.nn.Identity(), loss_chunk=4)
    network = model()
    network.net.config.model_type = "gemma2"
    with pytest.raises(BadInputError, match=r"task.loss_chunk is not known to be right for a model of type gemma2"):
        step(LanguageTask(network, loss_chunk=4), batch())
