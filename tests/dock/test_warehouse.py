import tracemalloc

import numpy as np
import pytest
import torch

from rlkit.batch.rows import Rows
from rlkit.batch.shelf import Shelf
from rlkit.dock.messages import Facts, Notice
from rlkit.dock.warehouse import Warehouse


def put(warehouse, uids, **columns):
    """Write columns of rows."""
    uids = np.asarray(uids)
    facts = {name: Facts.of(rows) for name, rows in columns.items()}
    notice = Notice(node=warehouse.node, stage="driver", uids=uids, columns=facts)
    return warehouse.put(notice, columns)


def ragged(n, length):
    return Rows(torch.arange(n * length), torch.full((n,), length))


def test_memory_of_a_write_shrinks_with_the_rows_that_need_it():
    warehouse = Warehouse("a")
    put(warehouse, range(8), x=ragged(8, 10), y=Rows(torch.arange(8)))
    warehouse.free(np.arange(5))
    assert warehouse.stats() == {"node": "a", "rows": 3, "columns": 2, "nbytes": 3 * 88}
    got = warehouse.fetch({"x": np.asarray([7, 5])})["x"]
    assert [row.tolist() for row in got.unpack()] == [list(range(70, 80)), list(range(50, 60))]
    warehouse.free(np.arange(8))
    assert warehouse.stats()["nbytes"] == 0
    assert warehouse.index("train") == []


def test_a_stage_is_told_of_what_came_before_and_named_for_what_comes_after():
    warehouse = Warehouse("a")
    assert put(warehouse, [1, 2], x=ragged(2, 3)) == ()
    notices = warehouse.index("train")
    assert [(n.uids.tolist(), list(n.columns)) for n in notices] == [([1, 2], ["x"])]
    assert notices[0].columns["x"].lengths.tolist() == [3, 3]
    assert put(warehouse, [3], x=ragged(1, 3)) == ("train",)


def test_a_row_is_done_when_every_consumer_is():
    warehouse = Warehouse("a", consumers=("reference", "train"))
    put(warehouse, [1, 2], x=ragged(2, 3))
    assert warehouse.consumed("reference", np.asarray([1, 2, 9])).tolist() == []
    assert warehouse.consumed("viewer", np.asarray([1])).tolist() == []
    assert warehouse.consumed("train", np.asarray([2])).tolist() == [2]


def test_rows_that_are_not_there_are_named():
    warehouse = Warehouse("a")
    put(warehouse, [1], x=ragged(1, 3))
    with pytest.raises(KeyError, match="x: 1 of 2 rows are not on node a, the first with uid 5"):
        warehouse.fetch({"x": np.asarray([1, 5])})


def test_rows_of_the_nodes_store_are_taken_over_by_key():
    store = Shelf()
    store.put("x#7", np.asarray([4, 2, 9]), Rows([0.4, 0.2, 0.9]))
    warehouse = Warehouse("a", store=store)
    warehouse.index("train")
    notice = Notice(
        node="b", stage="driver", uids=np.asarray([9, 4]), columns={}, group_ids=np.asarray([1, 0])
    )
    (entered,), stages = warehouse.adopt(notice, {"x": [("x#7", np.asarray([4, 9]))]})
    assert stages == ("train",)
    assert entered.node == "a"
    assert entered.uids.tolist() == [4, 9]
    assert entered.group_ids.tolist() == [0, 1]
    store.free("x#7")
    assert warehouse.fetch({"x": np.asarray([9, 4])})["x"].values == [0.9, 0.4]


def test_parts_name_rows_without_their_values():
    warehouse = Warehouse("a", name="dock-1")
    put(warehouse, [1, 2, 3], x=ragged(3, 4))
    put(warehouse, [2], x=ragged(1, 9))
    parts = warehouse.describe({"x": np.asarray([3, 2])})["x"]
    found = {uid: n for part in parts for uid, n in zip(part.uids, part.lengths, strict=True)}
    assert found == {2: 9, 3: 4}
    assert {part.key for part in parts} == {"dock-1:x"}
    assert not any(part.fresh for part in parts)


def test_facts_count_bytes_as_rows_do():
    for rows in (
        ragged(3, 4),
        Rows(torch.zeros(6, 2, dtype=torch.bfloat16), torch.tensor([2, 4])),
        Rows(torch.zeros(3, dtype=torch.int8)),
        Rows(["ß", "ab", [1]]),
    ):
        assert Facts.of(rows).nbytes.sum() == rows.nbytes
        assert len(Facts.of(rows).nbytes) == len(rows)


def test_metadata_of_a_write_is_small_beside_its_values():
    tracemalloc.start()
    warehouse = Warehouse("a")
    put(warehouse, range(1000), x=ragged(1000, 100))
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert python_bytes < 0.2 * 800_000  # torch's own memory is not traced
