"""A batch under way while its server is killed: the next server finishes it (real processes)."""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import openai
from running_server import RunningServer, wait_until

from jaxserve.config import EngineConfig, ServerConfig

LINES = 40


def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def request(number: int) -> dict[str, Any]:
    content = f"@say:answer {number}@@pause:20@"
    body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
    url = "/v1/chat/completions"
    return {"custom_id": str(number), "method": "POST", "url": url, "body": body}


def test_a_killed_server_s_batch_is_finished_by_the_next(
    start_server: Callable[..., RunningServer], tmp_path: pathlib.Path
) -> None:
    settings: dict[str, Any] = {
        "engine": EngineConfig(model="fake", max_num_seqs=4),
        "server": ServerConfig(port=0, data_dir=str(tmp_path / "data"), workers=2),
    }
    first = start_server(**settings).wait_ready()
    data = "".join(json.dumps(request(number)) + "\n" for number in range(LINES))
    files, batches = client(first).files, client(first).batches
    file = files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch = batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    def answered(number: int) -> Callable[[], bool]:
        def enough() -> bool:
            counts = batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed >= number

        return enough

    wait_until(answered(4), 20)
    first.process.send_signal(signal.SIGKILL)
    first.wait()
    second = start_server(**settings).wait_ready()
    batches = client(second).batches
    wait_until(answered(LINES), 30)
    wait_until(lambda: batches.retrieve(batch.id).status == "completed")
    output = batches.retrieve(batch.id).output_file_id
    assert output is not None
    entries = [json.loads(line) for line in client(second).files.content(output).text.splitlines()]
    texts = {
        int(entry["custom_id"]): entry["response"]["body"]["choices"][0]["message"]["content"]
        for entry in entries
    }
    assert len(entries) == LINES
    assert texts == {number: f"answer {number}" for number in range(LINES)}
    assert len(second.engine_events("submit")) < LINES
