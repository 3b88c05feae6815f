"""The front end of tests: `server.worker.build_app` with a tokenizer and a template read by eye.

As a program it is `jaxserve serve` with the fake engine: one JSON argument holds the settings.
"""

from __future__ import annotations

import pathlib
import sys

import flask
import msgspec

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import JaxserveError

TESTS = pathlib.Path(__file__).parent
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


class Setup(msgspec.Struct, kw_only=True):
    """What the program is told."""

    engine: EngineConfig
    server: ServerConfig
    fake_engine: list[str] = []
    front_app: str = "byte_front:make_app()"


def make_app() -> flask.Flask:
    """What gunicorn loads in tests."""
    from byte_tokenizer import ByteTokenizer

    from jaxserve.context.chat_template import ChatTemplate
    from server.settings import FrontSettings
    from server.worker import build_app

    template = ChatTemplate(TEMPLATE, special={})
    return build_app(FrontSettings.from_environment(), ByteTokenizer(), template)


def main() -> int:
    from server.launch import serve

    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    command = [sys.executable, str(TESTS / "fake_engine.py"), *setup.fake_engine]
    try:
        return serve(setup.engine, setup.server, command, setup.front_app)
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
