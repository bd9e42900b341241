"""Rows of a batch in flight come back as they were, whatever they are."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column, LocalStore
from rlkit.checkpoint.rows import ReadRows, WriteRows, read_batches, write_batches
from rlkit.cluster.futures import Ended

DTYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float64)


def round_trip(folder, batches):
    facts, _ = write_batches(folder, batches)
    return read_batches(folder, facts, store=LocalStore())


def make_batch(lengths=(3, 0, 2), **more):
    """Rows out of the order of their uids, of three groups that lie apart."""
    num = len(lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    uids = torch.randperm(10 * num + 1, generator=generator)[:num]
    return rk.Batch.from_columns(
        {
            "uid": uids,
            "group_ids": uids // 4,
            "policy_version": [3 + i for i in range(num)],
            "response_ids": [torch.arange(n) for n in lengths],
            "response_mask": [torch.ones(n, dtype=torch.int8) for n in lengths],
            **more,
        }
    )


def assert_same(one: rk.Batch, other: rk.Batch) -> None:
    assert all(np.array_equal(one.meta[name], other.meta[name]) for name in one.meta)
    assert list(one.columns) == list(other.columns)
    for name, column in one.columns.items():
        rows, found = column.load(one.uids), other.columns[name].load(other.uids)
        assert (rows.kind, column.expands) == (found.kind, other.columns[name].expands)
        if isinstance(rows.values, list):
            assert rows.values == found.values
            continue
        assert rows.values.dtype == found.values.dtype
        assert torch.equal(rows.values.view(torch.uint8), found.values.view(torch.uint8))
        assert rows.lengths is None or torch.equal(rows.lengths, found.lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_every_type_come_back_to_the_bit(tmp_path, dtype):
    batch = make_batch()
    batch["scalar"] = torch.tensor([0, 1, 3]).to(dtype)
    batch["ragged"] = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]]).to(dtype)
    assert_same(batch, round_trip(tmp_path, {"a": batch})["a"])


def test_numbers_that_equal_nothing_come_back(tmp_path):
    batch = make_batch()
    batch["x"] = torch.tensor([float("nan"), -0.0, float("-inf")])
    assert_same(batch, round_trip(tmp_path, {"a": batch})["a"])


def test_text_and_lists_come_back(tmp_path):
    batch = make_batch(text=["", 'é"\n\u2028😀', "x" * 9], other=[None, {"a": [1, 2.5]}, [[True]]])
    assert_same(batch, round_trip(tmp_path, {"a": batch})["a"])


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7), data=st.data())
def test_any_rows_of_any_batch_come_back(tmp_path_factory, lengths, data):
    batch = make_batch(tuple(lengths))
    batch["rewards"] = torch.arange(float(len(batch)))
    index = data.draw(st.lists(st.sampled_from(range(len(batch))), unique=True))
    some = batch.select(index)
    assert_same(some, round_trip(tmp_path_factory.mktemp("rows"), {"a": some})["a"])


def test_a_batch_without_rows_comes_back(tmp_path):
    batch = make_batch(text=["a", "b", "c"]).select([])
    found = round_trip(tmp_path, {"a": batch})["a"]
    assert_same(batch, found)
    assert found["text"] == []


def test_expanded_advantages_stay_expanded(tmp_path):
    batch = make_batch()
    batch["advantages"] = batch.expand(torch.tensor([1.0, 2.0, 3.0]))
    found = round_trip(tmp_path, {"a": batch})["a"]
    assert_same(batch, found)
    assert torch.equal(found["advantages"], batch["advantages"])


def test_a_pending_column_is_waited_for(tmp_path):
    batch, waited = make_batch(), []

    def parts():
        waited.append(True)
        return [batch.store.put("old_logprobs", batch.uids, Rows(torch.tensor([1.0, 2.0, 3.0])))]

    batch["old_logprobs"] = Column("old_logprobs", batch.store, batch.uids, parts)
    found = round_trip(tmp_path, {"a": batch})["a"]
    assert waited == [True]
    assert found["old_logprobs"].tolist() == [1.0, 2.0, 3.0]


def test_a_column_that_failed_names_the_batch(tmp_path):
    batch = make_batch()

    def parts():
        raise RuntimeError("worker actor/0 died")

    batch["old_logprobs"] = Column("old_logprobs", batch.store, batch.uids, parts)
    with pytest.raises(RuntimeError, match="actor/0 died") as caught:
        write_batches(tmp_path, {"following": batch})
    assert "batches['following']" in caught.value.__notes__[0]


def test_a_future_comes_back_as_one_that_is_done(tmp_path):
    batch = make_batch()
    future = Ended(batch, "rollout.generate")
    found = round_trip(tmp_path, {"a": future})["a"]
    assert found.done()
    assert_same(batch, found.result())


def test_two_names_of_one_column_come_back(tmp_path):
    batch = make_batch()
    batch["copy"] = batch.columns["response_ids"]
    assert_same(batch, round_trip(tmp_path, {"a": batch})["a"])


def test_a_step_keeps_its_denominators(tmp_path):
    batch = make_batch((3, 1, 2)).as_step().select([0])
    found = round_trip(tmp_path, {"a": batch})["a"]
    assert (found.step_tokens, found.step_rows) == (6, 3)
    assert found.num_trainable.tolist() == [3]  # a mask again, known without its values


def test_rows_written_in_pieces_are_read_as_one(tmp_path):
    batch = make_batch((3, 0, 2, 1, 4), text=list("abcde"))
    pieces = [batch.select([3, 0]), batch.select([4, 1, 2])]  # as a store of two nodes calls it
    written = tuple(WriteRows(str(tmp_path)).write(piece) for piece in pieces)
    for name in ("response_ids", "text"):
        rows = ReadRows(str(tmp_path), name, written)(batch.select([1, 4, 0]))
        expected = batch.columns[name].load(batch.uids[[1, 4, 0]])
        assert rows.kind == expected.kind
        assert [str(x) for x in rows.unpack()] == [str(x) for x in expected.unpack()]


class Strange:
    pass


@pytest.mark.parametrize(
    "value", [Strange(), (1, 2), {1: 2}, {"a": {1}}], ids=["object", "tuple", "int key", "set"]
)
def test_what_json_does_not_bring_back_is_an_error(tmp_path, value):
    batch = make_batch(meta=[None, value, None])
    with pytest.raises(TypeError, match=r"column 'meta': got .* which a checkpoint can't hold"):
        write_batches(tmp_path, {"a": batch})


def test_what_is_no_batch_is_an_error(tmp_path):
    with pytest.raises(TypeError, match=r"batches\['a'\]: got list, need a Batch"):
        write_batches(tmp_path, {"a": [1, 2]})
