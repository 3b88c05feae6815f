"""How byte-level BPE vocabularies cut text before merging, by the name GGUF files use (step 2).

The expressions are those of the models' own tokenizer.json files. "isolated" splits make every
match, and every stretch between two matches, a piece of its own.
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from jaxserve.errors import UnsupportedModelError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LOWER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}",)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_SLASH_TAIL}",)
_GPT4O = (
    rf"{_LOWER_WORD}{_CONTRACTION}?|{_UPPER_WORD}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}",
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "llama-bpe",
            "llama3",
            "llama-v3",
            "dbrx",
            "smaug-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "lfm2",
            "chatglm-bpe",
            "glm4",
        ),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
}
#: GPT-2's own expression, which the library has built in. "default" is what files say whose
#: vocabulary came without a pre-tokeniser, as those of the time of GPT-2 do.
_GPT2 = ("gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion")
#: The same after cutting out single digits.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

#: A piece that is a token as a whole becomes it, whether merges lead there or not.
IGNORE_MERGES = frozenset(
    {
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "lfm2",
        "glm4",
        "tekken",
    }
)
#: A BOS comes first unless the file says otherwise.
ADD_BOS = frozenset(IGNORE_MERGES - {"glm4"})


def make_pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokeniser that `tokenizer.ggml.pre` names; raises UnsupportedModelError."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _GPT2:
        return byte_level
    if name in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name not in _SPLITS:
        known = ", ".join(sorted([*_GPT2, *_SINGLE_DIGITS, *_SPLITS]))
        raise UnsupportedModelError(
            f"the GGUF vocabulary's pre-tokeniser {name!r} is not supported; known: {known}. "
            "The original Hugging Face folder with its tokenizer.json works instead"
        )
    splits = [pre_tokenizers.Split(Regex(it), behavior="isolated") for it in _SPLITS[name]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])
