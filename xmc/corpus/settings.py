"""The settings of a corpus build. They say how to read rows, not where from."""

from __future__ import annotations

from dataclasses import dataclass

from xmc.errors import InputError

ON_BAD_ROW = ("error", "skip", "quarantine")
UNLABELLED = ("bad", "keep")


@dataclass(frozen=True)
class CorpusConfig:
    # Field or column of the text; several names with commas ("title,content") are joined by a space.
    text_field: str = "text"
    # Field or column of the labels: a list of names, or one string cut at `label_separator`.
    labels_field: str = "labels"
    # Field of the document's id; rows without it are named after their file and line.
    id_field: str = "id"
    # Field of the group: documents of one group never straddle a split made here. Without it the id serves.
    group_field: str = "group"
    # What separates labels given as one string; None where they are lists.
    label_separator: str | None = None
    # Share of train that becomes the validation part, unless the input brings its own.
    valid_fraction: float = 0.05
    # Share of the input that becomes the test part where the input has none; 0 uses the given one.
    test_fraction: float = 0.0
    # A row that cannot be used: stop and list (error), leave out (skip), or set aside in quarantine.jsonl.
    on_bad_row: str = "error"
    # A training document without labels is a bad row (bad) or kept (keep). In test they are kept and counted.
    unlabelled: str = "bad"
    # Most documents in one Parquet file: fewer means more files to spread over workers.
    rows_per_shard: int = 20_000
    # Bytes of input that one task parses at a time.
    block_bytes: int = 8 * 2**20
    # Chooses which groups go to validation and test.
    seed: int = 0

    def __post_init__(self) -> None:
        for key, allowed in (("on_bad_row", ON_BAD_ROW), ("unlabelled", UNLABELLED)):
            if getattr(self, key) not in allowed:
                raise InputError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(allowed)}")
        for key in ("valid_fraction", "test_fraction"):
            if not 0 <= getattr(self, key) < 1:
                raise InputError(f"{key}={getattr(self, key)}: give a share from 0 to below 1")
        for key in ("rows_per_shard", "block_bytes"):
            if getattr(self, key) < 1:
                raise InputError(f"{key}={getattr(self, key)}: give a number above 0")
        if not self.text_fields:
            raise InputError("text_field is empty: name at least one field")
        if self.label_separator == "":
            raise InputError(
                "label_separator is empty: give what stands between two labels, on the command line in quotes: "
                "'label_separator=\"|\"', or null where labels are lists"
            )

    @property
    def text_fields(self) -> tuple[str, ...]:
        return tuple(name for name in (part.strip() for part in self.text_field.split(",")) if name)
