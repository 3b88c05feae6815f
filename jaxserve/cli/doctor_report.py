"""What `jaxserve doctor` finds out, before it is printed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class Section:
    """One part of the report: lines (name, value), and what is wrong, each with the way out."""

    title: str
    lines: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    troubles: list[str] = dataclasses.field(default_factory=list)

    def say(self, name: str, value: object) -> None:
        """One more line."""
        self.lines.append((name, str(value)))

    def complain(self, trouble: str) -> None:
        """One more thing that is wrong."""
        self.troubles.append(" ".join(trouble.split()))


def megabytes(size: int) -> str:
    """`1,234 MB`."""
    return f"{size / 1e6:,.0f} MB"
