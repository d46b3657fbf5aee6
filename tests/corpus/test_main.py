"""The command: what it prints, and how it refuses."""

from __future__ import annotations

import sys

import pytest

from tests.corpus.inputs import document, write_jsonl
from xmc.corpus.__main__ import main
from xmc.errors import InputError, exit_on_input_error


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["xmc.corpus", *map(str, arguments)])
    main()


def test_builds_tells_and_names_the_next_command(ray_session, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "mine.jsonl", [*map(document, range(40)), b"{"])
    run(monkeypatch, "mine.jsonl", "on_bad_row=skip", "test_fraction=0.2")
    out, progress = capsys.readouterr()
    assert (tmp_path / "runs" / "corpus" / "mine" / "manifest.json").is_file()
    assert "labels: 3 in train" in out
    assert "bad rows: 1, skipped" in out
    assert "1 × broken JSON (first: mine.jsonl:41" in out
    assert out.endswith("next: python -m xmc.train light_xml corpus.path=runs/corpus/mine\n")
    assert "writing 40 documents, 3 labels" in progress


def test_wrong_settings_are_named(tmp_path, monkeypatch, capsys):
    path = write_jsonl(tmp_path / "mine.jsonl", [document(1)])
    with pytest.raises(InputError, match="did you mean on_bad_row"):
        run(monkeypatch, path, "on_bad_rows=skip")
    with pytest.raises(InputError, match="choose one of error, skip, quarantine"):
        run(monkeypatch, path, "on_bad_row=ignore")
    monkeypatch.setattr(sys, "argv", ["xmc.corpus", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as caught:
        exit_on_input_error(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
