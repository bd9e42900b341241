import logging
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.batch import MAX_SAMPLES, Batch
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column, LocalStore


def ragged(*rows, dtype=torch.int64):
    """1-D tensors of different lengths."""
    return [torch.tensor(row, dtype=dtype) for row in rows]


def four_rows(**columns):
    """Two groups of two rows; responses of 3, 1, 2 and 2 tokens, one of them not trainable."""
    return Batch.from_columns(
        {
            "uid": [10, 11, 12, 13],
            "group_ids": [5, 6, 5, 6],
            "policy_version": [1, 1, 2, 2],
            "prompt": ["a", "b", "a", "b"],
            "prompt_ids": ragged([1], [2, 2], [1], [2, 2]),
            "response_ids": ragged([7, 8, 9], [7], [7, 8], [8, 9]),
            "response_mask": ragged([1, 0, 1], [1], [1, 1], [1, 1]),
            "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0]),
            **columns,
        }
    )


@st.composite
def batches(draw):
    """Rows of random lengths, masks and groups."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    bits = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    groups = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return Batch.from_columns(
        {
            "group_ids": groups,
            "response_ids": [torch.arange(n) for n in lengths],
            "response_mask": ragged(*bits, dtype=torch.bool),
            "x": [torch.arange(n, dtype=torch.float64) + i for i, n in enumerate(lengths)],
        }
    )


# ---- columns: what goes in comes out ----


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.float32, torch.float64]
)
def test_tensors_come_back_with_values_and_dtype(dtype):
    scalars, matrix = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([[0, 1]] * 3).to(dtype)
    batch = Batch.from_columns({"scalars": scalars, "matrix": matrix})
    for name, values in (("scalars", scalars), ("matrix", matrix)):
        assert batch[name].dtype == dtype
        assert torch.equal(batch[name], values)


@pytest.mark.parametrize("values", [["a", "€", ""], [[1, 2], [], [3]], [None, 1, "x"]])
def test_lists_come_back_as_lists(values):
    assert Batch.from_columns({"x": values})["x"] == values
    batch = Batch.from_columns({"rewards": torch.zeros(3)})
    batch["x"] = values
    assert batch["x"] == values


@pytest.mark.parametrize(
    "values",
    [np.array([1, 2]), np.array([1.5, 2], dtype=np.float32), np.array([[1, 2], [3, 4]])],
)
def test_numpy_arrays_are_tensors_however_they_come_in(values):
    batch = Batch.from_columns({"x": values})
    batch["y"] = values
    for name in ("x", "y"):
        assert torch.equal(batch[name], torch.from_numpy(values))


def test_numpy_text_comes_back_as_a_list():
    batch = Batch.from_columns({"x": np.array(["a", "b"])})
    batch["y"] = np.array(["c", "d"])
    assert batch["x"] == ["a", "b"]
    assert batch["y"] == ["c", "d"]


def test_series_of_numbers_is_a_tensor():
    batch = Batch.from_columns({"x": torch.zeros(2)})
    batch["y"] = pd.Series([1, 2])
    assert batch["y"].tolist() == [1, 2]


def test_numbers_in_a_list_are_a_tensor():
    batch = Batch.from_columns({"x": [1, 2], "y": [0.5, 1.5]})
    assert batch["x"].dtype == torch.int64
    assert batch["y"].tolist() == [0.5, 1.5]


@pytest.mark.parametrize("lengths", [(3, 4), (3, 3), (1, 1)])
def test_equal_lengths_do_not_change_what_comes_back(lengths):  # faults E4
    batch = Batch.from_columns({"x": [torch.ones(n) for n in lengths]})
    assert batch["x"].shape == (2, max(lengths))
    assert batch.lengths("x").tolist() == list(lengths)
    assert batch.columns["x"].load().kind == "ragged"


def test_ragged_rows_are_padded_with_zero_on_the_right():
    assert four_rows()["response_ids"].tolist() == [[7, 8, 9], [7, 0, 0], [7, 8, 0], [8, 9, 0]]


def test_written_padding_is_not_stored():
    batch = four_rows()
    batch["old_logprobs"] = torch.full((4, 3), -1.0)
    assert batch.lengths("old_logprobs").tolist() == [3, 1, 2, 2]
    assert batch["old_logprobs"][1].tolist() == [-1, 0, 0]


def test_sampled_tokens_are_kept_and_never_encoded_again():  # faults C7
    batch = Batch.from_columns(
        {
            "response": ["ab"],  # a=0, b=1, ab=2: encoding the text would give [2]
            "response_ids": ragged([0, 1]),
            "rollout_logprobs": ragged([-0.1, -0.2], dtype=torch.float32),
        }
    )
    assert batch["response_ids"].tolist() == [[0, 1]]
    assert batch["rollout_logprobs"].shape == (1, 2)


def test_identity_comes_back_as_int64():
    batch = four_rows()
    assert batch["uid"].tolist() == [10, 11, 12, 13]
    assert batch["group_ids"].dtype == torch.int64
    assert batch["policy_version"].tolist() == [1, 1, 2, 2]


def test_rows_without_identity_are_numbered_and_each_its_own_group():
    batch = Batch.from_columns({"x": torch.zeros(3)})
    assert batch["uid"].tolist() == [0, 1, 2]
    assert batch["group_ids"].tolist() == [0, 1, 2]
    assert batch["policy_version"].tolist() == [0, 0, 0]


def test_prompt_mask_follows_from_the_lengths():
    assert four_rows()["prompt_mask"].tolist() == [[1, 0], [1, 1], [1, 0], [1, 1]]
    assert four_rows().select([])["prompt_mask"].shape == (0, 0)


def test_changing_a_tensor_that_was_read_does_not_change_the_batch():
    batch = four_rows()
    for name in ("rewards", "response_ids", "uid"):
        before = batch[name].clone()
        batch[name].add_(1)
        assert torch.equal(batch[name], before)


def test_changing_a_list_that_was_read_does_not_change_the_batch():
    batch = four_rows()
    batch["prompt"].append("c")
    assert len(batch["prompt"]) == 4


def test_changing_a_tensor_that_was_written_does_not_change_the_batch():
    values = torch.zeros(4)
    batch = four_rows(given=values)
    batch["bound"] = values
    batch["spread"] = batch.expand(values)
    values += 1
    for name in ("given", "bound", "spread"):
        assert batch[name].abs().sum().item() == 0


def test_written_tensor_has_no_gradient_history():
    batch = four_rows()
    batch["x"] = torch.ones(4, requires_grad=True) * 2
    batch["y_ids"] = list(torch.ones(4, 2, requires_grad=True) * 2)
    assert not batch["x"].requires_grad
    assert not batch["y_ids"].requires_grad


# ---- what is bound fits ----


def test_padded_columns_take_the_lengths_of_their_ids_in_any_order():
    values = torch.arange(6.0).reshape(2, 3)
    batch = Batch.from_columns(
        {
            "advantages": values,
            "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
            "prompt_weights": torch.ones(2, 2),
            "response_ids": ragged([5, 6], [5, 6, 7]),
            "prompt_ids": ragged([1, 2], [1]),
        }
    )
    assert batch.lengths("advantages").tolist() == [2, 3]
    assert batch.lengths("response_mask").tolist() == [2, 3]
    assert batch.lengths("prompt_weights").tolist() == [2, 1]
    assert batch["advantages"].tolist() == [[0, 1, 0], [3, 4, 5]]
    assert next(iter(batch.columns)) == "advantages"


def test_padded_columns_without_ids_keep_their_width():
    assert Batch.from_columns({"x": torch.ones(2, 3)}).lengths("x").tolist() == [3, 3]


def test_ragged_rows_of_other_lengths_name_the_first_bad_row():
    message = r"x: got 2 values in row 1, need 1, .*'response_ids' .*\(2 of 4 rows differ\)"
    with pytest.raises(ValueError, match=message):
        four_rows()["x"] = ragged([1, 2, 3], [1, 2], [1, 2], [1])


def test_a_column_of_other_lengths_is_an_error_when_it_gets_its_name():
    batch = four_rows()
    made = batch.apply(lambda rewards: ragged([1, 2], [1], [1], [1]), "rewards")
    batch["tool_ids"] = made  # ids have lengths of their own
    with pytest.raises(ValueError, match="prompt_x: got 2 values in row 0, need 1"):
        batch["prompt_x"] = made


@pytest.mark.parametrize("name", ["response_mask", "prompt_mask", "tool_mask"])
@pytest.mark.parametrize("value", [2, -1, 0.5, math.nan])
def test_a_mask_is_0_or_1(name, value):
    batch = four_rows()
    lengths = batch.lengths("prompt_ids" if name == "prompt_mask" else "response_ids")
    with pytest.raises(ValueError, match=f"{name}: got {value}, need 0 or 1"):
        batch[name] = [torch.full((length,), value) for length in lengths.tolist()]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32])
def test_a_mask_has_any_dtype(dtype):
    batch = four_rows()
    batch["response_mask"] = batch["response_mask"].to(dtype)
    assert batch.num_trainable.tolist() == [2, 1, 2, 2]


def test_what_has_a_value_a_token_is_not_expanded():
    batch = four_rows()
    spread = batch.expand(batch["rewards"])
    for column in (batch.columns["response_ids"], spread, batch.columns["prompt"]):
        with pytest.raises(ValueError, match="need one number a response"):
            batch.expand(column)


def test_a_column_that_is_still_computed_is_refused_when_it_is_there():
    batch = four_rows()
    parts = batch.columns["response_ids"].parts
    batch["x"] = batch.expand(Column("late", batch.store, batch.uids, lambda: parts))
    with pytest.raises(ValueError, match="expand: got column 'late' of ragged rows"):
        batch["x"]


# ---- errors ----


@pytest.mark.parametrize("rows", [0, slice(4), [1, 2], (0, 1)])
def test_rows_in_brackets_say_what_selects_them(rows):
    batch = four_rows()
    for call in (batch.__getitem__, lambda rows: batch.__setitem__(rows, [])):
        with pytest.raises(TypeError, match=r"need the name of a column.*batch\.select.*frame"):
            call(rows)


def test_a_name_that_is_nearly_one_is_suggested():
    batch = four_rows()
    with pytest.raises(KeyError, match=r"has \['prompt'.*Did you mean 'rewards'\?"):
        batch["reward"]
    with pytest.raises(KeyError, match=r"Did you mean 'advantages'\?"):
        batch["advantage"]


def test_no_columns_are_an_error():
    with pytest.raises(ValueError, match="columns: got none"):
        Batch.from_columns({})


def test_columns_of_different_sizes_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"got 2 rows in 'x' but \{'y': 3\}"):
        Batch.from_columns({"x": torch.zeros(2), "y": torch.zeros(3)})


def test_one_uid_twice_is_an_error():
    with pytest.raises(ValueError, match="uids: got the same uid twice"):
        Batch.from_columns({"uid": [1, 1]})


@pytest.mark.parametrize("name", ["uid", "group_ids", "policy_version"])
def test_identity_that_is_not_integer_is_an_error(name):
    with pytest.raises(TypeError, match=rf"{name}: got float.*need integers \[B\]"):
        Batch.from_columns({name: [0.5, 1.5]})


def test_group_ids_of_another_length_are_an_error():
    batch = four_rows()
    with pytest.raises(ValueError, match=r"group_ids: got 2 values, need 4"):
        batch["group_ids"] = [1, 2]


def test_uids_of_a_batch_stay():
    batch = four_rows()
    with pytest.raises(ValueError, match="uid"):
        batch["uid"] = [1, 2, 3, 4]


def test_group_ids_can_be_given_anew():
    batch = four_rows()
    batch["group_ids"] = [1, 1, 1, 1]
    assert len(list(batch.groups())) == 1


def test_number_of_values_must_be_the_number_of_rows():
    batch = four_rows()
    with pytest.raises(ValueError, match="rewards: got 3 values, need 4"):
        batch["rewards"] = torch.zeros(3)


def test_width_must_be_that_of_the_longest_response():
    batch = four_rows()
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \(4, 2\), need \[4, 3\]"):
        batch["old_logprobs"] = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("old_logprobs", r"actor\.compute_logprobs"),
        ("ref_logprobs", r"reference\.compute_logprobs"),
        ("rewards", r"rk\.score"),
        ("response_ids", r"rollout\.generate"),
        ("mine", "a stage of yours"),
    ],
)
def test_missing_column_names_the_stage_that_writes_it(name, writer):
    batch = Batch.from_columns({"prompt": ["a"]})
    with pytest.raises(KeyError, match=rf"no column '{name}'; it has \['prompt'\].*{writer}"):
        batch[name]


def test_column_of_other_rows_is_an_error():
    batch, other = four_rows(), Batch.from_columns({"uid": [10, 11], "x": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"x: got a column without 2 of this batch's 4 rows"):
        batch["x"] = other.columns["x"]


def test_pickling_a_batch_in_memory_says_what_to_do():
    with pytest.raises(TypeError, match=r"memory of one process.*worker group"):
        pickle.dumps(four_rows())


# ---- rebinding and freeing ----


def test_overwriting_a_column_is_logged(caplog):
    batch = four_rows()
    with caplog.at_level(logging.INFO, logger="rlkit.batch"):
        batch["rewards"] = torch.ones(4)
    assert "column 'rewards' of 4 rows is written again" in caplog.text
    assert batch["rewards"].tolist() == [1, 1, 1, 1]


def test_first_writing_of_a_column_is_not_logged(caplog):
    batch = four_rows()
    with caplog.at_level(logging.INFO, logger="rlkit.batch"):
        batch["x"] = torch.ones(4)
    assert caplog.text == ""


def test_column_that_nobody_names_is_freed():
    store = LocalStore()
    batch = Batch.from_columns({"x": torch.zeros(4), "y": torch.zeros(4)}, store=store)
    assert len(store.shelf) == 2
    batch["x"] = torch.ones(4)
    assert len(store.shelf) == 2
    del batch["y"]
    assert len(store.shelf) == 1
    del batch
    assert len(store.shelf) == 0
    assert store.shelf.nbytes == 0


def test_part_of_a_batch_keeps_its_columns_alive():
    store = LocalStore()
    batch = Batch.from_columns({"x": torch.arange(4)}, store=store)
    part = batch.select([1])
    del batch
    assert part["x"].tolist() == [1]


def test_rewriting_a_part_leaves_the_whole_alone():
    batch = four_rows()
    part = batch.select([0, 1])
    part["rewards"] = torch.tensor([9.0, 9.0])
    assert batch["rewards"].tolist() == [1, 0, 0, 1]


def test_deleted_column_is_gone():
    batch = four_rows()
    del batch["rewards"]
    assert "rewards" not in batch
    with pytest.raises(KeyError):
        batch["rewards"]


def test_column_of_a_whole_can_be_bound_to_a_part():
    batch = four_rows()
    part = batch.select([2, 0])
    part["again"] = batch.columns["rewards"]
    assert part["again"].tolist() == [0, 1]


# ---- rows ----


def test_select_takes_positions_in_order():
    part = four_rows().select([3, 0])
    assert part["uid"].tolist() == [13, 10]
    assert part["group_ids"].tolist() == [6, 5]
    assert part["prompt"] == ["b", "a"]
    assert part["response_ids"].tolist() == [[8, 9, 0], [7, 8, 9]]


@pytest.mark.parametrize(
    "mask", [torch.tensor([False, True, True, False]), [False, True, True, False]]
)
def test_select_takes_a_mask(mask):
    assert four_rows().select(mask)["uid"].tolist() == [11, 12]


def test_select_of_nothing_keeps_the_columns():
    part = four_rows().select([])
    assert len(part) == 0
    assert part["rewards"].shape == (0,)
    assert part["rewards"].dtype == torch.float32
    assert part["prompt"] == []


def test_select_beyond_the_rows_is_an_error():
    with pytest.raises(IndexError, match="need at most 3"):
        four_rows().select([4])


def test_select_with_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match=r"got a mask of shape \(2,\), need \[4\]"):
        four_rows().select([True, False])


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_concat_of_parts_is_the_selection(order):
    batch = four_rows()
    joined = Batch.concat([batch.select(order[:1]), batch.select(order[1:])])
    assert joined["uid"].tolist() == batch["uid"][list(order)].tolist()
    for name in ("prompt", "response_ids", "rewards", "policy_version"):
        expected = batch.select(order)[name]
        got = joined[name]
        assert got == expected if isinstance(got, list) else torch.equal(got, expected)


def test_concat_joins_columns_written_apart():
    batch = four_rows()
    first, second = batch.select([0, 1]), batch.select([2, 3])
    first["x"], second["x"] = torch.tensor([1, 2]), torch.tensor([3, 4])
    assert Batch.concat([second, first])["x"].tolist() == [3, 4, 1, 2]


@settings(deadline=None)
@given(st.permutations(range(4)))
def test_order_of_rows_holds_across_columns_written_apart(order):
    batch = four_rows()
    first, second = batch.select([0, 1]), batch.select([2, 3])
    first["x_ids"], second["x_ids"] = ragged([1], [2, 2]), ragged([3, 3, 3], [4, 4, 4, 4])
    mixed = Batch.concat([first, second]).select(order)
    assert mixed["x_ids"][:, 0].tolist() == [i + 1 for i in order]
    assert mixed.lengths("x_ids").tolist() == [i + 1 for i in order]
    assert mixed.load()["x_ids"][:, 0].tolist() == [i + 1 for i in order]


def test_concat_keeps_expanded_columns():
    batch = four_rows()
    batch["advantages"] = batch.expand(torch.tensor([1.0, 2, 3, 4]))
    joined = Batch.concat([batch.select([1]), batch.select([0])])
    assert joined["advantages"].tolist() == [[2, 0, 0], [1, 0, 1]]


def test_concat_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="concat: got no batches"):
        Batch.concat([])


def test_concat_of_different_columns_names_them():
    batch = four_rows()
    other = batch.select([0])
    other["x"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"concat: got columns that differ: \['x'\]"):
        Batch.concat([batch.select([1]), other])


def test_concat_brings_the_rows_of_other_stores_along():
    first, second = (Batch.from_columns({"uid": [i], "x": torch.ones(1) * i}) for i in (0, 1))
    assert Batch.concat([first, second])["x"].tolist() == [0, 1]


def test_concat_takes_of_each_batch_its_own_rows():
    """A column that was written again for some rows: the old values of those rows stay out."""
    batch = Batch.from_columns({"rewards": torch.zeros(4)})
    left, right = batch.select([0, 1]), batch.select([2, 3])
    right["rewards"] = torch.ones(2)
    assert Batch.concat([left, right])["rewards"].tolist() == [0, 0, 1, 1]


def test_groups_go_by_id_in_order_of_appearance():
    assert [g["uid"].tolist() for g in four_rows().groups()] == [[10, 12], [11, 13]]


def test_tokens_are_counted_without_padding():
    batch = four_rows()
    assert batch.num_tokens.tolist() == [4, 3, 3, 4]
    assert batch.num_trainable.tolist() == [2, 1, 2, 2]


# ---- expand and apply ----


def test_expanded_value_is_on_the_mask_and_zero_elsewhere():
    batch = four_rows()
    batch["advantages"] = batch.expand(torch.tensor([0.5, -1, 2, 3]))
    assert batch["advantages"].tolist() == [[0.5, 0, 0.5], [-1, 0, 0], [2, 2, 0], [3, 3, 0]]


def test_expand_stores_one_value_a_response():
    batch = four_rows()
    column = batch.expand(torch.zeros(4))
    assert column.nbytes == 4 * 4
    assert column.load().kind == "scalar"


def test_expanded_nan_stays_out_of_the_padding():
    batch = four_rows()
    batch["advantages"] = batch.expand(torch.full((4,), torch.nan))
    assert batch["advantages"].isnan().sum().item() == batch.num_trainable.sum()


def test_expanded_column_follows_a_part():
    batch = four_rows()
    batch["advantages"] = batch.expand(torch.tensor([0.5, -1, 2, 3]))
    assert batch.select([2, 1])["advantages"].tolist() == [[2, 2], [-1, 0]]


def test_column_can_be_expanded():
    batch = four_rows()
    batch["advantages"] = batch.expand(batch.columns["rewards"])
    assert batch["advantages"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert batch["rewards"].shape == (4,)


def test_expand_wants_one_value_a_response():
    with pytest.raises(ValueError, match=r"expand: got shape \(4, 3\), need \[4\]"):
        four_rows().expand(torch.zeros(4, 3))


def test_apply_runs_on_the_named_columns():
    batch = four_rows()
    batch["x"] = batch.apply(lambda ids, rewards: ids * rewards[:, None], "response_ids", "rewards")
    assert batch["x"].tolist() == [[7, 8, 9], [0, 0, 0], [0, 0, 0], [8, 9, 0]]
    assert batch.lengths("x").tolist() == [3, 1, 2, 2]


def test_apply_may_return_a_value_a_row_or_a_list():
    batch = four_rows()
    batch["length"] = batch.apply(lambda mask: mask.sum(1), "response_mask")
    batch["loud"] = batch.apply(lambda prompts: [p.upper() for p in prompts], "prompt")
    assert batch["length"].tolist() == [2, 1, 2, 2]
    assert batch["loud"] == ["A", "B", "A", "B"]


def test_apply_reads_identity_too():
    batch = four_rows()
    batch["twice"] = batch.apply(lambda uid, group: uid * 2 + group, "uid", "group_ids")
    assert batch["twice"].tolist() == [25, 28, 29, 32]


def test_apply_keeps_no_gradient_history():
    batch = four_rows()
    batch["x"] = batch.apply(lambda r: r.requires_grad_() * 2, "rewards")
    assert not batch["x"].requires_grad


def test_apply_of_the_wrong_number_of_values_names_the_function():
    def halve(rewards):
        return rewards[:2]

    with pytest.raises(ValueError, match="halve: got 2 values, need 4"):
        four_rows().apply(halve, "rewards")


def test_apply_on_a_missing_column_names_its_writer():
    with pytest.raises(KeyError, match=r"critic\.compute_values"):
        four_rows().apply(lambda v: v, "values")


def test_function_of_apply_is_a_copy_as_on_a_cluster():
    seen = []
    batch = four_rows()
    batch["x"] = batch.apply(lambda r: (seen.append(1), r)[1], "rewards")
    assert seen == []


def test_mask_made_by_apply_counts_its_tokens():
    batch = four_rows()
    batch["response_mask"] = batch.apply(lambda ids: ids > 7, "response_ids")
    assert batch.num_trainable.tolist() == [2, 0, 1, 2]
    assert batch.as_step().step_tokens == 5


# ---- steps, micro-batches, ranks: the denominators ----


def test_as_step_counts_the_trainable_tokens_and_rows():
    step = four_rows().as_step()
    assert (step.step_tokens, step.step_rows) == (7, 4)


def test_denominators_follow_the_parts_of_a_step():
    step = four_rows().as_step()
    for part in (*step.microbatches(4), step.shard(0, 2), step.select([1]), *step.groups()):
        assert (part.step_tokens, part.step_rows) == (7, 4)


def test_means_outside_a_step_use_the_batchs_own_counts():
    batch = four_rows()
    assert batch.token_mean(torch.ones(4, 3)).item() == 1
    assert batch.select([1, 2]).token_mean(torch.ones(2, 2)).item() == 1
    assert batch.seq_mean(torch.tensor([1.0, 2, 3, 4])).item() == 2.5


def test_token_mean_skips_masked_tokens_even_if_nan():
    batch = Batch.from_columns({"response_mask": torch.tensor([[1, 0], [1, 1]])})
    x = torch.tensor([[1.0, torch.nan], [3.0, 5.0]], requires_grad=True)
    mean = batch.token_mean(x)
    assert mean.item() == 3
    third = pytest.approx(1 / 3)
    assert torch.autograd.grad(mean, x)[0].tolist() == [[third, 0], [third, third]]


def test_nothing_trainable_gives_a_mean_of_zero():  # faults B3
    batch = Batch.from_columns({"response_mask": torch.zeros(2, 3)})
    assert batch.token_mean(torch.ones(2, 3)).item() == 0
    assert batch.seq_mean(torch.ones(2, 3)).item() == 0


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 3), (3, 4)])
def test_token_mean_of_another_shape_is_an_error(shape):
    token_mean = getattr(Batch.token_mean, "__wrapped__", Batch.token_mean)
    with pytest.raises(ValueError, match=r"token_mean: got shape .*need \[4, 3\]"):
        token_mean(four_rows(), torch.ones(shape))


def test_seq_mean_of_another_number_of_rows_is_an_error():
    seq_mean = getattr(Batch.seq_mean, "__wrapped__", Batch.seq_mean)
    with pytest.raises(ValueError, match=r"seq_mean: got shape \(3,\)"):
        seq_mean(four_rows(), torch.ones(3))


@settings(deadline=None)
@given(batches(), st.integers(1, 12), st.integers(1, 3), st.integers(0, 5))
def test_micro_batches_and_ranks_add_up_to_the_step(batch, budget, ranks, seed):  # faults B1
    num = len(np.unique(batch.meta["group_ids"]))
    for step in batch.minibatches(num, seed=seed):
        parts = [micro for r in range(ranks) for micro in step.shard(r, ranks).microbatches(budget)]
        assert sorted(u for p in parts for u in p.uids) == sorted(step.uids)
        for mean in (Batch.token_mean, Batch.seq_mean):
            total = sum(mean(part, part["x"]).item() for part in parts)
            assert total == pytest.approx(mean(step, step["x"]).item(), abs=1e-12)


@settings(deadline=None)
@given(batches(), st.integers(0, 5), st.data())
def test_minibatches_never_cut_a_group(batch, seed, data):
    groups = np.unique(batch.meta["group_ids"])
    num = data.draw(st.integers(1, len(groups)))
    steps = batch.minibatches(num, seed=seed)
    assert len(steps) == num
    assert sorted(u for step in steps for u in step.uids) == sorted(batch.uids)
    homes = [set(step.meta["group_ids"].tolist()) for step in steps]
    assert sum(map(len, homes)) == len(groups)
    for step in steps:
        assert step.step_rows == len(step)
        assert step.step_tokens == step.num_trainable.sum()


@settings(deadline=None)
@given(batches(), st.integers(1, 12))
def test_microbatches_keep_the_token_budget(batch, budget):
    for part in batch.microbatches(budget):
        assert part.num_tokens.sum() <= budget or len(part) == 1


def test_incomplete_last_microbatch_keeps_the_steps_denominators():  # faults D5
    batch = Batch.from_columns(
        {"response_ids": ragged(*[[7]] * 10), "response_mask": ragged(*[[1]] * 10)}
    )
    parts = batch.as_step().microbatches(4)
    assert [len(part) for part in parts] == [4, 4, 2]
    assert sum(part.token_mean(torch.ones(len(part), 1)).item() for part in parts) == pytest.approx(
        1
    )


def test_minibatches_do_not_depend_on_the_number_of_ranks():
    batch = four_rows()
    for rank, size in ((0, 1), (1, 2)):
        steps = batch.minibatches(2, seed=1)
        assert [step["uid"].tolist() for step in steps] == [
            step["uid"].tolist() for step in four_rows().minibatches(2, seed=1)
        ]
        assert set(steps[0].shard(rank, size).uids) <= set(steps[0].uids)


def test_rank_without_rows_has_an_empty_batch():
    part = four_rows().select([0]).as_step().shard(1, 2)
    assert len(part) == 0
    assert part.microbatches(4) == []
    assert part.step_rows == 1


# ---- loading, drawing, looking ----


def test_loaded_batch_has_the_same_values():
    batch = four_rows()
    batch["advantages"] = batch.expand(torch.tensor([0.5, -1, 2, 3]))
    part = batch.as_step().select([2, 0])
    loaded = part.load()
    for name in ("response_ids", "rewards", "advantages", "uid"):
        assert torch.equal(loaded[name], part[name])
    assert loaded["prompt"] == ["a", "a"]
    assert (loaded.step_tokens, loaded.step_rows) == (7, 4)


def test_batch_can_be_copied_to_another_store():
    batch, store = four_rows(), LocalStore()
    batch["advantages"] = batch.expand(torch.tensor([0.5, -1, 2, 3]))
    copy = batch.select([3, 1]).on(store)
    assert copy.store is store
    for name in ("response_ids", "rewards", "advantages"):
        assert copy.columns[name].store is store
        assert torch.equal(copy[name], batch.select([3, 1])[name])


def test_samples_of_a_group_are_numbered_on():
    prompts = Batch.from_columns({"group_ids": [3, 4], "prompt": ["a", "b"]})
    assert prompts.reserve(8).tolist() == [0, 0]
    assert prompts.select([1]).reserve(8).tolist() == [8]
    assert prompts.reserve(4).tolist() == [8, 16]


def test_joined_prompts_know_the_samples_drawn_of_each():
    prompts = Batch.from_columns({"group_ids": [3, 4], "prompt": ["a", "b"]})
    first, second = prompts.select([0]), prompts.select([1])
    first.reserve(8)
    joined = Batch.concat([first, second])
    assert joined.reserve(2).tolist() == [8, 0]
    assert prompts.reserve(1).tolist() == [10, 2]


def test_too_many_samples_of_a_prompt_are_an_error():
    prompts = Batch.from_columns({"prompt": ["a"]})
    with pytest.raises(ValueError, match=f"need at most {MAX_SAMPLES}"):
        prompts.reserve(MAX_SAMPLES + 1)


def test_load_leaves_text_where_it_is_unless_asked():
    batch = four_rows()
    assert batch.load().columns["prompt"].store is batch.store
    here = batch.load(objects=True)
    assert {column.store is batch.store for column in here.columns.values()} == {False}
    assert here["prompt"] == ["a", "b", "a", "b"]


def test_fresh_prompts_count_their_samples_from_0_and_leave_the_others_be():
    prompts = Batch.from_columns({"group_ids": [3, 4], "prompt": ["a", "b"]})
    prompts.reserve(8)
    assert prompts.fresh().reserve(2).tolist() == [0, 0]
    assert prompts.reserve(1).tolist() == [8, 8]


def test_frame_has_a_row_a_response():
    frame = four_rows().frame()
    assert frame["uid"].tolist() == [10, 11, 12, 13]
    assert frame["response_tokens"].tolist() == [3, 1, 2, 2]
    assert frame["prompt_tokens"].tolist() == [1, 2, 1, 2]
    assert frame["rewards"].tolist() == [1, 0, 0, 1]
    assert frame["prompt"].tolist() == ["a", "b", "a", "b"]


def test_drawing_a_batch_shows_columns_and_escapes_names():
    batch = four_rows()
    batch["<b>"] = torch.zeros(4)
    text = batch._repr_html_()
    assert "4 rows, 2 groups" in text
    assert "ragged int64" in text
    assert "&lt;b&gt;" in text
    assert "<b>Batch: 4 rows, 2 groups</b>" in text


def test_batches_of_a_store_keep_raw_rows_apart():
    store = LocalStore()
    first = Batch.from_columns({"uid": [0], "x": torch.tensor([1])}, store=store)
    second = Batch.from_columns({"uid": [1], "x": torch.tensor([2])}, store=store)
    assert Batch.concat([first, second])["x"].tolist() == [1, 2]
    assert isinstance(first.columns["x"].load(), Rows)


def ten_rows():
    """Row i has i + 1 trainable tokens of loss 1."""
    masks = [torch.ones(i + 1, dtype=torch.int8) for i in range(10)]
    return Batch.from_columns({"response_mask": masks, "loss": [m.float() for m in masks]})


def test_the_last_chunk_keeps_what_is_left_with_its_own_denominator():
    chunks = ten_rows().chunks(4)
    assert [len(chunk) for chunk in chunks] == [4, 4, 2]
    assert [chunk.step_tokens for chunk in chunks] == [10, 26, 19]
    assert float(chunks[2].token_mean(chunks[2]["loss"])) == 1.0


def test_dropping_the_last_chunk_reports_how_many_rows_are_left(caplog):
    chunks = ten_rows().chunks(4, drop_last=True)
    assert [len(chunk) for chunk in chunks] == [4, 4]
    assert "the last 2 of 10 rows are left out" in caplog.text
