"""Every input format on tiny files: what is read, and what is wrong with what cannot be."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

from tests.corpus.inputs import document, problems, read_rows, write_jsonl
from xmc.corpus.readers import find_reader
from xmc.corpus.readers.source import unique_names
from xmc.corpus.settings import CorpusConfig
from xmc.errors import InputError

TEXTS = [f"text number {number}" for number in range(4)]


def take(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


class TestFindReader:
    def test_unknown_layout_tells_what_is_there_and_what_is_known(self, tmp_path):
        (tmp_path / "notes.md").write_text("nothing")
        with pytest.raises(InputError, match=r"notes\.md(.|\n)*JSON lines(.|\n)*PECOS"):
            find_reader(tmp_path)

    def test_missing_path(self, tmp_path):
        with pytest.raises(InputError, match="no such file"):
            find_reader(tmp_path / "nowhere")

    def test_two_formats_are_not_guessed_between(self, tmp_path):
        write_jsonl(tmp_path / "train.jsonl", [document(1)])
        (tmp_path / "train.csv").write_text("text,labels\na,b\n")
        with pytest.raises(InputError, match="JSON lines and CSV"):
            find_reader(tmp_path)

    def test_packed_and_plain_twin(self, tmp_path):
        write_jsonl(tmp_path / "train.jsonl", [document(1)])
        write_jsonl(tmp_path / "train.jsonl.gz", [document(1)])
        with pytest.raises(InputError, match="both there"):
            find_reader(tmp_path)


class TestJsonLines:
    @pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".ndjson"])
    def test_directory(self, tmp_path, suffix):
        write_jsonl(tmp_path / f"train{suffix}", map(document, range(4)))
        write_jsonl(tmp_path / f"test{suffix}", map(document, range(4, 6)))
        rows = read_rows(tmp_path)
        assert take(rows, "id", "text", "labels") == [
            (f"d{n}", f"text number {n}", [f"l{n % 3}"]) for n in range(6)
        ]
        assert [row["part"] for row in rows] == [0, 0, 0, 0, 3, 3]

    def test_blocks_of_any_size_give_the_same_rows(self, ray_session, tmp_path):
        rows = [document(n, text="é" * (n % 40)) for n in range(1, 60)] + [
            b"",
            b"   ",
            document(60),
            b"{broken",
        ]
        path = write_jsonl(tmp_path / "all.jsonl", rows)
        whole = read_rows(path)
        assert whole[-1]["line"] == 63
        assert whole[-1]["problem"].startswith("broken JSON")
        for block_bytes in (50, 333):
            assert read_rows(path, CorpusConfig(valid_fraction=0, block_bytes=block_bytes)) == whole

    def test_several_text_fields_and_string_labels(self, tmp_path):
        path = write_jsonl(
            tmp_path / "all.jsonl",
            [
                {"title": "a", "content": "b", "tags": "x; y"},
                {"title": None, "content": "c", "tags": "z"},
                {"title": "d", "tags": " "},
            ],
        )
        config = CorpusConfig(
            text_field="title, content",
            labels_field="tags",
            label_separator=";",
            valid_fraction=0,
            unlabelled="keep",
        )
        rows = read_rows(path, config)
        assert take(rows, "text", "labels") == [("a b", ["x", "y"]), ("c", ["z"]), ("d", [])]
        assert take(rows, "id") == [("all:1",), ("all:2",), ("all:3",)]
        write_jsonl(path, [b"{", {"title": "a", "content": "b", "tags": "x; y"}])  # the slow way agrees
        assert take(read_rows(path, config)[1:], "text", "labels") == [("a b", ["x", "y"])]

    def test_numbers_as_ids_and_labels(self, tmp_path):
        path = write_jsonl(
            tmp_path / "all.jsonl", [{"id": n, "text": "t", "labels": [n, 7]} for n in range(3)]
        )
        expected = [("0", ["0", "7"]), ("1", ["1", "7"]), ("2", ["2", "7"])]
        assert take(read_rows(path), "id", "labels") == expected

    def test_bom_and_windows_line_ends(self, tmp_path):
        path = tmp_path / "all.jsonl"
        lines = [json.dumps(document(n)).encode() for n in range(3)]
        path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([lines[0], b"", lines[1], lines[2]]))
        assert take(read_rows(path), "line", "id", "problem") == [
            (1, "d0", None),
            (3, "d1", None),
            (4, "d2", None),
        ]

    def test_bad_rows_have_line_and_reason(self, tmp_path):
        path = write_jsonl(
            tmp_path / "all.jsonl",
            [
                document(1),
                b'{"id": "d2", "text": "caf\xe9", "labels": ["a"]}',
                b'{"id": "d3", "text": "half a surrogate \\ud800", "labels": ["a"]}',
                b'{"id": "d4", "text": "cut',
                b'["a list"]',
                document(6, text=5.5),
                document(7, labels={"a": 1}),
                document(8, labels=["a", ["b"]]),
                document(9, labels=["a", None]),
                document(10, text=" \t "),
                {"id": "d11", "labels": ["a"]},
                {"id": "d12", "text": "x", "labels": []},
                document(13, labels=["a\nb"]),
                document(14, labels=["a", " "]),
                b'{"text": "two", "labels": ["a"]}{"text": "objects", "labels": ["a"]}',
                document(16, labels=["a", "b", "a"]),
            ],
        )
        found = problems(path)
        expected = {
            2: "not UTF-8: byte 26",
            3: "not UTF-8: half a surrogate pair in text",
            4: "broken JSON",
            5: "wrong type: the line holds a list",
            6: "wrong type: text is a number",
            7: "wrong type: labels is an object",
            8: "wrong type: a label is a list",
            9: "bad label: a label is null",
            10: "no text",
            11: "no text",
            12: "no labels",
            13: "bad label: line break in 'a\\nb'",
            14: "bad label: a label is empty",
            15: "broken JSON",
        }
        assert found.keys() == expected.keys()
        for line, reason in expected.items():
            assert found[line].startswith(reason)
        last = read_rows(path)[-1]
        assert (last["labels"], last["repeated"]) == (["a", "b"], 1)

    def test_clean_blocks_are_checked_too(self, tmp_path):
        path = write_jsonl(
            tmp_path / "all.jsonl", [document(1), document(2, text=" "), document(3, labels=["a\rb"])]
        )
        assert problems(path) == {2: "no text", 3: "bad label: line break in 'a\\rb'"}
        raw = [row["raw"] for row in read_rows(path)]
        assert raw[0] is None
        assert json.loads(raw[1]) == {"id": "d2", "text": " ", "labels": ["l2"]}

    def test_unlabelled_documents_are_bad_in_train_only(self, tmp_path):
        row = {"id": "x", "text": "t", "labels": []}
        write_jsonl(tmp_path / "train.jsonl", [document(1), row])
        write_jsonl(tmp_path / "test.jsonl", [{**row, "id": "y"}])
        assert problems(tmp_path) == {2: "no labels"}
        assert problems(tmp_path, CorpusConfig(unlabelled="keep")) == {}

    def test_wrong_field_names_are_told_once(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl", [{"body": "t", "tags": ["a"]}])
        with pytest.raises(InputError, match=r"no field 'text' \(fields: body, tags\); set text_field"):
            read_rows(path)
        with pytest.raises(InputError, match="set labels_field"):
            read_rows(path, CorpusConfig(text_field="body"))

    def test_string_labels_need_a_separator(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl", [document(1, labels="a b")])
        with pytest.raises(InputError, match="label_separator"):
            read_rows(path)

    def test_truncated_gzip_is_a_bad_row(self, tmp_path):
        path = write_jsonl(tmp_path / "all.jsonl.gz", [document(n, text=str(n * 7919)) for n in range(2000)])
        path.write_bytes(path.read_bytes()[:-300])
        (found,) = problems(path, CorpusConfig(block_bytes=4096)).values()
        assert found.startswith("broken gzip")


class TestParquet:
    def test_file_with_row_groups(self, tmp_path):
        table = pa.table({"text": TEXTS, "labels": [["a"], ["b", "c"], [], ["a", "a"]], "id": [5, 6, 7, 8]})
        pq.write_table(table, tmp_path / "all.parquet", row_group_size=3)
        rows = read_rows(tmp_path / "all.parquet")
        assert take(rows, "line", "id", "text", "labels", "problem", "repeated") == [
            (1, "5", TEXTS[0], ["a"], None, 0),
            (2, "6", TEXTS[1], ["b", "c"], None, 0),
            (3, "7", TEXTS[2], [], "no labels", 0),
            (4, "8", TEXTS[3], ["a"], None, 1),
        ]

    def test_directory_of_parts_without_ids(self, tmp_path):
        for split in ("train", "test"):
            (tmp_path / split).mkdir()
            for part in range(2):
                table = pa.table({"text": TEXTS[:2], "labels": ["x|y", "z"]})
                pq.write_table(table, tmp_path / split / f"part-{part}.parquet")
        rows = read_rows(tmp_path, CorpusConfig(label_separator="|", valid_fraction=0))
        assert [row["part"] for row in rows] == [0, 0, 0, 0, 3, 3, 3, 3]
        assert rows[0]["id"] == "train/part-0:1"
        assert len({row["id"] for row in rows}) == 8
        assert rows[0]["labels"] == ["x", "y"]

    def test_bytes_that_are_not_utf8(self, tmp_path):
        bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
        text = pa.chunked_array([pa.array(["fine"]), bad, pa.array(["fine too"])])
        pq.write_table(pa.table({"text": text, "labels": [["a"], ["b"], ["c"]]}), tmp_path / "all.parquet")
        rows = read_rows(tmp_path / "all.parquet")
        assert take(rows, "text", "problem") == [
            ("fine", None),
            (None, "not UTF-8: a column holds other bytes"),
            ("fine too", None),
        ]

    def test_wrong_types_and_damage(self, tmp_path):
        path = tmp_path / "all.parquet"
        pq.write_table(pa.table({"text": [1.5], "labels": [["a"]]}), path)
        with pytest.raises(InputError, match="'text' is double"):
            read_rows(path)
        path.write_bytes(b"PAR1 nothing")
        with pytest.raises(InputError, match="not a readable Parquet"):
            read_rows(path)


class TestCsv:
    def test_quoted_line_breaks_keep_line_numbers(self, tmp_path):
        path = tmp_path / "all.csv"
        path.write_text('id,text,labels\n1,"two\nlines",a;b\n2,one,\n\n3,"x, y",c\n4,too,many,cells\n')
        rows = read_rows(path, CorpusConfig(label_separator=";", valid_fraction=0))
        assert take(rows, "line", "id", "text", "labels", "problem") == [
            (2, "1", "two\nlines", ["a", "b"], None),
            (4, "2", "one", [], "no labels"),
            (6, "3", "x, y", ["c"], None),
            (7, "all:7", None, [], "broken CSV: 4 cells where the header has 3"),
        ]

    def test_tsv_gz_and_other_bytes(self, tmp_path):
        path = tmp_path / "train.tsv.gz"
        path.write_bytes(gzip.compress(b"text\tlabels\nfine\ta b\nbad \xff\ta\nfine\tb\n"))
        rows = read_rows(tmp_path, CorpusConfig(label_separator=" ", valid_fraction=0))
        assert take(rows, "line", "labels", "problem") == [
            (2, ["a", "b"], None),
            (3, [], "not UTF-8: a cell holds other bytes"),
            (4, ["b"], None),
        ]
        assert rows[1]["raw"] == "bad \\xff,a"

    def test_header_and_separator_are_needed(self, tmp_path):
        (tmp_path / "all.csv").write_text("body,labels\nx,y\n")
        with pytest.raises(InputError, match="fields: body, labels"):
            read_rows(tmp_path / "all.csv")
        with pytest.raises(InputError, match="label_separator"):
            read_rows(tmp_path / "all.csv", CorpusConfig(text_field="body"))


class TestTextAndLabels:
    def write(self, path, split, texts, labels, kind="texts"):
        (path / f"{split}_{kind}.txt").write_bytes(texts)
        (path / f"{split}_labels.txt").write_bytes(labels)

    def test_pairs_lines(self, tmp_path):
        self.write(tmp_path, "train", b"one\ntwo\n\nfour", b"a b\n c  d \ne\nf\n")
        self.write(tmp_path, "test", b"five\n\n", b"a\n")
        rows = read_rows(tmp_path)
        assert take(rows, "file", "line", "id", "text", "labels", "problem") == [
            ("train_texts.txt", 1, "train_texts:1", "one", ["a", "b"], None),
            ("train_texts.txt", 2, "train_texts:2", "two", ["c", "d"], None),
            ("train_texts.txt", 3, "train_texts:3", "", ["e"], "no text"),
            ("train_texts.txt", 4, "train_texts:4", "four", ["f"], None),
            ("test_texts.txt", 1, "test_texts:1", "five", ["a"], None),
        ]

    def test_raw_texts_come_first(self, tmp_path):
        self.write(tmp_path, "train", b"tokens\n", b"a\n")
        self.write(tmp_path, "train", b"Raw text.\n", b"a\n", "raw_texts")
        assert read_rows(tmp_path)[0]["text"] == "Raw text."

    def test_ranges_pair_the_same_lines(self, ray_session, tmp_path):
        texts = [f"text {n} {'x' * (n % 17)}" for n in range(300)]
        labels = [" ".join(f"l{n}-{k}" for k in range(1 + n % 4)) for n in range(300)]
        self.write(tmp_path, "train", "\n".join(texts).encode(), "\n".join(labels).encode())
        rows = read_rows(tmp_path, CorpusConfig(block_bytes=101, valid_fraction=0))
        assert take(rows, "text", "labels") == [(t, ls.split()) for t, ls in zip(texts, labels, strict=True)]

    def test_line_counts_differ(self, tmp_path):
        self.write(tmp_path, "train", b"one\ntwo\nthree\n", b"a\n")
        assert problems(tmp_path) == {
            2: "line counts: train_labels.txt has 1 lines, fewer than train_texts.txt",
            3: "line counts: train_labels.txt has 1 lines, fewer than train_texts.txt",
        }
        self.write(tmp_path, "train", b"one\n", b"a\nb\n")
        assert problems(tmp_path) == {
            2: "line counts: train_labels.txt has 2 lines, more than train_texts.txt"
        }

    def test_not_utf8(self, tmp_path):
        self.write(tmp_path, "train", b"one\n\xfftwo\nthree\n", b"a\nb\n\xfe\n")
        assert problems(tmp_path) == {
            2: "not UTF-8: byte 1 of the line",
            3: "not UTF-8: byte 1 of the line",
        }

    def test_labels_are_needed(self, tmp_path):
        (tmp_path / "train_texts.txt").write_text("one\n")
        with pytest.raises(InputError, match=r"train_labels\.txt is not"):
            read_rows(tmp_path)


class TestXcSparse:
    def test_rows(self, tmp_path):
        (tmp_path / "train.txt").write_text("3 4 5\n0,3 0:1.5 3:2\n 1:0.25\n4  2:1e-3 \n")
        (tmp_path / "test.txt").write_text("1 4 5\n1:7 2:8\n")
        rows = read_rows(tmp_path, CorpusConfig(unlabelled="keep", valid_fraction=0))
        assert take(rows, "line", "labels", "feature_ids", "text", "problem") == [
            (2, ["0", "3"], [0, 3], None, None),
            (3, [], [1], None, None),
            (4, ["4"], [2], None, None),
            (2, [], [1, 2], None, None),
        ]
        assert rows[0]["feature_values"] == [1.5, 2.0]
        assert rows[2]["feature_values"] == pytest.approx([1e-3])
        assert problems(tmp_path) == {3: "no labels"}

    def test_bad_rows(self, tmp_path):
        (tmp_path / "train.txt").write_text(
            "9 4 5\n0 0:1\n5 0:1\n0 4:1\n0 a:1\n0 1:x\n0 1:1 stray\nx 1:1\n0 1:nan\n0 1:1:1\n"
        )
        found = problems(tmp_path)
        expected = {
            3: "index out of range: label '5' where there are 5 labels",
            4: "index out of range: feature 4 where there are 4 features",
            5: "wrong type: 'a:1' is not feature:value",
            6: "wrong type: '1:x' is not feature:value",
            7: "wrong type: 'stray' is not feature:value",
            8: "index out of range: label 'x'",
            9: "wrong type: the value of feature 1 is not finite",
            10: "wrong type: '1:1:1' is not feature:value",
        }
        assert found.keys() == expected.keys()
        for line, reason in expected.items():
            assert found[line].startswith(reason)

    def test_text_file_without_header_is_not_taken(self, tmp_path):
        (tmp_path / "train.txt").write_text("just text\n")
        with pytest.raises(InputError, match="no known format"):
            find_reader(tmp_path)


class TestXcLabelFeatures:
    def write(self, path, labels=(("L0", "first"), ("L1", "second"), ("L1", "twin"))):
        write_jsonl(
            path / "trn.json.gz",
            [
                {"uid": "A", "title": "a", "content": "", "target_ind": [0, 2], "target_rel": [1.0, 1.0]},
                {"uid": "B", "title": "b", "content": "bb", "target_ind": [3], "target_rel": [1.0]},
            ],
        )
        write_jsonl(path / "tst.json.gz", [{"uid": "C", "title": "c", "content": "", "target_ind": [1]}])
        write_jsonl(
            path / "lbl.json.gz", [{"uid": uid, "title": title, "content": ""} for uid, title in labels]
        )
        (path / "filter_labels_test.txt").write_text("0 1\n")

    def test_reads_documents_and_labels(self, tmp_path):
        self.write(tmp_path)
        rows = read_rows(tmp_path)
        assert take(rows, "id", "labels") == [("A", ["0", "2"]), ("B", ["3"]), ("C", ["1"])]
        assert rows[1]["text"] == "b bb"
        assert rows[1]["problem"].startswith("index out of range: label '3'")
        source = find_reader(tmp_path).open_source(tmp_path, CorpusConfig())
        assert source.labels.table.select(["key", "name", "text"]).to_pylist() == [
            {"key": "0", "name": "L0", "text": "first"},
            {"key": "1", "name": "L1 #1", "text": "second"},
            {"key": "2", "name": "L1 #2", "text": "twin"},
        ]
        assert "filter_labels_test.txt" in source.notes[0]

    def test_labels_are_needed(self, tmp_path):
        self.write(tmp_path)
        (tmp_path / "lbl.json.gz").unlink()
        with pytest.raises(InputError, match=r"lbl\.json\.gz"):
            read_rows(tmp_path)


class TestPecos:
    def write(self, path, texts="one\ntwo\nthree\n", features=True):
        labels = sp.csr_matrix(np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], dtype=np.float32))
        sp.save_npz(path / "Y.trn.npz", labels)
        sp.save_npz(path / "Y.tst.npz", labels[:1].tocsc())
        if texts is not None:
            (path / "X.trn.txt").write_text(texts)
            (path / "X.tst.txt").write_text("test\n")
        if features:
            sp.save_npz(path / "X.trn.npz", sp.csr_matrix(np.diag([1.0, 2.0, 3.0]).astype(np.float32)))
            sp.save_npz(path / "X.tst.npz", sp.csr_matrix(np.ones((1, 3), dtype=np.float32)))
        (path / "output-items.txt").write_text("same\nother\nsame\n")

    def test_texts_and_features(self, ray_session, tmp_path):
        self.write(tmp_path)
        rows = read_rows(tmp_path)
        assert take(rows, "id", "text", "labels", "feature_ids", "feature_values", "problem") == [
            ("X.trn:1", "one", ["0", "2"], [0], [1.0], None),
            ("X.trn:2", "two", [], [1], [2.0], "no labels"),
            ("X.trn:3", "three", ["1"], [2], [3.0], None),
            ("X.tst:1", "test", ["0", "2"], [0, 1, 2], [1.0, 1.0, 1.0], None),
        ]
        source = find_reader(tmp_path).open_source(tmp_path, CorpusConfig())
        assert source.labels.table["name"].to_pylist() == ["same #0", "other", "same #2"]
        assert source.num_features == 3

    def test_features_only(self, ray_session, tmp_path):
        self.write(tmp_path, texts=None)
        rows = read_rows(tmp_path)
        assert take(rows[:3], "line", "text", "feature_ids", "problem") == [
            (1, None, [0], None),
            (2, None, [1], "no labels"),
            (3, None, [2], None),
        ]

    @pytest.mark.parametrize(("texts", "line"), [("one\ntwo\nthree\nfour\n", 4), ("one\ntwo\n", 3)])
    def test_line_counts_differ(self, ray_session, tmp_path, texts, line):
        self.write(tmp_path, texts, features=False)
        found = problems(tmp_path, CorpusConfig(unlabelled="keep"))
        assert list(found) == [line]
        assert found[line].startswith("line counts: ")

    def test_pickle_is_refused(self, ray_session, tmp_path):
        self.write(tmp_path)
        np.savez(tmp_path / "Y.trn.npz", data=np.array([{"a": 1}], dtype=object), format=b"csr")
        with pytest.raises(InputError, match="without pickle"):
            read_rows(tmp_path)


class TestLabelFiles:
    EXPECTED = {"name": ["a", "b"], "text": ["first", None], "parent": [None, "a"], "line": [1, 2]}  # noqa: RUF012

    def labels_of(self, path):
        config = CorpusConfig(label_separator=";")
        table = find_reader(path).open_source(path, config).labels.table
        return table.select(list(self.EXPECTED)).to_pydict()

    def test_json_lines(self, tmp_path):
        write_jsonl(tmp_path / "train.jsonl", [document(1)])
        write_jsonl(
            tmp_path / "labels.jsonl.gz", [{"label": "a", "text": "first"}, {"name": "b", "parent": "a"}]
        )
        assert self.labels_of(tmp_path) == self.EXPECTED
        write_jsonl(tmp_path / "labels.jsonl.gz", [{"label": 1, "text": "first"}, b"{", {"label": "b"}])
        table = find_reader(tmp_path).open_source(tmp_path, CorpusConfig()).labels.table
        assert table["name"].to_pylist() == ["1", None, "b"]
        assert table["problem"][1].as_py().startswith("broken JSON")

    def test_parquet(self, tmp_path):
        pq.write_table(pa.table({"text": ["t"], "labels": [["a"]]}), tmp_path / "train.parquet")
        table = pa.table({"label": ["a", "b"], "text": ["first", None], "parent": [None, "a"]})
        pq.write_table(table, tmp_path / "labels.parquet")
        assert self.labels_of(tmp_path) == self.EXPECTED
        pq.write_table(pa.table({"tag": ["a"]}), tmp_path / "labels.parquet")
        with pytest.raises(InputError, match="no column 'label'"):
            self.labels_of(tmp_path)

    def test_csv(self, tmp_path):
        (tmp_path / "train.csv").write_text("text,labels\nt,a\n")
        (tmp_path / "labels.csv").write_text("label,text,parent\na,first,\nb,,a\n")
        assert self.labels_of(tmp_path) == {**self.EXPECTED, "line": [2, 3]}


def test_unique_names_never_collide():
    names = unique_names(pa.array(["a", "a", "a #1", "", None, "b"]))
    assert names.to_pylist() == ["a #0", "a #1'", "a #1", "#3", "#4", "b"]
