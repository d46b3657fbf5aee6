from __future__ import annotations

from xmc.progress import Progress


def test_what_was_lost_and_done_before_is_no_progress(capsys):
    with Progress("training", 10, "steps") as progress:
        progress.start_at(5)
        progress.update(3)
        progress.start_at(6)  # two steps were lost
        progress._started -= 1.0  # a second ago: three steps a second
    shown = capsys.readouterr().err
    assert "6/10 steps, 3.0/s" in shown
