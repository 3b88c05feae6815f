"""Every error that a user can cause, as one tree.

    JaxserveError
    ├── UsageError              wrong arguments or a setting that cannot work         exit code 2
    ├── ModelError              the model cannot be used
    │   ├── ModelNotFoundError      no such file, folder, name or hub id
    │   ├── ModelFormatError        truncated, corrupt or contradictory files
    │   ├── UnsupportedModelError   an architecture or a feature that we do not have
    │   └── DownloadError           network, registry or hash trouble
    ├── ResourceError           memory, port, file or device is not available
    ├── RequestError            one request is wrong (HTTP 400)
    │   ├── PromptTooLongError      longer than the context or the page pool
    │   ├── AccessError             no key, an unknown one (HTTP 401), or not for this (HTTP 403)
    │   └── NotFoundError           unknown model, adapter or route (HTTP 404)
    ├── RefusedError            the request was right but is not taken now (HTTP 429)
    │   ├── LimitError              a tenant's rate (HTTP 429) or its budget (HTTP 402) is used up
    │   └── StorageError            nothing can be kept: the disk is full, say (HTTP 507)
    └── EngineError             the engine cannot answer
        ├── EngineGoneError         it died, is restarting or does not answer (HTTP 503)
        └── DeviceLostError         a part of what it runs on is gone for good

Messages are one line: what is wrong, with its value, then the way out. `checkpoints` and
`pallas_kernels` know nothing of jaxserve; `checkpoints.errors` holds the bases that
`ModelError`'s children share.
"""

from __future__ import annotations

from checkpoints.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    DownloadFailedError,
)


class JaxserveError(Exception):
    """Base of all errors that a user can cause. `str(error)` is a single readable line."""

    exit_code = 1


class UsageError(JaxserveError):
    """Wrong arguments, or settings that contradict one another."""

    exit_code = 2


class ModelError(JaxserveError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError, CheckpointNotFoundError):
    """No such file, folder, name or hub id."""


class ModelFormatError(ModelError, CheckpointFormatError):
    """Truncated, corrupt or contradictory model files."""


class UnsupportedModelError(ModelError):
    """An architecture or a feature that this version does not have."""


class DownloadError(ModelError, DownloadFailedError):
    """A model could not be fetched."""


class ResourceError(JaxserveError):
    """Memory, a port, a file or a device is not available."""


class RequestError(JaxserveError):
    """One request is wrong. `param` names the offending field, as OpenAI's API does."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt (with the answer it asks for) does not fit the context or the page pool."""


class NotFoundError(RequestError):
    """Unknown model, adapter or object."""

    status = 404


class AccessError(RequestError):
    """Whoever asks has not shown that they may."""

    def __init__(self, message: str, *, code: str, status: int = 401) -> None:
        super().__init__(message, code=code)
        self.status = status


class RefusedError(JaxserveError):
    """A correct request that is not taken now; `reason` is a short stable word for metrics."""

    status = 429

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LimitError(RefusedError):
    """A tenant has used up what it may: for now (429), or what its day allows (402).

    retry_after: seconds after which the same request may be taken. headers: what is left, in HTTP.
    """

    def __init__(self, message: str, *, reason: str, retry_after: float, status: int = 429) -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.retry_after = retry_after
        self.headers: dict[str, str] = {}


class StorageError(RefusedError):
    """What was to be kept (a file, a batch, a response) could not be written or read."""

    status = 507

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message, reason="storage_full" if full else "storage_unavailable")


class EngineError(JaxserveError):
    """The engine could not finish the request."""

    status = 500


class EngineGoneError(EngineError):
    """The engine died, is restarting, or does not answer."""

    status = 503


class DeviceLostError(EngineError):
    """A part of what the engine runs on is gone: no later step can succeed, either."""


#: What the command line prints without a traceback.
USER_ERRORS: tuple[type[Exception], ...] = (JaxserveError, CheckpointError)
