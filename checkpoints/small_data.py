"""The small checkpoint's tokeniser and the order of its training data.

Text from `checkpoints.small_text` becomes SentencePiece tokens, tokens become windows. Both are
the same on every machine for the same text and seed. Must know nothing of the model.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import sentencepiece as spm

from checkpoints.small_text.generate import CHAT_MARK

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 1, 2
#: Control symbols: plain text never becomes one of them. The template puts one before each turn.
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: Rows and tokens of a training batch; each has 1,024 tokens. Long windows cost more, so are rarer.
SHORT, MIDDLE, LONG = (8, 128), (4, 256), (1, 1024)
_TURN = re.compile(r"^(System|User|Assistant): ", re.MULTILINE)


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> bytes:
    """A tokenizer.model: BPE with byte fallback, line breaks as symbols, no dummy prefix."""
    lines = [line for text in documents for line in text.split("\n") if line]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        control_symbols=list(ROLES),
        user_defined_symbols=["\n", "\n\n"],
        max_sentence_length=16384,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def load_tokenizer(model: bytes) -> spm.SentencePieceProcessor:
    """The processor of a tokenizer.model's bytes."""
    return spm.SentencePieceProcessor(model_proto=model)


def split_turns(text: str) -> list[tuple[str, str]]:
    """(role, content) of each turn of a chat written as `User: ...` and `Assistant: ...` lines."""
    parts = _TURN.split(text)
    assert parts[0].strip() == "", f"chat begins with {parts[0]!r}"
    return [
        (role.lower(), content.strip())
        for role, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


def encode_chat(
    tokenizer: spm.SentencePieceProcessor, turns: Sequence[tuple[str, str]], *, ask: bool = False
) -> list[int]:
    """Token ids of what `CHAT_TEMPLATE` renders; with `ask` the assistant's turn is opened."""
    ids = [BOS_ID]
    for role, content in turns:
        ids += [tokenizer.piece_to_id(f"<|{role}|>"), *tokenizer.encode(content)]
        if role == "assistant":
            ids.append(EOS_ID)
    if ask:
        ids.append(tokenizer.piece_to_id("<|assistant|>"))
    return ids


def encode_document(tokenizer: spm.SentencePieceProcessor, text: str) -> list[int]:
    """Token ids of a training document, from its BOS to its EOS."""
    if text.startswith(CHAT_MARK):
        return encode_chat(tokenizer, split_turns(text.removeprefix(CHAT_MARK)))
    return [BOS_ID, *tokenizer.encode(text), EOS_ID]


def batch_shape(step: int) -> tuple[int, int]:
    """Rows and window length of a training step."""
    if step % 24 == 23:
        return LONG
    return MIDDLE if step % 4 == 3 else SHORT


def batches(
    documents_of: Callable[[int], Sequence[Sequence[int]]], *, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """int32 [rows, window + 1] for each step.

    documents_of: tokenised documents of an epoch, asked for when its turn comes; their order is
    random.
    """
    waiting = np.zeros(0, np.int32)
    epoch = 0
    for step in range(steps):
        rows, window = batch_shape(step)
        size = rows * (window + 1)
        while len(waiting) < size:
            documents = documents_of(epoch)
            order = np.random.default_rng([seed, epoch]).permutation(len(documents))
            flat = [token for index in order for token in documents[index]]
            waiting = np.concatenate([waiting, np.asarray(flat, np.int32)])
            epoch += 1
        yield waiting[:size].reshape(rows, window + 1)
        waiting = waiting[size:]
