import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.batch.rows import Rows, concat

ragged_rows = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=6)


def ragged(rows, dtype=torch.int64):
    """Ragged rows of lists of numbers."""
    return Rows.from_list([torch.tensor(row, dtype=dtype) for row in rows])


@settings(deadline=None)
@given(ragged_rows)
def test_padding_and_stripping_gives_the_same_rows(lists):
    rows = ragged(lists)
    again = Rows.from_padded(rows.padded(), rows.lengths)
    assert torch.equal(again.values, rows.values)
    assert torch.equal(again.lengths, rows.lengths)


@settings(deadline=None)
@given(ragged_rows, st.data())
def test_selected_rows_come_in_the_order_asked_for(lists, data):
    index = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=8))
    selected = ragged(lists).select(torch.tensor(index, dtype=torch.int64))
    assert [row.tolist() for row in selected.unpack()] == [lists[i] for i in index]


@settings(deadline=None)
@given(ragged_rows, ragged_rows)
def test_concat_joins_rows_end_to_end(first, second):
    joined = concat([ragged(first), ragged(second)])
    assert [row.tolist() for row in joined.unpack()] == first + second


@settings(deadline=None)
@given(ragged_rows)
def test_sums_are_those_of_each_row(lists):
    assert ragged(lists).sums().tolist() == [sum(row) for row in lists]


def test_padded_fills_on_the_right():
    assert ragged([[1, 2, 3], [4]]).padded().tolist() == [[1, 2, 3], [4, 0, 0]]
    assert ragged([[1, 2, 3], [4]]).padded(fill=-1).tolist() == [[1, 2, 3], [4, -1, -1]]


@pytest.mark.parametrize("rows", [[[1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3], [4, 5, 6]]])
def test_equal_lengths_do_not_change_the_kind(rows):  # faults E4
    assert ragged(rows).kind == "ragged"
    assert [len(row) for row in ragged(rows).unpack()] == [len(row) for row in rows]


def test_rows_of_length_one_stay_ragged():  # faults E4
    rows = Rows.from_list([torch.tensor([1]), torch.tensor([2])])
    assert rows.kind == "ragged"
    assert rows.padded().shape == (2, 1)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.float32, torch.float64]
)
def test_dtype_comes_back_as_it_went_in(dtype):
    rows = ragged([[0, 1, 1], [1]], dtype)
    assert rows.padded().dtype == dtype
    assert rows.select(torch.tensor([1])).values.dtype == dtype
    assert concat([rows, rows]).values.dtype == dtype
    assert pickle.loads(pickle.dumps(rows)).values.dtype == dtype


@pytest.mark.parametrize(
    ("items", "kind", "dtype"),
    [
        ([1, 2], "scalar", torch.int64),
        ([1.0, 2.0], "scalar", torch.float32),
        ([True, False], "scalar", torch.bool),
        ([np.float32(1), np.float32(2)], "scalar", torch.float32),
        ([np.int64(1), np.int64(2)], "scalar", torch.int64),
        ([np.bool_(True), np.bool_(False)], "scalar", torch.bool),
        ([torch.tensor(1), torch.tensor(2)], "scalar", torch.int64),
        ([torch.zeros(2), torch.zeros(3)], "ragged", torch.float32),
    ],
)
def test_numbers_are_sorted_into_the_kind_they_are(items, kind, dtype):
    rows = Rows.from_list(items)
    assert (rows.kind, rows.values.dtype) == (kind, dtype)


@pytest.mark.parametrize("items", [["a", "b"], [[1], [2, 3]], [None, 1], [{"x": 1}, {"y": 2}], []])
def test_other_objects_come_back_as_they_went_in(items):
    rows = Rows.from_list(items)
    assert rows.kind == "objects"
    assert rows.unpack() == items


def test_rows_of_tensors_have_no_gradient_history():
    weights = torch.ones(2, requires_grad=True)
    assert not Rows.from_list([weights * 2, weights * 3]).values.requires_grad


def test_rows_of_a_matrix_a_token_keep_their_last_axis():
    rows = Rows.from_list([torch.ones(1, 4), torch.ones(2, 4)])
    assert rows.padded().shape == (2, 2, 4)
    assert rows.select(torch.tensor([1])).values.shape == (2, 4)


def test_bytes_count_values_without_padding():
    assert ragged([[1, 2, 3], [4]]).nbytes == 4 * 8
    assert Rows(["ab", "€"]).nbytes == 2 + 3


