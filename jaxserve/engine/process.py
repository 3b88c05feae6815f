"""The engine process: `python -m jaxserve.engine.process --address ipc://... --config JSON`.

Started by the server's launcher. Owns the devices; talks to front-end workers through
`jaxserve.engine.link`, and to the engine processes of other hosts through `jaxserve.engine.hosts`. Exit codes: 0 after SIGTERM, 3 for what a restart cannot cure (a wrong
model), 4 for a setting that cannot work; the last line on stderr says what. Anything else is a
crash.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import types

import msgspec

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.engine.build import make_engine
from jaxserve.engine.hosts.ending import end_without_jax
from jaxserve.engine.hosts.lead import lead
from jaxserve.engine.link import EngineLink
from jaxserve.engine.loop import EngineLoop
from jaxserve.engine.report import EngineReport
from jaxserve.errors import USER_ERRORS, EngineError, UsageError
from jaxserve.messages import EngineInfo
from jaxserve.request import MAX_LOGPROBS

EXIT_USER_ERROR, EXIT_USAGE_ERROR = 3, 4


def main(arguments: list[str] | None = None) -> int:
    """Runs until SIGTERM."""
    parser = argparse.ArgumentParser(prog="jaxserve.engine.process")
    parser.add_argument("--address", required=True, help="where workers connect, ipc://...")
    parser.add_argument("--config", required=True, help="an EngineConfig as JSON")
    parser.add_argument("--hosts", default="{}", help="a HostsConfig as JSON, without auto")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="[engine] %(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    config = msgspec.json.decode(options.config, type=EngineConfig)
    hosts = msgspec.json.decode(options.hosts, type=HostsConfig)
    stop = _StopSignal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends us in order
    signal.signal(signal.SIGTERM, stop)
    code = _run(config, hosts, options.address, stop)
    if hosts.several:
        end_without_jax(code)
    return code


def _run(config: EngineConfig, hosts: HostsConfig, address: str, stop: _StopSignal) -> int:
    link = EngineLink(address)
    try:
        with lead(hosts, config) as others:
            engine, report = make_engine(config, hosts=others)
            stop.serving = True
            EngineLoop(engine, link, engine_info(report, config), stop.event, report.scorer).run()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE_ERROR if isinstance(error, UsageError) else EXIT_USER_ERROR
    except _StoppedError:
        return 0
    finally:
        link.close()
    return 0


class _StoppedError(BaseException):
    """SIGTERM while loading or compiling."""


class _StopSignal:
    """SIGTERM's handler: the loop ends after its step; before there is a loop, the process does."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.serving = False

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        self.event.set()
        if not self.serving:
            raise _StoppedError


def engine_info(report: EngineReport, config: EngineConfig) -> EngineInfo:
    """What the front end must know."""
    return EngineInfo(
        model_name=report.model_name,
        vocab_size=report.model.vocab_size,
        max_model_len=report.max_model_len,
        max_logprobs=MAX_LOGPROBS,
        page_size=report.page_size,
        num_pages=report.memory.num_pages,
        embeddings=config.embeddings,
        prompt_logprobs=config.prompt_logprobs,
    )


if __name__ == "__main__":
    sys.exit(main())
