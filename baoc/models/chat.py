"""Conversations as tokens, by the chat template of a stored tokenizer, with a mask of the tokens of answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from baoc.errors import BadInputError, first_line

ANSWER_ROLE = "assistant"  # the role whose messages are learned
_SHAREGPT_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), ANSWER_ROLE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`answer_mask`: whether each of `tokens` is part of an answer. `num_bytes`: UTF-8 bytes of all answers."""

    tokens: Sequence[int]
    answer_mask: Sequence[bool]
    num_bytes: int


class ChatTokenizer:
    """A tokenizer of transformers. `vocab_size` counts added tokens as well."""

    def __init__(self, name: str):
        """`name`: a folder with the tokenizer's files, or a name in the library's cache or on the hub."""
        from transformers import AutoTokenizer

        path = Path(name).expanduser()
        try:
            self._library: Any = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
        except Exception as error:  # OSError, ValueError, errors of the network and of files
            raise BadInputError(
                f"dataset.tokenizer={name} gives no tokenizer ({first_line(error)}): give the folder of a stored one"
            ) from error
        self._name = name
        self.vocab_size = max(len(self._library), self._library.vocab_size)

    def encode(self, sample: Mapping[str, Any], *, where: str) -> Conversation:
        """A sample in any of the forms that the documentation names. Raises BadInputError, which names `where`."""
        if (messages := _messages_in(sample)) is not None:
            turns = [*_earlier_turns(sample), *messages] if isinstance(messages, list) and messages else messages
            return self._of_messages(turns, tools=sample.get("tools"), where=where)
        has_both = "prompt" in sample and "completion" in sample
        names = ("prompt", "completion") if has_both else ("instruction", "output")  # the latter is Alpaca's form
        if not all(name in sample for name in names):
            raise BadInputError(
                f"{where} has neither `messages` (or `conversations`) nor the texts `prompt` and `completion` (or "
                f"`instruction` and `output`), but {', '.join(sample) or 'nothing'}: rename what is there, or leave it "
                "out"
            )
        texts = {name: sample[name] for name in names}
        if not has_both and sample.get("input") is not None:
            texts["input"] = sample["input"]
        for name, text in texts.items():
            if not isinstance(text, str):
                raise BadInputError(f"{where}: `{name}` must be text, not {text!r} (JSON's null is None)")
        prompt, completion = texts[names[0]], texts[names[1]]
        if more := texts.get("input"):
            prompt = "\n\n".join(filter(None, [prompt, more]))
        earlier = _earlier_turns(sample)
        if self._library.chat_template or earlier:
            turns = [*earlier, {"role": "user", "content": prompt}, {"role": ANSWER_ROLE, "content": completion}]
            return self._of_messages(turns, where=where)
        question, answer = self._ids(prompt), self._ids(completion)
        end = [] if self._library.eos_token_id is None else [self._library.eos_token_id]
        mask = [False] * len(question) + [True] * (len(answer) + len(end))
        return Conversation(tokens=[*question, *answer, *end], answer_mask=mask, num_bytes=len(completion.encode()))

    def _of_messages(self, messages: Any, *, where: str, tools: Any = None) -> Conversation:
        """`tools`: definitions of functions, which the template writes; of ShareGPT's, a text, it can make nothing."""
        if not self._library.chat_template:
            raise BadInputError(
                f"dataset.tokenizer={self._name} has no chat template, and {where} has messages: give a tokenizer with "
                "one, or lines with `prompt` and `completion`"
            )
        turns: Any = messages
        is_list = isinstance(turns, list) and len(turns) > 0
        if not is_list or not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in turns):
            raise BadInputError(f"{where}: `messages` must be a list of {{role, content}}, not {str(messages)[:60]!r}")
        for number, message in enumerate(turns):
            if not isinstance(message["content"], str | list) and not message.get("tool_calls"):
                raise BadInputError(
                    f"{where}: the `content` of message {number} must be text, not {message['content']!r} (JSON's null "
                    "is None); a message without text needs `tool_calls`"
                )
        roles = dict.fromkeys(str(message["role"]) for message in turns)
        if ANSWER_ROLE not in roles:
            raise BadInputError(
                f"{where} has no message of the role {ANSWER_ROLE}, but of {', '.join(roles)}, so there is nothing to "
                "learn from it"
            )
        rendered = partial(self._rendered, where=where, tools=tools if isinstance(tools, list) else None)
        learned = [m["role"] == ANSWER_ROLE and m.get("weight") != 0 for m in turns]  # OpenAI's weight: 0 or 1
        tokens = self._ids(rendered(turns))
        mask = [False] * len(tokens)
        for index in compress(range(len(turns)), learned):
            before = self._ids(rendered(turns[:index], prompt=True)) if index else []
            after = self._ids(rendered(turns[: index + 1]))
            for position in range(_common_prefix(tokens, before), _common_prefix(tokens, after)):
                mask[position] = True
        num_bytes = sum(len(str(m["content"]).encode()) for m in compress(turns, learned))
        return Conversation(tokens=tokens, answer_mask=mask, num_bytes=num_bytes)

    def _rendered(self, messages: Any, *, where: str, tools: Any, prompt: bool = False) -> str:
        try:
            return self._library.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # jinja passes on whatever the template raises
            raise BadInputError(
                f"{where} does not suit the chat template of {self._name} ({first_line(error)})"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return list(self._library(text, add_special_tokens=False)["input_ids"])


def _messages_in(sample: Mapping[str, Any]) -> Any:
    """The messages of a sample: `messages`, ShareGPT's `conversations`, or those of TRL's prompt and completion; None
    if it has texts."""
    prompt, completion, turns = sample.get("prompt"), sample.get("completion"), sample.get("conversations")
    if "messages" in sample:
        return sample["messages"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    if not isinstance(turns, list):
        return turns
    return [
        {"role": _SHAREGPT_ROLES.get(str(turn["from"]).lower(), turn["from"]), "content": turn.get("value")}
        if isinstance(turn, Mapping) and "from" in turn
        else turn
        for turn in turns
    ]


def _earlier_turns(sample: Mapping[str, Any]) -> list[Any]:
    """What a sample says outside of its turns: `system` (Anthropic, ShareGPT), and the pairs of Alpaca's `history`."""
    system, history = sample.get("system"), sample.get("history")
    turns: list[Any] = [{"role": "system", "content": system}] if system else []
    for pair in history if isinstance(history, list) else ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        roles = zip(("user", ANSWER_ROLE), pair, strict=True) if is_pair else ()
        turns += [{"role": role, "content": text} for role, text in roles] if is_pair else [pair]
    return turns


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
