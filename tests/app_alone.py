"""The application alone with the fake line to an engine: no process, no socket."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import flask
from byte_front import TEMPLATE
from byte_tokenizer import ByteTokenizer
from fake_client import FakeClient

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from server.app import create_app


def make_app(
    client: FakeClient | None = None,
    *,
    folder: pathlib.Path | None = None,
    template: str = TEMPLATE,
    **settings: Any,
) -> flask.Flask:
    """settings: fields of ServerConfig. folder: where the application keeps files, if anywhere."""
    if folder is not None:
        settings["data_dir"] = str(folder)
    else:
        settings = {"usage_ledger": False, "trace_requests": 0, **settings}
    return create_app(
        client or FakeClient(),  # type: ignore[arg-type]
        ByteTokenizer(),
        ChatTemplate(template, special={}),
        EngineConfig(model="fake"),
        ServerConfig(**settings),
    )


def post(web: Any, path: str, body: Any, **headers: str) -> Any:
    """One POST with a JSON body; bytes go as they are."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return web.post(path, data=data, content_type="application/json", headers=headers)


def events(answer: Any) -> list[tuple[str | None, Any]]:
    """The named events of a stream that has ended, each with its decoded data."""
    found = []
    for frame in answer.text.split("\n\n")[:-1]:
        lines = frame.split("\n")
        name = lines[0].removeprefix("event: ") if lines[0].startswith("event: ") else None
        data = lines[-1].removeprefix("data: ")
        found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found
