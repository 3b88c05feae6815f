"""The tiny random Llama with a tokenizer of bytes and a chat template: it can be talked to."""

from __future__ import annotations

import json
import pathlib

from tiny_model import VOCAB, write_tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>", "<turn>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def write_tiny_chat_model(folder: pathlib.Path, *, template: str | None = TEMPLATE) -> pathlib.Path:
    """A Hugging Face folder; ids 0 to 3 are special, 4 to 259 are the bytes."""
    write_tiny_llama(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, *letters])}
    assert len(vocabulary) <= VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
