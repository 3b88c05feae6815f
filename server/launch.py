"""`jaxserve serve`: one engine process, the front-end workers, and their parent, which is this.

The parent imports neither jax nor gevent. It holds the port from the first moment, says `ready`
once a request would be answered, restarts what dies and ends what is stuck, and on SIGTERM drains:
workers first, engine last. A second SIGTERM or Ctrl-C ends everything at once. The children die
with it. An engine over several hosts is not started again, since its other processes end with it.
"""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import msgspec

from checkpoints.resolve import resolve_model
from jaxserve.config import EngineConfig, HostsConfig, ServerConfig, cache_folder
from jaxserve.errors import ResourceError
from server.access.keyfile import read_key_file
from server.children import USAGE_ERROR_EXIT, USER_ERROR_EXIT, Child
from server.settings import FrontSettings
from server.watch import EngineWatch

ENGINE_COMMAND = (sys.executable, "-m", "jaxserve.engine.process")
FRONT_APP = "server.worker:make_app()"
BACKLOG = 4096
_TICK = 0.05


def serve(
    engine: EngineConfig,
    server: ServerConfig,
    engine_command: list[str] | None = None,
    front_app: str = FRONT_APP,
    hosts: HostsConfig | None = None,
) -> int:
    """Serves until it is told to stop. Returns the exit code.

    hosts: what the engine leads, if it spans several.
    engine_command: another engine than ours; started with `--address` and `--config` added.
    front_app: what gunicorn loads.
    Raises ResourceError if the port is in use or the host is not one of this machine's, and
    CheckpointError if there is no such model or it cannot be pulled, and UsageError for a key file
    that cannot be used.
    """
    if server.api_keys is not None:
        read_key_file(pathlib.Path(server.api_keys).expanduser())
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(server.host, server.port))
        if engine_command is None:
            resolve_model(engine.model, cache_folder())  # once, before two processes need it
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-"))  # mode 0700
        settings = FrontSettings(
            address=f"ipc://{folder}/engine",
            listen_fd=listener.fileno(),
            folder=folder,
            engine=engine,
            server=server,
        )
        command = [*(engine_command or ENGINE_COMMAND)]
        several = hosts is not None and hosts.several
        if several:
            command += ["--hosts", msgspec.json.encode(hosts).decode()]
        return _Parent(settings, listener, command, front_app, restart=not several).run()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; clients that come before the workers wait in its queue."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ResourceError(f"--host {host!r} is no address of this machine: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ResourceError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host"
        ) from None
    return listener


class _Parent:
    """Looks after the two children until a signal or a crash loop ends them."""

    def __init__(
        self,
        settings: FrontSettings,
        listener: socket.socket,
        engine_command: Sequence[str],
        front_app: str,
        *,
        restart: bool,
    ) -> None:
        self._restart = restart
        self._settings = settings
        self._listener = listener
        self._address = listener.getsockname()
        config = msgspec.json.encode(settings.engine).decode()
        self._engine = Child(
            "the engine",
            [
                *engine_command,
                *("--address", settings.address),
                *("--config", config),
                *("--log-level", settings.server.log_level),
            ],
            capture=True,
        )
        self._front = Child(
            "the front end",
            [sys.executable, "-m", "gunicorn", "-c", "python:server.gunicorn_conf", front_app],
            environment=settings.to_environment(),
            pass_fds=[settings.listen_fd],
            capture=True,
        )
        self._watch_engine = EngineWatch(settings.address)
        self._signals = 0
        self._announced = False
        self._next_look = 0.0

    def run(self) -> int:
        """Starts the children and returns the exit code once all is over."""
        with self._handling_signals():
            try:
                self._engine.start()
                self._front.start()
                return self._watch()
            finally:
                self._front.kill()
                self._engine.kill()
                self._watch_engine.close()

    def _watch(self) -> int:
        while not self._signals:
            stuck = self._watch_engine.look()
            if stuck is not None:
                _say(f"{self._engine.name} is stuck: {stuck}; ending it")
                self._engine.strike()
                self._watch_engine.forget()
            for child in (self._engine, self._front):
                child.forward()
                if child.exit_code is not None and (code := self._give_up(child)):
                    return code
                child.start_if_due()
            if not self._announced and self._answers():
                self._announced = True
                print(f"ready: {self._url()}", flush=True)
            time.sleep(_TICK)
        return self._drain()

    def _give_up(self, child: Child) -> int:
        """What to do about a child that ended: an exit code, or 0 when it is to start again."""
        code = child.exit_code
        child.ended()
        if child is self._engine:
            self._watch_engine.forget()
        if code in (USER_ERROR_EXIT, USAGE_ERROR_EXIT):
            return 2 if code == USAGE_ERROR_EXIT else 1
        if child is self._engine and not self._restart:
            _say(f"{child.name} ended with {_status(code)}; start the command again on all hosts")
            self._drain()  # what is open has its error by now
            return 1
        if child.crash_loop:
            words = f"; its last words: {child.last_line}" if child.last_line else ""
            _say(f"{child.name} ended {child.failures} times in a row, giving up{words}")
            return 1
        _say(f"{child.name} ended with {_status(code)}; starting it again")
        return 0

    def _answers(self) -> bool:
        """Whether all workers are there and /ready says yes; looks twice a second at most."""
        if self._settings.num_ready() < self._settings.server.workers:
            return False
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + 0.5
        host, port = self._address[:2]
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        connection = http.client.HTTPConnection(anywhere.get(host, host), port, timeout=2)
        try:
            connection.request("GET", "/ready", headers={"Connection": "close"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _drain(self) -> int:
        """Lets open answers finish. Returns 0, or 1 if a second signal cut it short."""
        self._listener.close()  # or new clients would wait for an answer that never comes
        deadline = time.monotonic() + self._settings.server.drain_seconds + 10
        for child in (self._front, self._engine):
            child.terminate()
            while not child.wait(_TICK) and time.monotonic() < deadline:
                self._engine.forward()
                if self._signals > 1:
                    return 1
        return 0

    def _url(self) -> str:
        host, port = self._address[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, count) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"status {code}"


def _say(text: str) -> None:
    print(f"jaxserve: {text}", file=sys.stderr, flush=True)
