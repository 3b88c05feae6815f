"""A real server with the small checkpoint: bound answers, forced calls and free text side by side."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from checkpoints.resolve import resolve_model
from jaxserve.config import cache_folder

#: The checkpoint's own template knows no tools; this one writes them as Hermes and Qwen do.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<tool_call>{% endif %}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "strict": True, "schema": PERSON},
}
TOOL: Any = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}
MESSAGES: Any = [{"role": "user", "content": "Tell me of somebody."}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("forms")
    model = folder / "model"
    shutil.copytree(resolve_model("small", cache_folder()), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--model", str(model)]
    command += ["--served-name", "small", "--port", "0", "--max-num-seqs", "8"]
    command += ["--max-num-batched-tokens", "16", "--max-model-len", "512"]
    command += ["--quantization", "none", "--data-dir", str(folder / "data")]
    command += ["--tool-parser", "hermes"]
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    errors = folder / "errors.txt"
    with errors.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    try:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        assert line.startswith("ready: "), (line, errors.read_text())
        url = line.removeprefix("ready: ")
        with openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60
        ) as ours:  # open connections would delay the server's end
            yield ours
    finally:
        server.terminate()
        server.wait(60)
        if server.stdout is not None:
            server.stdout.close()


def bound(client: openai.OpenAI, seed: int) -> str:
    """A streamed answer under the schema."""
    pieces, reasons = [], []
    for event in client.chat.completions.create(
        model="small", messages=MESSAGES, response_format=FORM, stream=True, seed=seed
    ):
        pieces += [choice.delta.content or "" for choice in event.choices]
        reasons += [choice.finish_reason for choice in event.choices if choice.finish_reason]
    assert reasons == ["stop"]
    assert len([piece for piece in pieces if piece]) > 1, "the answer is streamed"
    return "".join(pieces)


def called(client: openai.OpenAI, seed: int) -> str:
    """The arguments of a call that must come, joined from their fragments."""
    names, pieces, reasons = [], [], []
    for event in client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
        seed=seed,
    ):
        for choice in event.choices:
            assert not choice.delta.content
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
                pieces.append(call.function.arguments or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (names, reasons) == (["greet"], ["tool_calls"])
    return "".join(pieces)


def free(client: openai.OpenAI, seed: int) -> str:
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=60, seed=seed, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].message.content or ""


def test_bound_answers_calls_and_free_text_share_the_batch(client: openai.OpenAI) -> None:
    alone = [free(client, seed) for seed in range(3)]
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        jobs = [
            [pool.submit(kind, client, seed) for seed in range(3)] for kind in (bound, called, free)
        ]
        forms, calls, texts = ([job.result() for job in kind] for kind in jobs)
    for text in forms + calls:
        value = json.loads(text)
        assert list(value) == ["name", "age"], text
        assert 1 <= len(value["name"]) <= 8
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
    assert texts == alone, "company changes nothing"
