"""An offline answer is the same however many tokens a step brought at once."""

import pytest
from byte_tokenizer import ByteTokenizer

from jaxserve.llm import _Answer
from jaxserve.request import FinishReason, TokenLogprobs, TokenOutput
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer

TEXT = list(b"one two END three")


def take(sizes, stop=("END",), end=FinishReason.LENGTH):
    """TEXT in outputs of so many tokens, until the answer has stopped by itself."""
    answer = _Answer("a", 3, IncrementalDetokenizer(ByteTokenizer(), skip_special=True, stop=stop))
    done = 0
    for size in sizes:
        ids = TEXT[done : done + size]
        done += size
        answer.take(
            TokenOutput(
                request_id="a",
                token_ids=ids,
                logprobs=[
                    TokenLogprobs(token_id=token, logprob=-0.5, top_ids=[], top_logprobs=[])
                    for token in ids
                ],
                finish_reason=end if done >= len(TEXT) else None,
            )
        )
        if answer.stopped:
            break
    return answer.whole()


@pytest.mark.parametrize("sizes", [[1] * 17, [17], [9, 8], [10, 7], [3] * 6])
def test_tokens_after_a_stop_string_do_not_count(sizes):
    whole = take(sizes)
    assert whole.text == "one two "
    assert whole.token_ids == TEXT[:11]
    assert [item.token_id for item in whole.logprobs] == TEXT[:11]
    assert whole.finish_reason is FinishReason.STOP
    assert whole.stop_reason == "END"


@pytest.mark.parametrize("sizes", [[1] * 17, [17], [9, 8]])
def test_without_a_stop_string_all_tokens_count(sizes):
    whole = take(sizes, stop=())
    assert whole.token_ids == TEXT
    assert whole.text == "one two END three"
    assert whole.finish_reason is FinishReason.LENGTH
