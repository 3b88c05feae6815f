"""POST and GET under /v1/batches. What a batch asks for is done by `worker`, not here."""

from __future__ import annotations

from typing import Any

import flask
import msgspec

from jaxserve.errors import RequestError
from server.batches.batches import WINDOWS, BatchStore
from server.batches.file_routes import check_kept_seconds
from server.batches.files import FileStore
from server.batches.line import ENDPOINTS
from server.body import read_json
from server.described import Description, described
from server.openai.schema import Body
from server.paging import PAGE_QUERY, list_body, read_page
from server.services import Services
from server.tenant import current_tenant


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """For how long the files that a batch makes are kept, in seconds; anchor: created_at."""

    anchor: str
    seconds: int


class BatchBody(Body, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def batches_blueprint(services: Services, batches: BatchStore, files: FileStore) -> flask.Blueprint:
    """All routes."""
    blueprint = flask.Blueprint("batches", __name__)

    @blueprint.post("/v1/batches")
    @described(Description(body=BatchBody))
    def create_batch() -> dict[str, Any]:
        """Begins to answer all requests of a file."""
        body = read_json(BatchBody, services.config.max_body_bytes)
        model, tenant = services.check_model(body.model), current_tenant()
        if body.endpoint not in ENDPOINTS:
            raise RequestError(
                f"endpoint is {body.endpoint[:64]!r}; it must be one of {', '.join(ENDPOINTS)}",
                param="endpoint",
            )
        if body.completion_window not in WINDOWS:
            raise RequestError(
                f"completion_window is {body.completion_window[:40]!r}; it must be 24h",
                param="completion_window",
            )
        try:
            files.get(body.input_file_id, tenant)
        except RequestError as error:
            error.param = "input_file_id"
            raise
        return batches.create(_fields(body), model=model, tenant=tenant)

    @blueprint.get("/v1/batches")
    @described(Description(query=PAGE_QUERY))
    def list_batches() -> dict[str, Any]:
        """All batches, newest first."""
        page = read_page()
        return list_body(batches.all(current_tenant(), descending=page.descending), page)

    @blueprint.get("/v1/batches/<batch_id>")
    def retrieve_batch(batch_id: str) -> dict[str, Any]:
        """How far a batch is."""
        return batches.get(batch_id, current_tenant())

    @blueprint.post("/v1/batches/<batch_id>/cancel")
    def cancel_batch(batch_id: str) -> dict[str, Any]:
        """Ends a batch early; what is answered by then can be fetched."""
        return batches.cancel(batch_id, current_tenant())

    return blueprint


def _fields(body: BatchBody) -> dict[str, Any]:
    kept = None
    if body.output_expires_after is not None:
        if body.output_expires_after.anchor != "created_at":
            raise RequestError(
                "output_expires_after.anchor must be created_at", param="output_expires_after"
            )
        kept = check_kept_seconds(body.output_expires_after.seconds)
    return {
        "endpoint": body.endpoint,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "metadata": body.metadata,
        "output_expires_after": kept,
    }
