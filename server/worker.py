"""Builds the application in a gunicorn worker, after gevent has patched the process.

Reads the model's tokeniser and chat template (never its weights) and opens the line to the engine.
"""

from __future__ import annotations

import os
import pathlib
import sys

import flask
import gevent

from checkpoints.assets import read_tokenizer_files
from checkpoints.resolve import resolve_model
from jaxserve.client import EngineClient
from jaxserve.config import cache_folder
from jaxserve.context.chat_template import ChatTemplate, load_chat_template
from jaxserve.errors import USER_ERRORS
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.tokenizer.protocol import Tokenizer
from server.app import create_app
from server.batches.worker import EXTENSION as BATCHES
from server.batches.worker import BatchWorker
from server.children import USER_ERROR_EXIT
from server.settings import FrontSettings

#: How long a new worker waits for a running engine's first word before it takes requests, so that
#: a worker that replaces another does not begin with refusals. Several beats: one may get lost.
HEAR_SECONDS = 5.0


def make_app() -> flask.Flask:
    """What gunicorn loads. A model that cannot be used ends the worker with one line."""
    settings = FrontSettings.from_environment()
    try:
        path = resolve_model(settings.engine.model, cache_folder(), pull_missing=False)
        files = read_tokenizer_files(path)
        tokenizer, template = load_tokenizer(files), load_chat_template(files)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(USER_ERROR_EXIT) from None
    return build_app(settings, tokenizer, template)


def build_app(
    settings: FrontSettings, tokenizer: Tokenizer, template: ChatTemplate | None
) -> flask.Flask:
    """The application of this process; leaves its ready file once the engine has been ready."""
    client = EngineClient(settings.address)

    def report_ready() -> None:
        client.wait_ready()
        settings.ready_file(os.getpid()).touch()

    gevent.spawn(report_ready)
    client.wait_heard(HEAR_SECONDS)
    app = create_app(
        client,
        tokenizer,
        template,
        settings.engine,
        settings.server,
        private_folder=pathlib.Path(settings.folder),
    )
    batches: BatchWorker = app.extensions[BATCHES]
    batches.start()
    return app
