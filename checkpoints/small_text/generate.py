"""Writes generated.txt from grammar.txt: `python -m checkpoints.small_text.generate`.

A rule is expanded at random, with a fixed seed, so that the same grammar gives the same text on
every machine. Names are remembered within a document, so that what a text says early can be asked
for late. Must know nothing of tokens or models.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re

FOLDER = pathlib.Path(__file__).parent
GRAMMAR_FILE = FOLDER / "grammar.txt"
GENERATED_FILE = FOLDER / "generated.txt"
SEPARATOR = "\n---\n"
SEED = 20
WRITTEN_COPIES = 4

#: How many documents begin with each rule.
PLAN: tuple[tuple[str, int], ...] = (
    ("weather_report", 36),
    ("lighthouse_story", 36),
    ("lighthouse_log", 14),
    ("bakery_story", 36),
    ("recipe", 14),
    ("train_story", 36),
    ("timetable", 12),
    ("cat_story", 44),
    ("server_walk", 36),
    ("long_questions", 14),
    ("collection", 6),
    ("repeat_text", 60),
    ("lookup", 50),
    ("chat", 320),
    ("long_chat", 12),
    ("recall_chat", 130),
    ("repeat_chat", 80),
    ("lookup_chat", 50),
    ("plain_chat", 40),
)
#: Documents of these rules are marked, so that their speakers become control tokens.
CHAT_RULES = ("chat", "long_chat", "recall_chat", "repeat_chat", "lookup_chat")
CHAT_MARK = "#chat\n"

Grammar = dict[str, list[str]]
_REFERENCE = re.compile(r"\{(?:([A-Z][A-Z0-9]*)(?::([a-z_]+))?|(!?)([a-z_]+))\}")


class GrammarError(ValueError):
    """A rule that is missing, empty or asks for a name that was never bound."""


def parse_grammar(text: str) -> Grammar:
    """Rules by name. A rule is `[name]`, then one alternative per line, until a blank line."""
    rules: Grammar = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            current = None
        elif line.startswith("[") and line.endswith("]"):
            current = rules.setdefault(line[1:-1], [])
        elif current is None:
            raise GrammarError(f"grammar line {line!r} stands outside a rule")
        else:
            current.append(line.replace("\\n", "\n"))
    return rules


@dataclasses.dataclass(slots=True, kw_only=True)
class Document:
    """One text in the making: the grammar, the random numbers and the names bound so far."""

    rules: Grammar
    rng: random.Random
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def expand(self, rule: str) -> str:
        """A random alternative of the rule with everything in it expanded."""
        if not self.rules.get(rule):
            raise GrammarError(f"grammar has no rule [{rule}]")
        return _REFERENCE.sub(self._replace, self.rng.choice(self.rules[rule]))

    def _replace(self, match: re.Match[str]) -> str:
        name, rule, own_names, anonymous = match.groups()
        if own_names:
            return Document(rules=self.rules, rng=self.rng).expand(anonymous)
        if anonymous:
            return self.expand(anonymous)
        if name not in self.names:
            if rule is None:
                raise GrammarError(f"grammar recalls {{{name}}} before it is bound")
            self.names[name] = self._unused(rule)
        return self.names[name]

    def _unused(self, rule: str) -> str:
        """An expansion that no other name of this document has."""
        while True:
            text = self.expand(rule)
            if text not in self.names.values():
                return text


def generate(grammar: str, *, seed: int = SEED) -> str:
    """All documents of `PLAN` as one text, separated by `SEPARATOR`."""
    rules = parse_grammar(grammar)
    documents = []
    for rule, count in PLAN:
        for index in range(count):
            rng = random.Random(f"{seed} {rule} {index}")
            text = Document(rules=rules, rng=rng).expand(rule)
            documents.append((CHAT_MARK if rule in CHAT_RULES else "") + text)
    return SEPARATOR.join(documents) + "\n"


def read_documents(epoch: int = 0) -> list[str]:
    """The documents of written.txt and of the grammar; chats begin with `CHAT_MARK`.

    Epoch 0 has generated.txt; each later one expands the grammar anew, with other names, so that
    no name can be learned by heart. What was written by hand appears `WRITTEN_COPIES` times,
    because nothing else resembles it.
    """
    written = (FOLDER / "written.txt").read_text(encoding="utf-8")
    if epoch == 0:
        generated = GENERATED_FILE.read_text(encoding="utf-8")
    else:
        generated = generate(GRAMMAR_FILE.read_text(encoding="utf-8"), seed=SEED + epoch)
    documents = written.split(SEPARATOR) * WRITTEN_COPIES + generated.split(SEPARATOR)
    return [text.strip("\n") for text in documents]


def main() -> None:
    """Writes generated.txt beside this module."""
    text = generate(GRAMMAR_FILE.read_text(encoding="utf-8"))
    GENERATED_FILE.write_text(text, encoding="utf-8")
    print(f"{GENERATED_FILE.name}: {len(text.split(SEPARATOR))} documents, {len(text)} characters")


if __name__ == "__main__":
    main()
