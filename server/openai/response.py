"""What OpenAI's answers are made of (step 9): heads, usage, log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxserve.request import RequestOutput, TokenLogprobs
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.tokenizer.protocol import Tokenizer
from server.answers import AnswerReader

Json = dict[str, Any]

#: JSON has no minus infinity; OpenAI's API shows this for tokens that are impossible.
_LOWEST = -9999.0


def answer_head(prefix: str, kind: str, model: str) -> Json:
    """The fields that all chunks of an answer share."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(readers: Sequence[AnswerReader], n: int, reasoning: int | None = None) -> Json:
    """Token counts; the n answers to a prompt stand side by side and count it once.

    reasoning: how many of the answers' tokens were thoughts; None where there can be none.
    """
    firsts = readers[::n]
    prompt = sum(len(reader.request.prompt_ids) for reader in firsts)
    made = sum(reader.num_tokens for reader in readers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(reader.num_cached_tokens for reader in firsts)
        },
        **(
            {}
            if reasoning is None
            else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        ),
    }


def finish_fields(piece: RequestOutput) -> Json:
    """Why an answer ended; `stop_reason` is vLLM's: the stop string or token id, if one did it."""
    return {
        "finish_reason": None if piece.finish_reason is None else str(piece.finish_reason),
        "stop_reason": piece.stop_reason,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
    """Chat's format: per token its text, bytes, and the alternatives."""
    if tokens is None:
        return None

    def entry(token_id: int, logprob: float) -> Json:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": max(logprob, _LOWEST),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [
                entry(*pair) for pair in zip(token.top_ids, token.top_logprobs, strict=True)
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, first: int, tokens: Sequence[TokenLogprobs]
) -> list[Json | None]:
    """vLLM's format: nothing for the prompt's first token, then by token id.

    rank: among all tokens, from 1 on; null for a token of the prompt that is not among the
    alternatives that were asked for.
    """

    def entry(token_id: int, logprob: float, rank: int | None) -> Json:
        text = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}

    found: list[Json | None] = [None]
    for token in tokens:
        shown = {str(token.token_id): entry(token.token_id, token.logprob, None)}
        tops = zip(token.top_ids, token.top_logprobs, strict=True)
        for rank, (token_id, logprob) in enumerate(tops, 1):
            shown[str(token_id)] = entry(token_id, logprob, rank)
        found.append(shown)
    return found


class CompletionLogprobs:
    """Completions' format; keeps count of where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
        self._offset = 0

    def prompt(self, first: int, tokens: Sequence[TokenLogprobs]) -> Json:
        """The entries of an echoed prompt, whose first token has no log-probability."""
        self._offset += len(self._text.push([first]))
        rest = self(tokens)
        assert rest is not None
        return {
            "tokens": [self._show(first), *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *rest["text_offset"]],
        }

    def __call__(self, tokens: Sequence[TokenLogprobs] | None) -> Json | None:
        """The entries of the next tokens."""
        if tokens is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._text.push([token.token_id]))
        return {
            "tokens": [self._show(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, _LOWEST) for token in tokens],
            "top_logprobs": [
                {
                    self._show(token_id): max(logprob, _LOWEST)
                    for token_id, logprob in [
                        (token.token_id, token.logprob),
                        *zip(token.top_ids, token.top_logprobs, strict=True),
                    ]
                }
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _show(self, token_id: int) -> str:
        """The token's text; parts of characters as OpenAI writes them, so that they differ."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
