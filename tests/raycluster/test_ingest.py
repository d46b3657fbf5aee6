from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from raycluster.ingest import RankRows, SplitByRank, labelled_tokens


def rows(count: int, num_steps: int, seed: int = 3, batch_size: int = 4) -> RankRows:
    lengths = np.random.default_rng(0).integers(1, 60, count)
    table = pa.table(
        {
            "input_ids": [[row] * length for row, length in enumerate(lengths)],
            "label_ids": [[row, row + 1] if row % 3 else [] for row in range(count)],
        }
    )
    return RankRows(table, batch_size, num_steps, seed, pad_id=0, padding_side="right")


def test_an_epoch_is_every_document_once_and_a_seed_repeats_it():
    one, two = rows(103, 26), rows(103, 26)
    first, again, second = one.plan(0), two.plan(0), one.plan(1)
    assert sorted(np.concatenate(first)) == list(range(103))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]
    assert max(map(len, first)) <= 4
    assert min(map(len, first)) >= 3


def test_batches_carry_their_documents_and_can_start_anywhere():
    ranked = rows(103, 26)
    batches = list(ranked.epoch(2))
    assert len(batches) == 26
    for batch in batches:
        assert np.array_equal(batch.input_ids[:, 0], batch.rows)
        assert batch.attention_mask.sum(1).max() == batch.input_ids.shape[1]
        for i, row in enumerate(batch.rows):
            labels = batch.label_ids[batch.label_offsets[i] : batch.label_offsets[i + 1]]
            assert labels.tolist() == ([row, row + 1] if row % 3 else [])
    late = list(ranked.epoch(2, first=20))
    assert [batch.rows.tolist() for batch in late] == [batch.rows.tolist() for batch in batches[20:]]


def test_similar_lengths_share_a_batch():
    ranked = rows(1000, 250)
    cells = sum(batch.input_ids.size for batch in ranked.epoch(0))
    tokens = sum(int(batch.attention_mask.sum()) for batch in ranked.epoch(0))
    assert tokens / cells > 0.95


def test_ranks_of_uneven_shares_take_the_same_number_of_steps():
    parts = [rows(count, 7) for count in (20, 21, 21)]
    assert [len(list(part.epoch(0))) for part in parts] == [7, 7, 7]


def test_ray_data_gives_each_rank_its_own_rows_in_order(ray_session: None):
    dataset = ray.data.range(10, override_num_blocks=3).materialize()
    shares = SplitByRank().configure({"train": dataset}, 3, None, None)
    found = [[row["id"] for row in share["train"].iter_rows()] for share in shares]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_further_lists_travel_with_their_documents(ray_session: None, tmp_path):
    lists = {"nodes": [[3, 4], [], [5], [6]], "weights": [[0.5, 0.25], [], [1.0], [0.75]]}
    columns = {
        "tokens": {"input_ids": [[1], [2], [3], [4]]},
        "corpus": {"label_ids": [[0]] * 4},
        "lists": lists,
    }
    for name, content in columns.items():
        pq.write_table(pa.table(content), tmp_path / name)
    table = labelled_tokens(*([tmp_path / name] for name in columns)).to_arrow_refs()
    ranked = RankRows(pa.concat_tables(ray.get(table)), 2, 2, 0, pad_id=0, padding_side="right")
    batches = {int(batch.rows[0]): batch.lists for batch in ranked.by_length()}
    assert batches[0]["nodes"].tolist() == [[3, 4], [0, 0]]
    assert batches[2]["weights"].tolist() == [[1.0], [0.75]]
    assert batches[2]["nodes"].dtype == np.int64
