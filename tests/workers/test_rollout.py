"""RolloutWorker on its own, without a cluster."""

import pytest
import torch

import rlkit as rk


@pytest.fixture(scope="module")
def worker():
    return rk.RolloutWorker(rk.models.tiny(pretrained="reverse_digits"), max_new_tokens=10)


def prompts(size=3, length=5):
    return next(rk.tasks.reverse_digits(length=length).batches(size=size, steps=1))


def test_a_group_is_the_responses_to_one_prompt(worker):
    batch = worker.generate(prompts(), n=4)
    groups = batch["group_ids"] - batch["group_ids"][0]
    assert groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert all(len(set(group["prompt"])) == 1 for group in batch.groups())


def test_per_token_columns_have_equal_shapes(worker):
    batch = worker.generate(prompts(), n=4)
    names = ("response_ids", "response_mask", "rollout_logprobs", "token_version")
    assert len({batch[name].shape for name in names}) == 1


def test_sampled_ids_are_kept_not_encoded_again(worker):
    batch = worker.generate(prompts(), n=4)
    for ids, text, reason in zip(
        batch["response_ids"], batch["response"], batch["finish_reason"], strict=True
    ):
        kept = ids[ids != 0].tolist()
        assert worker.tokenizer.decode(kept) == text
        assert (kept[-1] == worker.tokenizer.eos_id) == (reason == "stop")


def test_drawing_again_gives_new_uids_and_other_samples(worker):
    same = prompts(size=8)
    one, two = worker.generate(same, n=4), worker.generate(same, n=4)
    assert set(one.uids).isdisjoint(two.uids)
    assert one["response"] != two["response"]


def test_the_same_prompts_made_again_give_the_same_samples(worker):
    one, two = worker.generate(prompts(), n=4), worker.generate(prompts(), n=4)
    assert one["response"] == two["response"]
    assert torch.equal(one["rollout_logprobs"], two["rollout_logprobs"])


def test_another_seed_of_the_run_gives_other_samples():
    model = rk.models.tiny(pretrained="reverse_digits")
    texts = [
        rk.RolloutWorker(model, context=rk.WorkerContext(seed=seed)).generate(prompts(), n=4)[
            "response"
        ]
        for seed in (0, 1)
    ]
    assert texts[0] != texts[1]


def test_the_version_is_the_oldest_of_a_rows_tokens(worker):
    batch = worker.generate(prompts(), n=2)
    assert batch["policy_version"].tolist() == [0] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n: got 0"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"max_new_tokens": 4000}, "need at most 128"),
    ],
)
def test_wrong_sampling_arguments_are_errors(worker, options, message):
    with pytest.raises(ValueError, match=message):
        worker.generate(prompts(), **options)


def test_no_prompts_is_an_error(worker):
    with pytest.raises(ValueError, match="got no prompts"):
        worker.generate(prompts().select([]))
