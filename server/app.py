"""The Flask application: every route with the parts it is given. Starts and connects nothing."""

from __future__ import annotations

import pathlib
import re
import time
import uuid

import flask
from gevent.threadpool import ThreadPool

from jaxserve.client import EngineClient
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.context.chat_template import ChatTemplate
from jaxserve.tokenizer.protocol import Tokenizer
from server import errors
from server.access.gate import Gate
from server.access.keyring import KeyRing
from server.anthropic.routes import messages_blueprint
from server.batches.batch_routes import batches_blueprint
from server.batches.batches import BatchStore
from server.batches.file_routes import files_blueprint
from server.batches.files import FileStore
from server.batches.worker import EXTENSION as BATCHES
from server.batches.worker import BatchWorker
from server.drain import EXTENSION, Drain
from server.health import health_blueprint
from server.marks import mark
from server.metrics import metrics_blueprint
from server.openai.chat import chat_blueprint
from server.openai.completions import completions_blueprint
from server.openai.embeddings import embeddings_blueprint
from server.openai.models import models_blueprint
from server.openai.tokenize import tokenize_blueprint
from server.openapi import openapi_blueprint
from server.prompts import Prompts
from server.responses.routes import responses_blueprint
from server.services import Services
from server.storage import Storage
from server.trace.routes import trace_blueprint
from server.usage.meter import EXTENSION as METER
from server.usage.meter import make_meter
from server.usage.routes import usage_blueprint
from server.web.routes import web_blueprint

#: Long prompts that are rendered and tokenised at once.
PROMPT_THREADS = 2
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def create_app(
    client: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    engine: EngineConfig,
    server: ServerConfig,
    *,
    private_folder: pathlib.Path | None = None,
) -> flask.Flask:
    """The application of one worker.

    chat_template: None for a model that cannot chat. engine: lends the model's name until the
    engine itself has told it. private_folder: what the workers of one server share while it runs.
    Raises UsageError.
    """
    keys = None
    if server.api_keys is not None:
        keys = KeyRing(pathlib.Path(server.api_keys).expanduser(), private_folder)
    drain = Drain(client, server.drain_seconds)
    services = Services(
        engines=(client,),
        tokenizer=tokenizer,
        prompts=Prompts(
            tokenizer,
            chat_template,
            max_bytes=server.max_prompt_bytes,
            run_long=ThreadPool(PROMPT_THREADS).apply,
            mark=mark,
        ),
        config=server,
        model_name=engine.model_name,
        started=int(time.time()),
        drain=drain,
        storage=Storage(server.data_folder),
        meter=make_meter(
            server, lambda: client.info.model_name if client.info else engine.model_name
        ),
    )
    files = FileStore(services.storage, server.max_data_bytes)
    batches = BatchStore(services.storage)
    app = flask.Flask("jaxserve", static_folder=None)
    app.extensions[EXTENSION] = drain
    app.extensions[BATCHES] = BatchWorker(app, services, batches, files)
    app.json.sort_keys = False  # type: ignore[attr-defined]
    app.url_map.merge_slashes = False
    errors.install(app)
    app.before_request(_begin)
    app.before_request(Gate(keys).check)
    app.after_request(_send_request_id)
    app.after_request(services.meter.answered)
    app.extensions[METER] = services.meter
    client.on_orphans = services.meter.adopt
    for blueprint in (
        chat_blueprint(services),
        completions_blueprint(services),
        embeddings_blueprint(services),
        messages_blueprint(services),
        responses_blueprint(services),
        files_blueprint(services, files),
        batches_blueprint(services, batches, files),
        models_blueprint(services),
        tokenize_blueprint(services),
        openapi_blueprint(),
        health_blueprint(services),
        metrics_blueprint(services),
        usage_blueprint(services),
        trace_blueprint(services),
        web_blueprint(services),
    ):
        app.register_blueprint(blueprint)
    return app


def _begin() -> None:
    """Notes when the request came and what it is called: the client's id if it is a sane one."""
    flask.g.arrival = time.monotonic()
    flask.g.marks = []
    given = flask.request.headers.get("X-Request-Id", "")
    flask.g.request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _send_request_id(response: flask.Response) -> flask.Response:
    response.headers["X-Request-Id"] = flask.g.request_id
    return response
