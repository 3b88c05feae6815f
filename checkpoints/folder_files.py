"""config.json and tokeniser files as they stand in a folder, Hugging Face's or our own.

Read by the safetensors and Orbax readers, and by front-end workers that need the tokeniser only
(step 2 of the walk). Imports no jax; must not know what a tokeniser does with the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointFormatError, CheckpointNotFoundError
from checkpoints.reader import TokenizerFiles

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
#: Written by our own checkpoints only: the vocabulary of a GGUF file.
GGUF_VOCAB = "gguf_vocab.json"


def read_text(path: Path) -> str:
    """A UTF-8 file; raises CheckpointNotFoundError or CheckpointFormatError."""
    try:
        return path.read_bytes().decode("utf-8")  # line ends stay as they are
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} does not exist") from None
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"{path} is not UTF-8 text ({error})") from None
    except OSError as error:
        raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; errors as for `read_text`."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_folder_config(folder: Path) -> dict[str, Any]:
    """config.json, with generation_config.json under "generation_config" if there is one."""
    config = read_json_object(folder / CONFIG)
    if (folder / GENERATION_CONFIG).is_file():
        config["generation_config"] = read_json_object(folder / GENERATION_CONFIG)
    return config


def read_folder_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokeniser of a folder: tokenizer.json, else tokenizer.model, else gguf_vocab.json.

    Raises CheckpointNotFoundError if there is none, CheckpointFormatError if a file is damaged.
    """
    special = _read_special(folder)
    template = _read_chat_template(folder, special)
    if (folder / TOKENIZER_JSON).is_file():
        return TokenizerFiles(
            tokenizer_json=read_text(folder / TOKENIZER_JSON),
            chat_template=template,
            special=special,
        )
    if (folder / TOKENIZER_MODEL).is_file():
        return TokenizerFiles(
            sentencepiece_model=(folder / TOKENIZER_MODEL).read_bytes(),
            chat_template=template,
            special=special,
        )
    if (folder / GGUF_VOCAB).is_file():
        return TokenizerFiles(
            gguf_vocab=read_json_object(folder / GGUF_VOCAB),
            chat_template=template,
            special=special,
        )
    raise CheckpointNotFoundError(f"{folder} has no {TOKENIZER_JSON} and no {TOKENIZER_MODEL}")


def _read_special(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; tokens as text, however they are stored."""
    special: dict[str, Any] = {}
    for name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        if (folder / name).is_file():
            special.update(read_json_object(folder / name))
    for key, value in special.items():
        if key.endswith("_token") and isinstance(value, Mapping) and "content" in value:
            special[key] = value["content"]
    return special


def _read_chat_template(folder: Path, special: dict[str, Any]) -> str | None:
    """The default template, taken out of `special`.

    chat_template.jinja comes first; in tokenizer_config.json it may be a text or a list of named
    templates, which then also appear in `special` as "chat_templates" (name to text).
    """
    stored = special.pop("chat_template", None)
    named: dict[str, str] = {}
    if isinstance(stored, list):
        for entry in stored:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("template"), str):
                raise CheckpointFormatError(
                    f"{folder / TOKENIZER_CONFIG}: chat_template has an entry without a template"
                )
            named[str(entry.get("name"))] = entry["template"]
        special["chat_templates"] = named
        stored = named.get("default") or next(iter(named.values()), None)
    if (folder / CHAT_TEMPLATE).is_file():
        return read_text(folder / CHAT_TEMPLATE)
    if stored is not None and not isinstance(stored, str):
        raise CheckpointFormatError(
            f"{folder / TOKENIZER_CONFIG}: chat_template is a {type(stored).__name__}"
        )
    return stored
