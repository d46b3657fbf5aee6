"""Progress of long work: a bar that redraws itself in a terminal, a line now and then where output is piped."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_BAR = 24
_SECONDS_BETWEEN = {True: 0.2, False: 5.0}  # terminal, pipe


class Progress:
    """`with Progress("training", total, "steps") as p: p.update(1, "loss 0.12")`. Writes to standard error.

    A total of 0 is an unknown one.
    """

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._terminal = sys.stderr.isatty()
        self._started = self._shown = time.monotonic()
        self._first = 0
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self.done:
            self._show(self._note, last=True)

    _note = ""

    def start_at(self, done: int) -> None:
        """Work that an earlier process has done counts in the bar, not in the speed. A process that lost some of it
        says so with a smaller number, and what it does again is no progress twice."""
        self._first += done - self.done
        self.done = done

    def update(self, amount: int = 1, note: str = "") -> None:
        self.done += amount
        self._note = note or self._note
        if time.monotonic() - self._shown >= _SECONDS_BETWEEN[self._terminal]:
            self._show(self._note)

    def _show(self, note: str, last: bool = False) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        speed = (self.done - self._first) / max(seconds, 1e-9)
        of_total = f"/{self._total:,}" if self._total else ""
        text = f"{self._title}: {self.done:,}{of_total} {self._unit}, {speed:,.1f}/s"
        if last:
            text += f", took {_clock(seconds)}"
        elif self._total and speed > 0:
            text += f", {_clock((self._total - self.done) / speed)} left"
        text += f", {note}" if note else ""
        if self._terminal:
            filled = round(_BAR * min(self.done / max(self._total, self.done, 1), 1.0))
            print(
                f"\r\x1b[2K{'█' * filled}{'░' * (_BAR - filled)} {text}",
                end="\n" if last else "",
                file=sys.stderr,
            )
        else:
            print(text, file=sys.stderr)
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