def test_empty_select_keeps_kind_and_dtype():
    rows = ragged([[1, 2], [3]], torch.int8).select(torch.zeros(0, dtype=torch.int64))
    assert (rows.kind, rows.values.dtype, len(rows)) == ("ragged", torch.int8, 0)
    assert rows.padded().shape == (0, 0)


def test_concat_ignores_empty_parts_of_another_dtype():
    empty = Rows(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert concat([empty, ragged([[1]])]).values.dtype == torch.int64


def test_concat_of_two_dtypes_names_the_column():
    with pytest.raises(TypeError, match=r"rewards: got parts of dtypes .*need one dtype"):
        concat([Rows(torch.zeros(1)), Rows(torch.zeros(1).long())], name="rewards")


def test_concat_of_two_kinds_names_the_column():
    with pytest.raises(TypeError, match=r"x: got parts of kinds \['ragged', 'scalar'\]"):
        concat([Rows(torch.zeros(1)), ragged([[1]])], name="x")


def test_lengths_must_add_up_to_the_values():
    with pytest.raises(ValueError, match="got lengths that add up to 3, need 2"):
        Rows(torch.zeros(2), torch.tensor([1, 2]))


def test_lengths_beyond_the_width_are_an_error():
    with pytest.raises(ValueError, match="got width 2, need at least 3"):
        Rows.from_padded(torch.zeros(1, 2), torch.tensor([3]))


def test_objects_have_no_padded_form():
    with pytest.raises(TypeError, match="no padded form"):
        Rows(["a"]).padded()


DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, [2, 0, 3], [0, 0], []])
def test_rows_come_back_from_a_message_as_they_went(dtype, lengths):
    size = 4 if lengths is None else sum(lengths)
    values = torch.arange(size).to(dtype)
    rows = Rows(values, None if lengths is None else torch.tensor(lengths, dtype=torch.int64))
    found = pickle.loads(pickle.dumps(rows))
    assert found.kind == rows.kind
    assert found.values.dtype == dtype
    assert torch.equal(found.values, rows.values)
    assert lengths is None or torch.equal(found.lengths, rows.lengths)


def test_a_message_has_the_memory_of_the_values_not_a_copy():
    values = torch.arange(1000)
    buffers = []
    sent = pickle.dumps(Rows(values, torch.tensor([600, 400])), 5, buffer_callback=buffers.append)
    assert len(sent) < 1000
    found = pickle.loads(sent, buffers=buffers)
    values[7] = -1
    assert found.values[7] == -1


def test_rows_of_memory_that_may_not_be_written_are_read_in_place():
    rows, buffers = Rows(torch.arange(1000), torch.tensor([600, 400])), []
    sent = pickle.dumps(rows, 5, buffer_callback=buffers.append)
    fixed = [bytes(buffer) for buffer in buffers]
    found = pickle.loads(sent, buffers=fixed)
    assert torch.equal(found.values, rows.values)
    assert found.values.data_ptr() == np.frombuffer(fixed[0], dtype=np.uint8).ctypes.data


@pytest.mark.parametrize("longest", [3, 200])
def test_selected_rows_are_those_asked_for(longest):
    lengths = torch.randint(0, longest, (40,), generator=torch.Generator().manual_seed(0))
    values = torch.arange(int(lengths.sum()))
    index = torch.tensor([5, 0, 39, 5])
    found = Rows(values, lengths).select(index)
    rows = torch.split(values, lengths.tolist())
    assert torch.equal(found.values, torch.cat([rows[i] for i in index.tolist()]))
    assert found.lengths.tolist() == lengths[index].tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16])
def test_sums_of_rows_some_of_which_are_empty(dtype):
    rows = Rows(torch.ones(5).to(dtype), torch.tensor([0, 2, 0, 3, 0]))
    assert rows.sums().tolist() == [0, 2, 0, 3, 0]
    assert Rows(torch.zeros(0), torch.tensor([0, 0])).sums().tolist() == [0, 0]


def test_sums_of_more_rows_than_are_added_up_at_a_time():
    lengths = torch.arange(1000) % 4
    rows = Rows(torch.ones(int(lengths.sum()), dtype=torch.int64), lengths)
    assert torch.equal(rows.sums(), lengths.double())


def test_no_rows_have_every_form():
    rows = Rows.from_list([])
    assert [len(x) for x in (rows.tensor, rows.padded(), rows.sums(), rows.unpack())] == [0] * 4
