"""Guessing tokens against not guessing: the same engine, prompts and answers, both ways in turn.

    python benchmarks/speculation.py [--model NAME] [--rounds 5] [--batch 1 8] [--tokens 128]
                                     [--workload copy chat random]

Workloads: `copy` has a prompt of about 1,000 tokens that must be written again with a small change,
so the answer repeats it; `chat` are questions; `random` is random tokens, answered at a temperature
that makes nearly every token equally likely, so nothing can be guessed and speculation must stay
out of the way. A round answers a workload with guesses and without, in turn; prompts are in the
prefix cache from the first round on. Printed are the medians over rounds of tokens per second and of
the ratio within a round, the share of answers that are equal, and guesses made and confirmed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from jaxserve import LLM, SamplingParams
from jaxserve.config import DEFAULT_MODEL

Prompts = list[list[int]]

_NAMES = ("Ann", "Boris", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana")
_PLACES = ("Oslo", "Lima", "Cairo", "Kyoto", "Perth", "Quito", "Riga", "Tunis")
_THINGS = ("maps", "clocks", "boats", "lamps", "kites", "drums", "books", "chairs")
_QUESTIONS = (
    "Why is the sky blue? Explain it to a child.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I think of when I plan a garden?",
    "How does a bicycle stay upright?",
    "Give me advice on learning a language as an adult.",
    "Describe a storm at sea.",
    "What is the difference between weather and climate?",
    "Write a poem about an old train station.",
)


def copying(llm: LLM, batch: int, seed: int) -> Prompts:
    """A table of random records, to be written again."""
    prompts = []
    for number in range(batch):
        rng = random.Random(f"{seed}.{number}")
        lines = [
            f"{rng.choice(_NAMES)} from {rng.choice(_PLACES)} sold {rng.randrange(10, 999)} "
            f"{rng.choice(_THINGS)} on day {rng.randrange(1, 366)}."
            for _ in range(60)
        ]
        text = "\n".join(lines)
        order = f"Copy this text word for word, from the first line to the last:\n\n{text}"
        content = [{"role": "user", "content": order}]
        prompts.append(llm.chat_prompt(content))
    return prompts


def chatting(llm: LLM, batch: int, seed: int) -> Prompts:
    """Questions, each batch the same."""
    del seed
    return [
        llm.chat_prompt([{"role": "user", "content": _QUESTIONS[number % len(_QUESTIONS)]}])
        for number in range(batch)
    ]


def rolling(llm: LLM, batch: int, seed: int) -> Prompts:
    """500 random tokens each."""
    size = llm.report.model.vocab_size
    rng = random.Random(seed)
    return [[rng.randrange(size) for _ in range(500)] for _ in range(batch)]


WORKLOADS: dict[str, tuple[Callable[[LLM, int, int], Prompts], float]] = {
    "copy": (copying, 0.0),
    "chat": (chatting, 0.0),
    "random": (rolling, 100.0),
}


def answer(llm: LLM, prompts: Prompts, temperature: float, tokens: int) -> tuple[float, Prompts]:
    """Seconds from the first token on until all is answered, and the answers."""
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
    start = time.perf_counter()
    answers = llm.generate(list(prompts), sampling)
    return time.perf_counter() - start, [answer.token_ids for answer in answers]


def guesses(llm: LLM) -> tuple[float, float]:
    """Guesses put to the test so far, and how many of them came true."""
    lines = (line.split() for line in llm.metrics().splitlines())
    values = {line[0].partition("{")[0]: line[-1] for line in lines}
    return (
        float(values["vllm:spec_decode_num_draft_tokens_total"]),
        float(values["vllm:spec_decode_num_accepted_tokens_total"]),
    )


def measure(
    engines: dict[str, LLM], workload: str, batch: int, tokens: int, rounds: int
) -> list[str]:
    """One line of the table."""
    make, temperature = WORKLOADS[workload]
    prompts = make(engines["on"], batch, 0)
    for llm in engines.values():
        answer(llm, prompts, temperature, tokens)
    before = guesses(engines["on"])
    rates: dict[str, list[float]] = {name: [] for name in engines}
    equal = []
    for number in range(rounds):
        found: dict[str, Prompts] = {}
        for name in sorted(engines, reverse=bool(number % 2)):
            seconds, found[name] = answer(engines[name], prompts, temperature, tokens)
            rates[name].append(batch * tokens / seconds)
        pairs = zip(found["on"], found["off"], strict=True)
        equal.append(statistics.mean(left == right for left, right in pairs))
    guessed, confirmed = (
        (after - earlier) / rounds / batch
        for earlier, after in zip(before, guesses(engines["on"]), strict=True)
    )
    ratio = statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
    return [
        workload,
        str(batch),
        f"{statistics.median(rates['off']):.1f}",
        f"{statistics.median(rates['on']):.1f}",
        f"{ratio:.2f}",
        f"{statistics.mean(equal):.0%}",
        f"{guessed:.0f}",
        f"{confirmed:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--quantization", default=None)
    options = parser.parse_args()
    more = {} if options.quantization is None else {"quantization": options.quantization}
    engines = {
        "on": LLM(options.model, speculative="ngram", max_model_len=2048, **more),
        "off": LLM(options.model, speculative="off", max_model_len=2048, **more),
    }
    print(f"weights: {engines['on'].report.weights}; {options.tokens} tokens per answer")
    heads = ["workload", "batch", "off t/s", "on t/s", "ratio", "equal", "guessed", "confirmed"]
    print(" | ".join(heads))
    for workload in options.workload:
        for batch in options.batch:
            line = measure(engines, workload, batch, options.tokens, options.rounds)
            print(" | ".join(part.rjust(len(head)) for part, head in zip(line, heads, strict=True)))


if __name__ == "__main__":
    main()
