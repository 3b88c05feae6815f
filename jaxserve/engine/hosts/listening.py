"""The leader's open port while followers are awaited (before step 1)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from jaxserve.errors import ResourceError

_LOOK_SECONDS = 0.2


def check_free(host: str, port: int) -> None:
    """Raises ResourceError unless this process can listen there; for jax, which would end it."""
    _bind(host, port).close()


@contextlib.contextmanager
def listen(host: str, port: int, meet: Callable[[socket.socket], None]) -> Iterator[None]:
    """Gives each connection that comes during the block to `meet`, in a thread of its own."""
    done = threading.Event()
    with _bind(host, port) as listener:
        listener.settimeout(_LOOK_SECONDS)

        def accept() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError, ConnectionError):
                    meet(listener.accept()[0])

        thread = threading.Thread(target=accept, name="hosts-listen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ResourceError(f"--coordinator-address: {host!r} has no address: {error}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ResourceError(
            f"process 0 cannot listen on {host}:{port}: {error.strerror}; --coordinator-address "
            "must be an address of this machine, with a port that is free as is the one after it"
        ) from None
    return listener
