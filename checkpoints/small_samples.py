"""What the small checkpoint says to a list of prompts, greedily, without a cache.

The answers stand in `small/samples.json`; tests of engines compare with them, because this forward
shares nothing with the served one. Must know nothing of training or files of weights.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import sentencepiece as spm
from flax import nnx

from checkpoints.small_data import BOS_ID, EOS_ID, encode_chat
from checkpoints.small_model import SmallModel

PROMPTS_FILE = pathlib.Path(__file__).parent / "small_text" / "prompts.json"
MAX_NEW_TOKENS = 96
#: Sequences are padded to one of these lengths, so that few programs are compiled.
LENGTHS = (128, 256, 512, 1024)

_forward = nnx.jit(lambda model, ids: model(ids))


def logits_of(model: SmallModel, ids: Sequence[int]) -> np.ndarray:
    """Float32 logits [T, V] of one sequence of T tokens."""
    length = next(size for size in LENGTHS if size >= len(ids))
    padded = jnp.asarray([[*ids, *[0] * (length - len(ids))]], jnp.int32)
    return np.asarray(_forward(model, padded)[0, : len(ids)])


def greedy(
    model: SmallModel, prompt_ids: Sequence[int], *, limit: int = MAX_NEW_TOKENS
) -> list[int]:
    """The most probable next token again and again, until EOS (which is included) or `limit`."""
    ids = list(prompt_ids)
    while len(ids) - len(prompt_ids) < limit:
        ids.append(int(logits_of(model, ids)[-1].argmax()))
        if ids[-1] == EOS_ID:
            break
    return ids[len(prompt_ids) :]


def read_prompts() -> list[dict[str, Any]]:
    """The prompts: a name with either a text to continue or chat messages to answer."""
    prompts: list[dict[str, Any]] = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    return prompts


def encode_prompt(tokenizer: spm.SentencePieceProcessor, prompt: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt, with BOS, as a server should make them."""
    if "messages" in prompt:
        turns = [(message["role"], message["content"]) for message in prompt["messages"]]
        return encode_chat(tokenizer, turns, ask=True)
    return [BOS_ID, *tokenizer.encode(prompt["text"])]


def make_samples(
    model: SmallModel, tokenizer: spm.SentencePieceProcessor, prompts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each prompt with its ids, its greedy answer and how sure the model was.

    gaps[i]: by how much the best logit leads the second at answer token i. From the first small
    gap on (below 0.2, say) arithmetic in bfloat16 may rightly choose another token.
    """
    samples = []
    for prompt in prompts:
        prompt_ids = encode_prompt(tokenizer, prompt)
        answer = greedy(model, prompt_ids)
        logits = logits_of(model, [*prompt_ids, *answer])[len(prompt_ids) - 1 : -1]
        top = np.sort(logits, axis=-1)
        samples.append(
            {
                **prompt,
                "prompt_ids": prompt_ids,
                "greedy_ids": answer,
                "greedy_text": tokenizer.decode([token for token in answer if token != EOS_ID]),
                "finish_reason": "stop" if answer[-1] == EOS_ID else "length",
                "gaps": [round(float(gap), 3) for gap in top[:, -1] - top[:, -2]],
            }
        )
    return samples


def write_samples(path: pathlib.Path, samples: Sequence[Mapping[str, Any]]) -> None:
    """One sample per line, for people and for diffs."""
    lines = ",\n".join(json.dumps(sample, ensure_ascii=False) for sample in samples)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
