"""MegatronBackend in layouts of two and four processes: the numbers of one process."""

import megatron_ranks
import pytest
import torch
from megatron_ranks import DENSE, EXPERTS, dense_model, make_batch, train
from several_ranks import by_rank, check, check_checkpoint, run_on_ranks

import rlkit as rk

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def found() -> dict[int, dict]:
    """By rank: what megatron_ranks.main returns."""
    return run_on_ranks(megatron_ranks.main, megatron_ranks.RANKS)


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict]:
    """By family: what TorchBackend finds."""
    families = {family for family, _, _ in DENSE.values()}
    return {
        family: train(rk.TorchBackend(dense_model(family), lr=1e-2), make_batch())
        for family in families
    }


@pytest.mark.parametrize("case", DENSE)
def test_a_layout_trains_as_one_process_does(found, one_process, case):
    check(by_rank(found, case), one_process[DENSE[case][0]])


@pytest.mark.parametrize("case", [case for case in EXPERTS if case != "one rank"])
def test_experts_on_several_ranks_train_as_on_one(found, case):
    one = found[0]["experts: one rank"]
    check(by_rank(found, f"experts: {case}"), one)


@pytest.mark.parametrize("case", [*DENSE, *(f"experts: {name}" for name in EXPERTS)])
def test_weights_go_in_and_out_bit_by_bit(found, case):
    dense = case in DENSE
    model = dense_model(DENSE[case][0]) if dense else megatron_ranks.expert_model()
    start = found[0][case]["start"]
    assert start.keys() == model.weights.keys() - (
        {"lm_head.weight"} if model.spec.tie_embeddings else set()
    )
    assert all(torch.equal(start[name], model.weights[name]) for name in start)


@pytest.mark.parametrize(
    ("case", "raised"),
    [
        ("errors, PP2", ["PeerError", "ArithmeticError"]),
        ("errors, TP2 DP2", ["ArithmeticError"] * 2 + ["PeerError"] * 2),
        ("errors, CP2 DP2", ["ArithmeticError"] * 2 + ["PeerError"] * 2),
    ],
)
def test_a_loss_that_fails_or_is_nan_fails_on_all_ranks_and_changes_nothing(
    found, one_process, case, raised
):
    ranks = by_rank(found, case)
    assert [rank["raised"] for rank in ranks] == raised
    assert [rank["skipped"] for rank in ranks] == [1.0] * len(ranks)
    check(ranks, one_process["qwen3"])


def test_a_rank_of_experts_without_rows_takes_part(found):
    (one,) = by_rank(found, "few rows: one rank")
    two = by_rank(found, "few rows: EP2")
    assert [rows for rows, _ in two] == [1, 0]
    assert [norm for _, norm in two] == pytest.approx([one[1]] * 2, rel=2e-5)


def test_both_copies_of_a_tied_embedding_stay_equal(found):
    first, last = by_rank(found, "tied, PP2")
    assert torch.equal(first, last)


def test_a_checkpoint_goes_on_to_the_bit_and_in_another_backend(found):
    one = rk.TorchBackend(dense_model("qwen2"), lr=1e-2)
    train(one, make_batch())
    check_checkpoint(by_rank(found, "moments, TP2 PP2"), one)


def test_storages_of_swapped_shards_are_gone_and_come_back_bit_equal(found, one_process):
    ranks = by_rank(found, "swap, TP2 PP2")
    for rank in ranks:
        assert all(rank["arrived"])
        weights, all_of_it = rank["swaps"]
        assert weights == {"kept": [], "bytes": 0, "same": True}
        # Gradients are views of a buffer, which Megatron names: its memory goes, the object stays.
        assert all(name.startswith("gradients/") for name in all_of_it["kept"])
        assert (all_of_it["bytes"], all_of_it["same"]) == (0, True)
    check(ranks, one_process["qwen2"])


def test_memory_is_that_of_the_ranks_shard(found):
    for rank in by_rank(found, "moments, TP2 PP2"):
        held = rank["memory"]
        assert held["weights"] <= held["gradients"] <= 1.1 * held["weights"] + 4096
        assert 2 * held["weights"] <= held["optimizer"] <= 2.1 * held["weights"]
