"""TorchBackend cut over two and four processes: the numbers of one process."""

import pytest
import torch
import torch_ranks
from megatron_ranks import SIZES, dense_model, make_batch, train
from several_ranks import by_rank, check, check_checkpoint, run_on_ranks
from torch_ranks import DENSE

import rlkit as rk
from rlkit.config import Layout


@pytest.fixture(scope="module")
def found() -> dict[int, dict]:
    """By rank: what torch_ranks found with two and with four processes."""
    every = {rank: dict.fromkeys(DENSE | torch_ranks.MORE) for rank in range(4)}
    mains = (torch_ranks.on_two, 2), (torch_ranks.odd_on_two, 2), (torch_ranks.on_four, 4)
    for main, num in mains:
        for rank, cases in run_on_ranks(main, num).items():
            every[rank] |= cases
    return every


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict]:
    """By family: what one process finds."""
    families = ("llama", "qwen2", "qwen3", "odd")
    return {f: train(rk.TorchBackend(dense_model(f), lr=1e-2), make_batch()) for f in families}


@pytest.mark.parametrize("case", DENSE)
def test_a_layout_trains_as_one_process_does(found, one_process, case):
    check(by_rank(found, case), one_process[DENSE[case][0]])


@pytest.mark.parametrize("case", DENSE)
def test_weights_go_in_and_out_bit_by_bit(found, case):
    model, start = dense_model(DENSE[case][0]), found[0][case]["start"]
    tied = {"lm_head.weight"} if model.spec.tie_embeddings else set()
    assert start.keys() == model.weights.keys() - tied
    assert all(torch.equal(start[name], model.weights[name]) for name in start)


def test_a_loss_that_fails_or_is_nan_fails_on_all_ranks_and_changes_nothing(found, one_process):
    ranks = by_rank(found, "errors, FSDP2")
    assert [rank["raised"] for rank in ranks] == ["ArithmeticError", "PeerError"]
    assert [rank["skipped"] for rank in ranks] == [1.0] * 2
    check(ranks, one_process["qwen3"])


def test_a_rank_without_rows_takes_part(found):
    one, batch = rk.TorchBackend(dense_model("qwen3"), lr=1e-2), make_batch().select([4]).as_step()
    one.forward_backward(batch, torch_ranks.loss_fn)
    norm, two = one.step()["grad_norm"], by_rank(found, "few rows, FSDP2")
    assert [rows for rows, _ in two] == [1, 0]
    assert [got for _, got in two] == pytest.approx([norm] * 2, rel=2e-5)


def test_a_checkpoint_goes_on_to_the_bit_and_on_one_process(found):
    one = rk.TorchBackend(dense_model("qwen2"), lr=1e-2)
    train(one, make_batch())
    check_checkpoint(by_rank(found, "moments, TP2 FSDP2"), one)


@pytest.mark.parametrize("case", [case for case in torch_ranks.MORE if case.startswith("weights")])
def test_a_plan_moves_the_shards_to_whole_copies(found, case):
    for rank in by_rank(found, case):
        assert rank["names"] == rank["same"] == [True, True]


def test_what_was_in_host_memory_comes_back_and_trains_on(found, one_process):
    ranks = by_rank(found, "swap, TP2 FSDP2")
    assert all(rank["same"] for rank in ranks)
    assert [rank["away"] for rank in ranks] == [0] * 4
    check(ranks, one_process["qwen3"])


def test_a_rank_holds_its_share_of_weights_and_moments(found, one_process):
    total = sum(w.nbytes for w in one_process["qwen3"]["weights"].values())
    held = [rank["memory"] for rank in by_rank(found, "swap, TP2 FSDP2")]
    weights = sum(each["weights"] for each in held)
    norms = 2 * 4 * sum(w.numel() for w in dense_model("qwen3").weights.values() if w.ndim == 1)
    assert total <= weights <= total + norms  # norms are on both tensor-parallel ranks
    for each in held:
        assert 2 * each["weights"] <= each["optimizer"] <= 2.1 * each["weights"] + 400


def test_a_critic_is_cut_too(found):
    for rank in by_rank(found, "critic, TP2 FSDP2"):
        assert rank["found"][0] == pytest.approx(rank["expected"][0], rel=2e-5)
        torch.testing.assert_close(rank["found"][1], rank["expected"][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (Layout(pp=2), None, "got layout PP2, need pp=1 and ep=1.*MegatronBackend"),
        (Layout(ep=2), None, "got layout DP2 EP2, need pp=1 and ep=1.*MegatronBackend"),
        (Layout(cp=2), None, "got cp=2, need cp=1.*MegatronBackend.*sequence_parallel"),
        (Layout(tp=4), None, "got tp=4 for 2 key-value heads"),
        (Layout(), torch_ranks.SP, "got True with tp=1"),
        (Layout(tp=2, dp=2), torch_ranks.FSDP, "got tp=2 for 301 tokens of the vocabulary"),
    ],
)
def test_what_is_not_computed_is_refused(layout, options, message):
    model = rk.models.Pretrained(rk.ModelSpec(**SIZES | {"vocab_size": 301}), None, {})
    context = rk.WorkerContext.at(0, layout.num_devices, layout)
    with pytest.raises(ValueError, match=message):
        rk.TorchBackend(model, context=context, options=options)


def test_a_vocabulary_that_leaves_a_rank_without_tokens_is_refused():
    spec = rk.ModelSpec(**SIZES | {"vocab_size": 9, "num_kv_heads": 4})
    context = rk.WorkerContext.at(0, 4, Layout(tp=4))
    with pytest.raises(ValueError, match=r"got tp=4 for 9 tokens of the vocabulary.*Lower tp"):
        rk.TorchBackend(rk.models.Pretrained(spec, None, {}), context=context)


@pytest.mark.parametrize(
    "options", [{"fully_shard": True}, {}, rk.TorchOptions(fully_shard="no"), rk.TorchOptions]
)
def test_options_of_another_kind_are_refused(options):
    with pytest.raises(TypeError, match=r"got options .* need rk.TorchOptions\(...\) of True and"):
        rk.TorchBackend(dense_model("qwen3"), options=options)
