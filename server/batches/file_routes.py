"""POST, GET and DELETE under /v1/files. Uploads go to disk as they arrive, never into memory."""

from __future__ import annotations

import re
import time
from typing import IO, Any, cast

import flask
import gevent
from gunicorn.http.errors import ParseException
from werkzeug.datastructures import MultiDict
from werkzeug.exceptions import (
    HTTPException,
    RequestEntityTooLarge,
    RequestTimeout,
    UnsupportedMediaType,
)
from werkzeug.formparser import FormDataParser

from jaxserve.errors import RequestError
from server.batches.files import KEPT_SECONDS, FileStore, new_file_id
from server.body import check_coding, read_piece
from server.described import BYTES, Description, described
from server.paging import PAGE_QUERY, list_body, read_page, small_whole
from server.services import Services
from server.storage import named_errors
from server.tenant import current_tenant

#: Seconds that an upload may take.
UPLOAD_SECONDS = 1800.0
_FORM_BYTES = 64 * 1024
_LEAST_KEPT, _LONGEST_KEPT = 3600, 30 * 86400
_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": _LEAST_KEPT,
            "maximum": _LONGEST_KEPT,
        },
    },
    "additionalProperties": False,
}
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}")


def files_blueprint(services: Services, files: FileStore) -> flask.Blueprint:
    """All routes."""
    blueprint = flask.Blueprint("files", __name__)
    max_bytes = services.config.max_file_bytes

    @blueprint.post("/v1/files")
    @described(Description(form=_FORM))
    def upload_file() -> dict[str, Any]:
        """Keeps a file, sent as multipart/form-data with its purpose."""
        file_id = new_file_id()
        try:
            form, name = _receive(files, file_id, max_bytes)
            return files.keep(
                {
                    "id": file_id,
                    "tenant": current_tenant(),
                    "name": name,
                    "purpose": _purpose(form),
                    "expires": int(time.time()) + _kept_seconds(form),
                }
            )
        finally:
            files.discard(file_id)

    @blueprint.get("/v1/files")
    @described(Description(query={**PAGE_QUERY, "purpose": {"type": "string"}}))
    def list_files() -> dict[str, Any]:
        """The files that are kept, newest first."""
        page = read_page("purpose", default_limit=10_000)
        purpose = flask.request.args.get("purpose")
        return list_body(files.all(current_tenant(), purpose, descending=page.descending), page)

    @blueprint.get("/v1/files/<file_id>")
    def retrieve_file(file_id: str) -> dict[str, Any]:
        """What is known of a file."""
        return files.get(file_id, current_tenant())

    @blueprint.get("/v1/files/<file_id>/content")
    @described(Description(answers=(BYTES,)))
    def file_content(file_id: str) -> flask.Response:
        """The bytes of a file."""
        found = files.get(file_id, current_tenant())
        with named_errors():
            return flask.send_file(
                files.path(file_id),
                mimetype="application/octet-stream",
                as_attachment=True,
                download_name=found["filename"],
                conditional=False,
            )

    @blueprint.delete("/v1/files/<file_id>")
    def delete_file(file_id: str) -> dict[str, Any]:
        """Forgets a file."""
        files.delete(file_id, current_tenant())
        return {"id": file_id, "object": "file", "deleted": True}

    return blueprint


def _receive(files: FileStore, file_id: str, max_bytes: int) -> tuple[MultiDict[str, str], str]:
    """Writes the upload to disk; the form's other fields and the file's name. Raises RequestError."""
    request = flask.request
    if request.mimetype != "multipart/form-data":
        raise UnsupportedMediaType(
            f"the content type is {request.mimetype[:100] or 'missing'!r}; send multipart/form-data"
        )
    check_coding()
    begun: list[IO[bytes]] = []

    def begin(
        total_content_length: int | None,
        content_type: str | None,
        filename: str | None,
        content_length: int | None = None,
    ) -> IO[bytes]:
        if begun:
            raise RequestError("the form holds more than one file", param="file")
        begun.append(files.begin(file_id))
        return begun[0]

    parser = FormDataParser(
        stream_factory=begin,
        max_form_memory_size=_FORM_BYTES,
        max_content_length=max_bytes + _FORM_BYTES,
        max_form_parts=16,
        silent=False,
    )
    try:
        form, sent = _parse(parser, max_bytes)
        for name in form:
            if name not in _FORM["properties"]:
                raise RequestError(
                    f"unknown parameter {name[:64]!r}", param=name[:64], code="unknown_parameter"
                )
        if "file" not in sent:
            raise RequestError("the form holds no file", param="file", code="missing_parameter")
        with named_errors():
            begun[0].flush()
        if begun[0].tell() > max_bytes or begun[0].seek(0, 2) > max_bytes:
            raise RequestEntityTooLarge(f"the file is larger than {max_bytes} bytes")
        return form, _name(sent["file"].filename)
    finally:
        for file in begun:
            file.close()


class _Arriving:
    """The body, whose breaking off is the client's doing and not, like other OSErrors, the disk's."""

    def read(self, size: int = -1) -> bytes:
        """What the form's parser asks for. Raises RequestError."""
        return read_piece(size)


def _parse(parser: FormDataParser, max_bytes: int) -> tuple[MultiDict[str, str], Any]:
    request = flask.request
    try:
        with (
            gevent.Timeout(UPLOAD_SECONDS, RequestTimeout("the file did not arrive in time")),
            named_errors(),
        ):
            _, form, sent = parser.parse(
                cast("IO[bytes]", _Arriving()),
                request.mimetype,
                request.content_length,
                request.mimetype_params,
            )
    except RequestEntityTooLarge:
        raise RequestEntityTooLarge(
            f"the form holds more than a file of {max_bytes} bytes and the few fields that go with it"
        ) from None
    except (ValueError, ParseException) as error:
        if isinstance(error, HTTPException):
            raise
        raise RequestError(
            "the body is no multipart/form-data that can be read", code="invalid_body"
        ) from None
    return form, sent


def _name(given: str | None) -> str:
    """The file's own name, without a path before it."""
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise RequestError("the file has no name that can be kept", param="file")
    return name


def _purpose(form: MultiDict[str, str]) -> str:
    purpose = form.get("purpose")
    if purpose != "batch":
        shown = "missing" if purpose is None else repr(purpose[:40])
        raise RequestError(
            f"purpose is {shown}; files are for batches here, so it must be 'batch'",
            param="purpose",
        )
    return purpose


def _kept_seconds(form: MultiDict[str, str]) -> int:
    anchor, text = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and text is None:
        return KEPT_SECONDS
    if anchor != "created_at":
        raise RequestError("expires_after[anchor] must be created_at", param="expires_after")
    return check_kept_seconds(small_whole(text or ""))


def check_kept_seconds(seconds: int) -> int:
    """`seconds`, which is how long something may be kept. Raises RequestError."""
    if not _LEAST_KEPT <= seconds <= _LONGEST_KEPT:
        raise RequestError(
            f"expires_after's seconds must be {_LEAST_KEPT} to {_LONGEST_KEPT}",
            param="expires_after",
        )
    return seconds
