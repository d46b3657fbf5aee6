"""What happens to rows that cannot be used: the list that stops a build, the summary, the quarantine file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from xmc.errors import InputError

MOST_LISTED = 10


@dataclass(frozen=True, order=True)
class BadRow:
    """A place in the input and what is wrong there. The reason begins with its kind: "no text", "broken JSON: …"."""

    row: int  # the row's key: sorts in reading order
    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass
class BadRows:
    """All bad rows as counts by kind, and the first few in full."""

    first: list[BadRow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, row: BadRow) -> None:
        self.add_counted([row], {kind_of(row.reason): 1})

    def add_counted(self, first: Iterable[BadRow], counts: dict[str, int]) -> None:
        """Merge what another part of the input found: its first rows and all its counts."""
        self.first = sorted([*self.first, *first])[:MOST_LISTED]
        self.counts.update(counts)

    @property
    def total(self) -> int:
        return self.counts.total()

    def summary(self) -> list[str]:
        """One line a kind, the most frequent first, with a place to look at."""
        lines = []
        for kind, count in self.counts.most_common():
            example = next((row for row in self.first if kind_of(row.reason) == kind), None)
            where = f" (first: {example})" if example else ""
            lines.append(f"{count:,} × {kind}{where}")
        return lines

    def stop(self, root: Path) -> InputError:
        """The error that lists them."""
        listed = "\n".join(f"  {row}" for row in self.first)
        more = f"\n  … and {self.total - len(self.first):,} more" if self.total > len(self.first) else ""
        hint = ""
        if self.counts["no labels"]:
            hint = ", or keep documents without labels with unlabelled=keep"
        plural = "row" if self.total == 1 else "rows"
        return InputError(
            f"{root}: {self.total:,} bad {plural}:\n{listed}{more}\nMend them, or build with on_bad_row=skip to leave "
            f"them out or on_bad_row=quarantine to set them aside{hint}"
        )


def kind_of(reason: str) -> str:
    """The kind of a reason: what stands before its details."""
    return reason.split(":", 1)[0]


def quarantine_line(row: BadRow, raw: str | None) -> str:
    """One line of quarantine.jsonl."""
    entry = {"file": row.file, "line": row.line, "reason": row.reason, "raw": raw}
    return json.dumps(entry, ensure_ascii=False) + "\n"
