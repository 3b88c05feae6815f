"""How evenly running answers grow while long prompts arrive, with chunks by time and by count.

    python benchmarks/itl_under_prefill.py [--streams 4] [--prompts 3] [--pause 0] [--targets 0 100]

The real engine in this process, default settings. A few greedy answers grow without end; prompts of
4,000 fresh tokens arrive, the next one `--pause` seconds after the last one's first token (0: one is
always being computed). For each objective, in turn: gaps between two tokens of the running answers,
from the first prompt's arrival to the last one's first token. An objective of 0 is the baseline:
chunks as large as a step allows, whatever they take. The bar: the 99th percentile within twice the
median.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time

from jaxserve.config import DEFAULT_ITL_TARGET_MS, DEFAULT_MODEL, EngineConfig
from jaxserve.engine.build import make_engine
from jaxserve.engine.chunking import ChunkPolicy
from jaxserve.engine.engine import Engine
from jaxserve.request import GenerationRequest, SamplingParams

_STREAM_PROMPT = 128
_LOW, _HIGH = 5, 40_000
#: Tokens of each running answer before measuring.
_SETTLE = 12


@dataclasses.dataclass(slots=True, kw_only=True)
class Run:
    """What one run gave, in seconds."""

    gaps: list[float] = dataclasses.field(default_factory=list)
    first_tokens: list[float] = dataclasses.field(default_factory=list)

    def line(self, name: str) -> str:
        ordered = sorted(self.gaps)
        median = statistics.median(ordered)
        tail = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return (
            f"{name:>12} {len(ordered):>7} {1000 * median:>10.1f} {1000 * tail:>10.1f} "
            f"{1000 * ordered[-1]:>10.1f} {tail / median:>11.2f} "
            f"{statistics.mean(self.first_tokens):>12.2f}"
        )


class Load:
    """Running answers and the prompts that arrive beside them, on one engine."""

    def __init__(self, engine: Engine, rng: random.Random, vocab_size: int) -> None:
        self._engine = engine
        self._rng = rng
        self._high = min(_HIGH, vocab_size)
        self._number = 0
        self._last: dict[str, float] = {}

    def start(self, num_streams: int) -> None:
        """Answers that grow until `stop`, past their first tokens."""
        for _ in range(num_streams):
            name = self.add(_STREAM_PROMPT, max_tokens=None)
            self._last[name] = 0.0
        run = Run()
        while len(run.gaps) < _SETTLE * num_streams:
            self.turn(run)

    def stop(self) -> None:
        """Ends the running answers."""
        for name in self._last:
            self._engine.abort(name)
        self._last.clear()
        while self._engine.has_work:
            self._engine.step()

    def add(self, length: int, *, max_tokens: int | None) -> str:
        """A greedy request with a prompt that nobody has seen before; returns its name."""
        self._number += 1
        ids = [self._rng.randrange(_LOW, self._high) for _ in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = str(self._number)
        self._engine.add(GenerationRequest(request_id=name, prompt_ids=ids, sampling=sampling))
        return name

    def turn(self, run: Run) -> set[str]:
        """One step: enters the gaps of the running answers, returns whom else it gave a token."""
        outputs = self._engine.step()
        now = time.monotonic()
        for output in outputs:
            last = self._last.get(output.request_id)
            if last is not None and output.token_ids:
                run.gaps += [(now - last) / len(output.token_ids)] if last else []
                self._last[output.request_id] = now
        return {output.request_id for output in outputs if output.token_ids} - self._last.keys()


def measure(load: Load, num_prompts: int, length: int, pause: float) -> Run:
    """Lets the prompts arrive one after the other."""
    run = Run()
    for _ in range(num_prompts):
        arrival = time.monotonic()
        name = load.add(length, max_tokens=1)
        while name not in load.turn(run):
            pass
        run.first_tokens.append(time.monotonic() - arrival)
        until = time.monotonic() + pause
        while time.monotonic() < until:
            load.turn(run)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", default=EngineConfig().quantization)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--length", type=int, default=4000)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--targets", type=float, nargs="+", default=[0, DEFAULT_ITL_TARGET_MS])
    options = parser.parse_args()
    config = EngineConfig(model=options.model, quantization=options.quantization, speculative="off")
    engine, report = make_engine(config)
    load = Load(engine, random.Random(0), report.model.vocab_size)
    costs = engine.scheduler.chunks.costs
    print(
        f"{report.model_name}, {report.weights}: {options.streams} answers, {options.prompts} "
        f"prompts of {options.length} tokens, pause {options.pause} s"
    )
    print("target in ms    gaps  median ms     99% ms     max ms  99%/median  first token s")
    for target in options.targets:
        engine.scheduler.chunks = ChunkPolicy(
            costs,
            max_step_tokens=config.max_num_batched_tokens,
            objective=target / 1000 if target else None,
        )
        load.start(options.streams)
        print(measure(load, options.prompts, options.length, options.pause).line(f"{target:g}"))
        load.stop()
    engine.check_integrity()


if __name__ == "__main__":
    main()
