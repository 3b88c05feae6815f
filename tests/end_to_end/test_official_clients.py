"""The official clients of OpenAI and Anthropic against a running server, feature by feature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from running_server import RunningServer, wait_until

from jaxserve.config import EngineConfig, ServerConfig

SAY = "@say:Grüße 🙂!@"
TEXT = "Grüße 🙂!"
MADE = len(TEXT.encode()) + 1
HELLO: list[Any] = [{"role": "user", "content": SAY}]
FAIL: list[Any] = [{"role": "user", "content": "@fail@@pause:20@"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("clients")
    engine = EngineConfig(model="fake", max_model_len=600, embeddings="mean", prompt_logprobs=True)
    running = RunningServer(
        folder, engine=engine, server=ServerConfig(port=0, data_dir=str(folder / "data"))
    )
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture(scope="module")
def ours(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def theirs(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def test_chat_and_completions(ours: openai.OpenAI) -> None:
    answer = ours.chat.completions.create(
        model="fake",
        messages=HELLO,
        logprobs=True,
        top_logprobs=2,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="me",
        extra_body={"top_k": 5, "min_p": 0.1, "prompt_logprobs": 1},
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == MADE
    assert answer.model_extra is not None
    assert len(answer.model_extra["prompt_logprobs"]) == answer.usage.prompt_tokens
    echoed = ours.completions.create(
        model="fake", prompt=SAY, echo=True, logprobs=1, max_tokens=40
    ).choices[0]
    assert echoed.text == SAY + TEXT
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs is not None
    assert len(echoed.logprobs.token_logprobs) == len(SAY.encode()) + 1 + MADE


def test_responses(ours: openai.OpenAI) -> None:
    whole = ours.responses.create(model="fake", input=SAY, instructions="be kind")
    assert (whole.status, whole.output_text) == ("completed", TEXT)
    assert whole.usage is not None
    assert whole.usage.output_tokens == MADE
    assert ours.responses.retrieve(whole.id) == whole
    with ours.responses.stream(model="fake", input=SAY, previous_response_id=whole.id) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    assert final.previous_response_id == whole.id
    items = ours.responses.input_items.list(final.id)
    assert [item.type for item in items] == ["message"]
    count = ours.responses.input_tokens.count(model="fake", input=SAY, instructions="be kind")
    assert count.input_tokens == whole.usage.input_tokens
    ours.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        ours.responses.retrieve(whole.id)
    with pytest.raises(openai.BadRequestError) as wrong:
        ours.responses.create(model="fake", input=SAY, background=True)
    assert wrong.value.param == "background"
    with pytest.raises(openai.APIError, match="told to fail"):
        list(ours.responses.create(model="fake", input=FAIL, stream=True))


def test_embeddings(ours: openai.OpenAI) -> None:
    """The client asks for base64 unless it is told otherwise."""
    found = ours.embeddings.create(model="fake", input=["a", "b"])
    plain = ours.embeddings.create(model="fake", input=["a", "b"], encoding_format="float")
    for left, right in zip(found.data, plain.data, strict=True):
        assert left.embedding == pytest.approx(right.embedding, abs=1e-6)
        assert sum(number**2 for number in left.embedding) == pytest.approx(1.0, abs=1e-5)
    assert len(ours.embeddings.create(model="fake", input="a", dimensions=3).data[0].embedding) == 3


def test_files_and_batches(ours: openai.OpenAI) -> None:
    lines: list[Any] = []
    for url, body in (
        ("/v1/embeddings", {"model": "fake", "input": "a"}),
        ("/v1/embeddings", {"model": "fake", "input": ["a", 1]}),
    ):
        lines.append({"custom_id": str(len(lines)), "method": "POST", "url": url, "body": body})
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = ours.files.create(file=("in.jsonl", data), purpose="batch")
    assert ours.files.content(file.id).content == data
    assert file.id in [entry.id for entry in ours.files.list()]
    batch = ours.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    wait_until(lambda: ours.batches.retrieve(batch.id).status == "completed", 15)
    batch = ours.batches.retrieve(batch.id)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    made = json.loads(ours.files.content(batch.output_file_id).text)
    assert len(made["response"]["body"]["data"]) == 1
    failed = json.loads(ours.files.content(batch.error_file_id).text)
    assert failed["response"]["status_code"] == 400
    assert batch.id in [entry.id for entry in ours.batches.list()]
    assert ours.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ours.files.retrieve(file.id)


def test_messages(theirs: anthropic.Anthropic) -> None:
    fields: Any = {"model": "fake", "max_tokens": 60, "messages": HELLO, "system": "be kind"}
    whole = theirs.messages.create(**fields)
    block = whole.content[0]
    assert block.type == "text"
    assert (block.text, whole.stop_reason) == (TEXT, "end_turn")
    assert whole.usage.output_tokens == MADE
    count = theirs.messages.count_tokens(model="fake", messages=HELLO, system="be kind")
    cached = whole.usage.cache_read_input_tokens or 0
    assert count.input_tokens == whole.usage.input_tokens + cached
    with theirs.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == TEXT
    assert final.content[0].to_dict()["text"] == TEXT
    assert final.usage.output_tokens == MADE
    stopped = theirs.messages.create(**fields, stop_sequences=["🙂"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "🙂")
    again: Any = [*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
    assert theirs.messages.create(model="fake", max_tokens=1, messages=again).content


def test_messages_errors(theirs: anthropic.Anthropic) -> None:
    fields: Any = {"model": "fake", "max_tokens": 60, "messages": HELLO}
    with pytest.raises(anthropic.NotFoundError):
        theirs.messages.create(**{**fields, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="thinking") as wrong:
        theirs.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id
    with (
        pytest.raises(anthropic.APIStatusError, match="told to fail"),
        theirs.messages.stream(**{**fields, "messages": FAIL}) as stream,
    ):
        list(stream)
