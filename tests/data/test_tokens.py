"""Tokenizers by name, file and training; the cache; and the message for each file that is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from baoc.cache import cache_folder
from baoc.data import build_data, tokens
from baoc.data.text_files import TextChunk
from baoc.data.token_arrays import encode, token_dtype
from baoc.data.tokens import ByteTokenizer, load_tokenizer
from baoc.errors import BadInputError, OutputError
from baoc.models import build_model

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Größe:\n    pass\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BAOC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pieces(*texts: str, ends: bool = True):
    return lambda: iter([TextChunk(text=text.encode(), ends=ends) for text in texts or (TEXT,)])


def bpe(vocab_size: int = 280, *, text=None, key: str = "text"):
    return load_tokenizer("bpe", vocab_size=vocab_size, training_chunks=text or pieces(), text_key=key)


def by_path(path):
    return load_tokenizer(str(path), vocab_size=0, training_chunks=None, text_key="")


def tokens_of(tokenizer, *texts: str, ends: bool = True) -> list[int]:
    return encode(
        pieces(*texts, ends=ends), tokenizer=tokenizer, num_bytes=99, text_key=f"{texts} {ends}"
    ).tokens.tolist()


def library_tokenizer(path: Path, *, special: list[str]) -> Path:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([TEXT], trainer=trainer)
    library.enable_padding(length=64)
    library.enable_truncation(3)
    library.save(str(path))
    return path


def test_bytes_are_their_own_tokens():
    assert tokens_of(ByteTokenizer(), "aß", "b") == [97, 0xC3, 0x9F, 98]


def test_bpe_is_shorter_than_bytes_and_ends_each_document():
    trained = bpe()
    assert trained.vocab_size == 280
    assert trained.end is not None
    ids = tokens_of(trained, TEXT, "return a")
    assert ids.count(trained.end) == 2 and ids[-1] == trained.end
    assert len(ids) < len(TEXT.encode()) / 2
    assert tokens_of(trained, TEXT, ends=False) == ids[: ids.index(trained.end)]


def test_tokens_stand_for_the_bytes_they_came_from():
    trained = bpe()
    encoded = encode(pieces("return größer", TEXT), tokenizer=trained, num_bytes=99, text_key="key")
    assert encoded.num_bytes == len("return größer".encode()) + len(TEXT.encode())
    assert encoded.bytes_per_token == encoded.num_bytes / len(encoded.tokens)
    library = Tokenizer.from_file(str(next(cache_folder().glob("bpe-*.json"))))
    assert library.decode(encoded.tokens.tolist()) == "return größer" + TEXT


def test_training_and_encoding_are_done_once(monkeypatch, cache):
    first = bpe()
    ids = tokens_of(first, TEXT)
    held = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert {file.stat().st_mode & 0o777 for file in cache.iterdir()} == {0o600}, "only its user may read the text"
    assert len(held) == 2

    def never():
        raise AssertionError("the text was read again")
        yield

    again = bpe(text=never)
    assert again.fingerprint == first.fingerprint
    found = encode(never, tokenizer=again, num_bytes=99, text_key=f"{(TEXT,)} True")
    assert (found.tokens.tolist(), found.num_bytes) == (ids, len(TEXT.encode()))
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == held


def test_cache_tells_texts_sizes_and_tokenizers_apart(cache):
    bpe(), bpe(281), bpe(key="other")
    assert len(list(cache.glob("bpe-*"))) == 3
    tokens_of(bpe(), TEXT), tokens_of(bpe(281), TEXT)
    assert len(list(cache.glob("tokens-*"))) == 2


def test_half_written_file_never_takes_the_place_of_a_whole_one(cache):
    def broken():
        yield TextChunk(text=b"abc", ends=True)
        raise KeyboardInterrupt

    trained = bpe()
    with pytest.raises(KeyboardInterrupt):
        encode(broken, tokenizer=trained, num_bytes=99, text_key="key")
    assert [file.name.split("-")[0] for file in cache.iterdir()] == ["bpe"]


def test_cache_that_cannot_be_written_says_where_it_is(cache):
    cache.write_text("a file is in the way")
    with pytest.raises(OutputError, match=r"the token cache .*cache cannot be written \(.*\): set BAOC_CACHE to"):
        bpe()


def test_tokenizer_by_path_adds_pads_and_cuts_nothing(tmp_path):
    path = library_tokenizer(tmp_path / "tokenizer.json", special=["<pad>", "</s>"])
    for given in (path, tmp_path):
        tokenizer = by_path(given)
        assert (tokenizer.vocab_size, tokenizer.end) == (270, 1)
        ids = tokens_of(tokenizer, TEXT)
        assert len(ids) > 100 and ids.count(0) == 0 and ids[-1] == 1


def test_end_token_is_the_configured_one_else_a_usual_name_else_none(tmp_path):
    path = library_tokenizer(tmp_path / "tokenizer.json", special=["<a>", "<|endoftext|>"])
    assert by_path(path).end == 1
    config = tmp_path / "tokenizer_config.json"
    for content in ('{"eos_token": "<a>"}', '{"eos_token": {"content": "<a>"}}'):
        config.write_text(content)
        assert by_path(path).end == 0
    config.write_text("torn {")
    assert by_path(path).end == 1
    assert by_path(library_tokenizer(tmp_path / "plain.json", special=[])).end is None


def test_numbers_take_the_smallest_type_that_holds_them():
    assert [token_dtype(size) for size in (256, 257, 65_536, 65_537)] == [np.uint8, np.uint16, np.uint16, np.int32]


def test_data_set_is_packed_from_the_tokens_and_knows_its_bytes(tmp_path):
    path = tmp_path / "code.txt"
    content = "".join(f"def add_{number}(größe):\n    return größe + {number}\n" for number in range(200))
    path.write_text(content, encoding="utf-8")
    settings = {"batch_size": 2, "sequence_length": 8, "tokenizer": "bpe", "vocab_size": 280}
    data = build_data("text", task="language", path=str(path), max_val_sequences=None, **settings)
    spec = data.spec
    assert spec.vocab_size == 280
    assert 1.5 < spec.bytes_per_token < 8
    library = Tokenizer.from_file(str(next(cache_folder().glob("bpe-*.json"))))
    ids = torch.cat([batch["tokens"] for batch in data.val_dataloader()]).flatten().tolist()
    held_back = library.decode(ids)
    assert content.index(held_back) >= 0.94 * len(content)
    assert len(held_back) > 0.04 * len(content)
    assert abs(len(held_back.encode()) / len(ids) - spec.bytes_per_token) < 0.5


def test_training_sees_the_training_part_only(tmp_path, monkeypatch):
    seen = []
    original = tokens.decoded_texts
    monkeypatch.setattr(tokens, "decoded_texts", lambda parts: [seen.append(text) or text for text in original(parts)])
    path = tmp_path / "text.txt"
    path.write_text("a" * 950 + "b" * 50)
    settings = {"batch_size": 1, "sequence_length": 1, "tokenizer": "bpe", "vocab_size": 257}
    build_data("text", task="language", path=str(path), **settings)
    assert seen == ["a" * 950]


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere.json",
            "dataset.tokenizer=nowhere.json: there is no file nowhere.json. dataset.tokenizer must be bytes",
        ),
        ("google-t5/t5-base", r"no file google-t5/t5-base; is dataset.tokenizer=hub:google-t5/t5-base meant\?"),
        ("{tmp}/torn.json", r"torn.json is no tokenizer of the tokenizers library \("),
        ("{tmp}/spm.model", r"spm.model is no tokenizer .*SentencePiece model is read as the tokenizer.json that"),
        ("{tmp}", "there is no file .*tokenizer.json"),
        ("bpe", "tokenizer=bpe is trained on text at hand, not on a stream"),
    ],
)
def test_tokenizer_that_is_not_there_is_named(name, message, tmp_path):
    (tmp_path / "torn.json").write_text('{"model": ')
    (tmp_path / "spm.model").write_bytes(b"1")
    with pytest.raises(BadInputError, match=message):
        by_path(name.format(tmp=tmp_path))


def test_hub_out_of_reach_is_said(monkeypatch):
    def refuse(name):
        raise Exception("Couldn't connect to the hub\nand more")

    monkeypatch.setattr(Tokenizer, "from_pretrained", refuse)
    with pytest.raises(BadInputError, match=r"gave no tokenizer a/b \(Couldn't connect to the hub\): check the name"):
        by_path("hub:a/b")


def test_vocabulary_below_all_bytes_is_refused():
    with pytest.raises(BadInputError, match=r"dataset.vocab_size=256 is too small: byte-level BPE needs 257"):
        bpe(256)
    assert bpe(257).vocab_size == 257


def test_vocabulary_larger_than_the_models_is_refused(tmp_path):
    path = tmp_path / "code.txt"
    path.write_text(TEXT, encoding="utf-8")
    settings = {"batch_size": 1, "sequence_length": 4, "tokenizer": "bpe", "vocab_size": 280}
    data = build_data("text", task="language", path=str(path), **settings)
    with pytest.raises(BadInputError, match=r"knows 256 tokens, but the tokenizer of dataset code has 280: give model"):
        build_model("llama", spec=data.spec, vocab_size=256)
