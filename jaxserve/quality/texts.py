"""Prompts of several kinds for comparing a model with itself (before step 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: By name: texts to continue.
TEXTS: Mapping[str, str] = {
    "fact": "The capital of France is",
    "story": "The lighthouse keeper climbed the stairs as he had done every evening for thirty "
    "years. That night, however, the lamp was already burning when he reached the top, and",
    "code": "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Merges two sorted lists into one."""\n    merged = []\n    i = j = 0\n',
    "numbers": "2, 3, 5, 7, 11, 13, 17, 19, 23,",
    "several_languages": "Guten Morgen! Wie geht es dir? Bonjour, comment allez-vous ? 你好,今天"
    "天气怎么样?Привет, как дела?",
    "symbols": "🎉🎂 Happy birthday, Zoë! 🥳 Today's menu: crème brûlée (€4.50), jalapeños ½ lb –",
    "long": "The ship's log, as the archive holds it.\n"
    + "".join(
        f"Day {day}: wind {('north', 'west', 'south', 'east')[day % 4]}, {3 * day % 17 + 4} knots; "
        f"{40 + 7 * day % 23} miles made good; {('calm', 'rain', 'fog')[day % 3]} in the evening.\n"
        for day in range(1, 25)
    )
    + "Day 25:",
}
#: By name: conversations, for models with a chat template.
CHATS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "question": ({"role": "user", "content": "Why is the sky blue? Answer in two sentences."},),
    "several_turns": (
        {"role": "user", "content": "Name three rivers in Europe."},
        {"role": "assistant", "content": "The Danube, the Rhine and the Loire."},
        {"role": "user", "content": "Which of them is the longest?"},
    ),
}
