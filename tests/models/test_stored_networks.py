"""model=hf: stored causal and masked language models and image classifiers are fine-tuned on text, chat and images."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from baoc.cli.main import main
from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.models import build_model
from baoc.models.chat import ChatTokenizer, Conversation
from baoc.models.hf import ImageClassifier, MaskedLM
from baoc.models.llama import CausalLM
from baoc.tasks import build_task
from baoc.types import IGNORE_INDEX, ImageDataSpec, TextDataSpec
from tests.support.stored import TEMPLATE, save_bert, save_llama, save_tokenizer, save_vit

pytestmark = pytest.mark.usefixtures("own_logging")  # runs leave their handlers open

TEXT = TextDataSpec(dataset="x", vocab_size=261, sequence_length=16, num_train=9, num_val=9, mask_token=1)
SHORT = ["trainer.max_steps=2", "budget=state_25", "trainer.enable_progress_bar=false", "batch_size=4", "device=cpu"]
SHORT += ["trainer.limit_val_batches=1"]
CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cde"}]


def images(*, classes: int = 10) -> ImageDataSpec:
    return ImageDataSpec(dataset="x", image_size=8, channels=1, num_classes=classes, num_train=9, num_val=9)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    for name, save in (("llama", save_llama), ("bert", save_bert)):
        save_tokenizer(save(folder / name))
    save_vit(folder / "vit")
    lines = [{"messages": CHAT * (1 + number % 3)} for number in range(20)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 60)
    return folder


# -- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spec", "kind"), [("llama", TEXT, CausalLM), ("bert", TEXT, MaskedLM), ("vit", images(), ImageClassifier)]
)
def test_what_is_stored_is_what_is_trained(name, spec, kind, stored):
    model = build_model("hf", spec=spec, pretrained=str(stored / name))
    assert type(model) is kind and model.training and len(model.checkpoint_units) == 2
    again = type(model.net).from_pretrained(stored / name)
    assert all(torch.equal(a, b) for a, b in zip(model.net.parameters(), again.parameters(), strict=True))
    with torch.device("meta"):
        absent = build_model("hf", spec=spec, pretrained=str(stored / name))
    assert {p.device.type for p in absent.parameters()} == {"meta"}


def test_a_new_head_has_as_many_classes_as_the_data_and_the_rest_is_stored(stored):
    model = build_model("hf", spec=images(classes=3), pretrained=str(stored / "vit"), new_head=True)
    old = build_model("hf", spec=images(), pretrained=str(stored / "vit"))
    assert model.net.classifier.weight.shape == (3, 32)
    assert torch.equal(model.net.vit.layernorm.weight, old.net.vit.layernorm.weight)


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        (None, TEXT, "model=hf needs model.pretrained: give the folder that save_pretrained wrote"),
        ("/nowhere/at/all", TEXT, "model.pretrained=/nowhere/at/all does not exist"),
        ("vit/config.json", images(), "config.json is a file: give the folder"),
        ("", TEXT, "there is no config.json in"),
        ("vit", images(classes=3), "has a head for 10 classes, the data has 3: set model.new_head=true"),
        ("vit", TEXT, "is of type vit, which reads no text"),
        ("llama", images(), "is of type llama, of which transformers has no image classifier"),
        (
            "llama",
            TextDataSpec(dataset="x", vocab_size=999, sequence_length=16, num_train=9, num_val=9),
            "knows 300 tok",
        ),
        ("llama", TextDataSpec(dataset="x", vocab_size=99, sequence_length=99, num_train=9, num_val=9), "64 positions"),
    ],
)
def test_what_does_not_fit_is_told(name, spec, said, stored):
    given = None if name is None else name if name.startswith("/") else str(stored / name)
    with pytest.raises(BadInputError) as caught:
        build_model("hf", spec=spec, pretrained=given)
    assert said in str(caught.value)


# -- conversations ----------------------------------------------------------------------------------------------------


def words_of(one: Conversation, folder: Path) -> list[str]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(list(one.tokens))


def test_only_the_answers_of_a_conversation_are_learned(stored):
    library = ChatTokenizer(str(stored / "llama"))
    one = library.encode({"messages": CHAT}, where="line 1")
    words = words_of(one, stored / "llama")
    assert words == ["<user>", "a", "b", "</s>", "<assistant>", "c", "d", "e", "</s>"]
    assert list(one.answer_mask) == [False] * 5 + [True] * 4 and one.num_bytes == 3
    twice = library.encode({"messages": CHAT * 2}, where="line 1")
    assert list(twice.answer_mask) == ([False] * 5 + [True] * 4) * 2


@pytest.mark.parametrize(
    "sample",
    [
        {"prompt": "ab", "completion": "cde"},
        {"instruction": "ab", "input": "", "output": "cde"},
        {"instruction": "ab", "input": None, "output": "cde"},
        {"prompt": "ab", "completion": "cde", "instruction": "d", "output": "a"},
        {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "cde"}]},
        {"conversations": CHAT, "id": 3},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    ],
    ids=["texts", "Alpaca", "null", "texts first", "ShareGPT", "conversations", "TRL"],
)
def test_every_usual_form_of_a_conversation_is_read_alike(sample, stored):
    library = ChatTokenizer(str(stored / "llama"))
    assert library.encode(sample, where="line 1") == library.encode({"messages": CHAT}, where="line 1")


BEFORE = [{"role": "system", "content": "b"}, {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]


@pytest.mark.parametrize(
    ("sample", "turns"),
    [
        ({"system": "b", "messages": CHAT}, [*BEFORE[:1], *CHAT]),
        ({"system": "b", "conversations": [{"from": "Human", "value": "ab"}, {"from": "chatgpt", "value": "cde"}]},
         [*BEFORE[:1], *CHAT]),
        ({"system": "b", "history": [["d", "e"]], "instruction": "ab", "output": "cde"}, [*BEFORE, *CHAT]),
        ({"system": "", "history": [], "instruction": "ab", "output": "cde"}, CHAT),
        ({"messages": [*BEFORE, *CHAT], "tools": "[]"}, [*BEFORE, *CHAT]),
    ],
    ids=["Anthropic", "ShareGPT", "Alpaca", "empty", "tools as text"],
)  # fmt: skip
def test_what_stands_beside_the_turns_comes_before_them(sample, turns, stored):
    library = ChatTokenizer(str(stored / "llama"))
    assert library.encode(sample, where="line 1") == library.encode({"messages": turns}, where="line 1")


def test_an_answer_of_no_weight_is_not_learned_and_the_template_is_given_tools(tmp_path):
    template = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + TEMPLATE
    library = ChatTokenizer(str(save_tokenizer(tmp_path, template=template)))
    light = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[0], {**CHAT[1], "weight": 1}]
    one = library.encode({"messages": light, "tools": [{"name": "f"}]}, where="line 1")
    assert list(one.answer_mask) == [False] * (1 + 9 + 5) + [True] * 4 and one.num_bytes == 3
    assert words_of(one, tmp_path)[:2] == ["f", "<user>"]


def test_without_a_template_prompt_and_completion_are_joined(tmp_path):
    library = ChatTokenizer(str(save_tokenizer(tmp_path, template=None)))
    one = library.encode({"prompt": "ab", "completion": "c"}, where="line 1")
    assert words_of(one, tmp_path) == ["a", "b", "c", "</s>"]
    assert list(one.answer_mask) == [False, False, True, True]
    with pytest.raises(BadInputError, match="has no chat template, and line 1 has messages"):
        library.encode({"messages": CHAT}, where="line 1")
    with pytest.raises(BadInputError, match="has no chat template, and line 1 has messages"):
        library.encode({"system": "b", "prompt": "ab", "completion": "c"}, where="line 1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "bad.jsonl, line 2: no JSON object per line"),
        ("[1]", "bad.jsonl, line 2 is a list"),
        ('{"text": "a"}', "`messages` .or `conversations`. nor the texts .* `output`., but text: rename"),
        ('{"conversations": [{"from": "human", "value": "a"}]}', "has no message of the role assistant"),
        ('{"conversations": [{"from": "gpt", "text": "a"}]}', "the `content` of message 0 must be text, not None"),
        ('{"conversations": "a"}', "`messages` must be a list of"),
        ('{"prompt": "a", "completion": ["b"]}', r"`completion` must be text, not \['b'\]"),
        ('{"prompt": null, "completion": "a"}', "`prompt` must be text, not None .JSON's null is None."),
        ('{"prompt": "a", "output": "b"}', "nor the texts .* but prompt, output: rename"),
        ('{"instruction": "a", "output": null}', "line 2: `output` must be text, not None .JSON's null is None."),
        ('{"instruction": null, "output": "a"}', "line 2: `instruction` must be text, not None"),
        ('{"instruction": ["a"], "output": "a"}', r"`instruction` must be text, not \['a'\]"),
        ('{"instruction": "a", "input": {"b": 1}, "output": "a"}', "`input` must be text, not {'b': 1}"),
        ('{"instruction": "a", "input": [], "output": "a"}', r"`input` must be text, not \[\]"),
        ('{"messages": "a"}', "`messages` must be a list of"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of the role assistant, but of user, so"),
        ('{"instruction": "a", "output": "b", "history": ["q"]}', "`messages` must be a list of"),
        ('{"n": ' + "9" * 5000 + "}", "bad.jsonl, line 2: no JSON object per line .* .Exceeds the limit"),
        ("[" * 100_000, "bad.jsonl, line 2: no JSON object per line .* .maximum recursion depth"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "the `content` of message 0 must be text, not None"),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "the `content` of message 0 must be text, not 5"),
    ],
)
def test_a_faulty_line_is_named(line, said, stored, tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n" + line)
    with pytest.raises(BadInputError, match=said):
        chat(tmp_path / "bad.jsonl", stored)


def test_lines_are_read_as_people_have_them(stored, tmp_path, caplog):
    """Marks of byte order, blank lines, line separators in texts, gzip, hidden files; a wrong path is told first."""
    answer = {"role": "assistant", "content": "c\u2028d"}
    line = json.dumps({"messages": [CHAT[0], answer]}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{line}\n\n{line}\n".encode())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{line}\n".encode()))
    (tmp_path / ".c.jsonl").write_text("no JSON")
    (tmp_path / "validation.json").write_text("{}")
    data = chat(tmp_path, stored, val_fraction=0.5)
    assert len(data.train_source) == len(data.val_source) == 1, "of four conversations"
    assert "1 .json files beside JSON lines are left out, such as validation.json" in caplog.text
    with pytest.raises(BadInputError, match=r"gone\.jsonl does not exist: give FILE\.jsonl"):
        chat(tmp_path / "gone.jsonl", Path("no tokenizer there"))


def chat(path: Path, stored: Path, **options):
    given = {"tokenizer": str(stored / "llama"), "sequence_length": 32, **options}
    return build_data("chat", task="language", batch_size=2, path=str(path), **given)


def test_conversations_are_packed_and_each_is_read_by_itself(stored):
    """What the network says of a conversation in a packed row is what it says of it alone."""
    data = chat(stored / "chat.jsonl", stored)
    model = build_model("hf", spec=data.spec, pretrained=str(stored / "llama")).eval()
    batch = next(iter(data.make_train_loader(limit=None)))
    starts = (batch["positions"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1, "two conversations or one and padding"
    with torch.no_grad():
        packed = model(batch["tokens"], batch["positions"])[0]
        for start, end in zip(starts, [*starts[1:], 32], strict=True):
            alone = model(batch["tokens"][:1, start:end])[0]
            torch.testing.assert_close(packed[start:end], alone, atol=1e-5, rtol=1e-4)


def test_the_loss_is_the_mean_over_answers_in_one_piece_and_in_parts(stored):
    data = chat(stored / "chat.jsonl", stored)
    model = build_model("hf", spec=data.spec, pretrained=str(stored / "llama"))
    batch = next(iter(data.make_train_loader(limit=None)))
    kept = batch["targets"] != IGNORE_INDEX
    assert 0 < kept.sum() < kept.numel()
    logits = model(batch["tokens"], batch["positions"])
    wanted = torch.nn.functional.cross_entropy(logits[kept].float(), batch["targets"][kept])
    for chunk in (0, 5):
        task = build_task("language", model=model, spec=data.spec, loss_chunk=chunk)
        task.log = lambda *_, **__: None
        torch.testing.assert_close(task.training_step(batch, 0), wanted)


def test_masked_tokens_are_the_only_ones_that_count(stored):
    model = build_model("hf", spec=TEXT, pretrained=str(stored / "bert")).eval()
    task = build_task("masked", model=model, spec=TEXT, share=0.5)
    tokens = torch.arange(2 * 16).view(2, 16) + 100
    draws = torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(0))
    inputs, chosen = task.mask_tokens(tokens, draws)
    assert torch.equal(inputs[~chosen], tokens[~chosen]) and (inputs == 1).sum() > 4
    random = chosen & (inputs != 1) & (inputs != tokens)
    assert random.any() and inputs[random].max() < TEXT.vocab_size
    with pytest.raises(BadInputError, match="needs text whose tokenizer has a mask token"):
        build_task("masked", model=model, spec=images())


def test_masks_do_not_depend_on_the_precision_of_the_network(stored):
    model = build_model("hf", spec=TEXT, pretrained=str(stored / "bert")).eval()
    task = build_task("masked", model=model, spec=TEXT, share=0.5)
    task.log = lambda *_, **__: None
    inputs: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    for dtype in (torch.float32, torch.bfloat16):  # "bf16-true" makes it the default as well
        torch.set_default_dtype(dtype)
        try:
            task.on_validation_epoch_start()
            task.to(dtype).validation_step({"tokens": torch.arange(2 * 16).view(2, 16) + 100}, 0)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*inputs)


@pytest.mark.parametrize("share", [0.3, 0.05])  # of the latter some rows have no chosen token
def test_validation_by_masked_tokens_does_not_depend_on_the_batch_size(stored, share: float):
    model = build_model("hf", spec=TEXT, pretrained=str(stored / "bert")).eval()
    task = build_task("masked", model=model, spec=TEXT, share=share)
    tokens = torch.arange(5 * 16).view(5, 16) + 100

    def validated(batch_size: int) -> float:
        """Lightning's mean of what is logged, weighted by its `batch_size`."""
        logged: list[tuple[float, int]] = []
        task.log = lambda _, value, **how: logged.append((float(value), how["batch_size"]))
        task.on_validation_epoch_start()
        for number, part in enumerate(tokens.split(batch_size)):
            task.validation_step({"tokens": part}, number)
        return sum(value * weight for value, weight in logged) / sum(weight for _, weight in logged)

    with torch.no_grad():
        losses = [validated(batch_size) for batch_size in (1, 2, 5, 5)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", ["dataset.path=chat.jsonl", "dataset.sequence_length=32", "dataset.val_fraction=0.2"]),
        (
            "bert",
            [
                "task=masked",
                "dataset=text",
                "dataset.path=text.txt",
                "dataset.tokenizer=model",
                "dataset.sequence_length=16",
            ],
        ),
        ("vit", ["task=vision", "dataset=digits"]),
    ],
)
def test_a_stored_network_is_fine_tuned_by_one_command(name, words, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(stored)
    run = tmp_path / "run"
    assert main(["model=hf", f"model.pretrained={name}", *words, *SHORT, f"hydra.run.dir={run}"]) == 0
    result = json.loads((run / "result.json").read_text())
    assert result["model"] == "hf" and result["budget_met"]
    assert (run / "model" / "config.json").is_file()


@pytest.mark.slow
def test_bytes_for_a_network_with_a_tokenizer_are_refused(stored, monkeypatch, capsys):
    monkeypatch.chdir(stored)
    assert main(["model=hf", "model.pretrained=llama", "dataset=text", "dataset.path=text.txt", *SHORT]) == 2
    assert "cuts text into bytes, and llama has a tokenizer of its own" in capsys.readouterr().err
    assert main(["model=llama", "dataset=chat", "dataset.path=chat.jsonl", *SHORT]) == 2
    assert "stored beside model.pretrained, which is not given" in capsys.readouterr().err
