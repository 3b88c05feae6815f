"""An engine with a device whose arithmetic can be done by hand.

The fake's next token is (sum of all tokens of the sequence + their number) modulo 97: it depends on
every token and on nothing else, so any wrong, missing or repeated token shows.
"""

from jaxserve.engine.engine import AdmissionLimits, Engine, SampledRow
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import RequestError
from jaxserve.kv.page_pool import PagePool
from jaxserve.request import GenerationRequest, SamplingParams

VOCAB = 97


def next_token(tokens):
    return (sum(tokens) + len(tokens)) % VOCAB


def expected(prompt, count, ends=()):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


class CountingRunner:
    """Keeps, like a device, the tokens written into each page, and the last token of each slot."""

    vocab_size = VOCAB

    def __init__(self, page_size):
        self.page_size = page_size
        self.pages, self.last = {}, {}
        self.unread = []
        self.fail_on = None
        self.bad = {}  # first token of a prompt: at how many tokens its logits become NaN
        self.max_unread = 0

    def check_request(self, request):
        if request.sampling.logit_bias:
            raise RequestError("no biases here", param="logit_bias")

    def bucket_tokens(self, plan):
        return plan.num_tokens

    def reset(self):
        self.pages, self.last = {}, {}

    def dispatch(self, plan, settle=None):
        if self.fail_on is not None and any(
            row.sequence.request.prompt_ids[0] == self.fail_on for row in plan.rows
        ):
            raise RuntimeError("the device is on fire")
        written = []
        for row in plan.rows:
            sequence, slot = row.sequence, row.sequence.slot
            new = list(sequence.tokens[row.start : row.num_known])
            if row.feeds_back:
                new.append(self.last[slot])
            new += row.draft
            assert len(new) == row.count
            for position, token in enumerate(new, row.start):
                place = (sequence.pages[position // self.page_size], position % self.page_size)
                assert place[0] != 0, "the trash page belongs to nobody"
                self.pages[place] = token
            written.append((row, list(sequence.pages)))
        if settle is not None:
            settle()  # as on a device: the inputs are made before, the tokens after it
        results = []
        for row, pages in written:
            tokens = [
                self.pages[pages[i // self.page_size], i % self.page_size]
                for i in range(row.num_known)
            ]
            sampled = []
            for guess in [*row.draft, None][: row.num_samples]:
                sampled.append(next_token(tokens))
                if guess != sampled[-1]:
                    break
                tokens.append(guess)
            if sampled:
                self.last[row.sequence.slot] = sampled[-1]
            first = row.sequence.request.prompt_ids[0]
            sound = max(0, self.bad[first] - row.num_known) if first in self.bad else len(sampled)
            results.append(SampledRow(tokens=sampled[:sound], ok=sound >= len(sampled)))
        self.unread.append(results)
        self.max_unread = max(self.max_unread, len(self.unread))
        return results

    def read(self, handle):
        self.unread.remove(handle)
        return handle


def make_engine(
    pages=64,
    slots=4,
    tokens=16,
    page_size=4,
    max_len=100,
    caching=True,
    asynchronous=True,
    drafting=None,
    **limits,
):
    runner = CountingRunner(page_size)
    scheduler = Scheduler(
        PagePool(pages, page_size),
        max_num_seqs=slots,
        max_step_tokens=tokens,
        prefix_caching=caching,
    )
    bounds = {"max_queue_len": 1000, "max_queued_tokens": 10_000, "eos_ids": frozenset({96})}
    engine = Engine(
        runner,
        scheduler,
        AdmissionLimits(max_model_len=max_len, **(bounds | limits)),
        EngineMetrics("counting"),
        asynchronous=asynchronous,
        drafting=drafting,
    )
    return engine, runner


def request(name, prompt, **sampling):
    return GenerationRequest(
        request_id=name, prompt_ids=list(prompt), sampling=SamplingParams(**sampling)
    )


def run(engine):
    """All outputs by request, checking the books after every step and one final output each."""
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert engine.scheduler.pool.num_owned == 0
    for pieces in outputs.values():
        assert [piece.finish_reason is not None for piece in pieces].count(True) == 1
        assert pieces[-1].finish_reason is not None
    return outputs


def tokens_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def check_solo_tokens(engine, specs, *, abort_at):
    """Runs requests that come at given turns, and asserts that each gets the tokens it has alone.

    specs: (prompt's length, answer's length, the prompt's token, turn of arrival). Request 0 is
    aborted at turn `abort_at`, if it still runs: nothing may be said of it any more.
    """
    outputs, waiting = {}, sorted(enumerate(specs), key=lambda item: item[1][3])
    aborted, turn = set(), 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1][3] <= turn:
            index, (length, answer, kind, _) = waiting.pop(0)
            engine.add(request(str(index), [kind] * length, max_tokens=answer, ignore_eos=True))
        if turn == abort_at and engine.abort("0") is not None:
            aborted.add("0")
        for output in engine.step():
            assert output.request_id not in aborted
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        turn += 1
    assert engine.scheduler.pool.num_owned == 0
    for index, (length, answer, kind, _) in enumerate(specs):
        if str(index) not in aborted:
            assert tokens_of(outputs[str(index)]) == expected([kind] * length, answer)
