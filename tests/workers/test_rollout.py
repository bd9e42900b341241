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


# ---- groups that are begun ----


def begin(num=3, *, n=2, steps=2, max_new_tokens=20, **options):
    """A worker of its own that has sampled a few tokens of some groups, and their prompts."""
    worker = rk.RolloutWorker(
        rk.models.tiny(pretrained="reverse_digits"), max_new_tokens=max_new_tokens, **options
    )
    asked = prompts(num)
    worker.begin(asked, n=n, temperature=3.0)
    for _ in range(steps):
        worker._step()
    return worker, asked


def finish(worker, **options):
    found = []
    while worker.begun():
        batch = worker.advance(seconds=60, **options)
        found += [] if batch is None else [batch]
    return rk.Batch.concat(found)


def texts(batch):
    return dict(zip(batch.uids.tolist(), batch["response"], strict=True))


def fails_after(worker, steps):
    """The worker's engine raises in one of the next steps, then works again."""
    step, left = worker.engine.step, [steps]

    def failing(**options):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        return step(**options)

    worker.engine.step = failing


def test_after_abort_the_engine_has_nothing_and_the_next_call_no_strangers():
    worker, _ = begin()
    worker.abort()
    assert not worker.engine.uids
    assert worker.begun() == []
    served = []
    note = worker.in_flight.note
    worker.in_flight.note = lambda response: (served.append(response.uid), note(response))
    batch = worker.generate(prompts(1, length=4), n=2)
    assert sorted(served) == sorted(batch.uids.tolist())


@pytest.mark.parametrize("where", ["advance", "generate", "stream"])
def test_an_error_in_the_engine_lets_begun_groups_begin_again(where):
    expected = texts(finish(begin(num=3)[0]))
    worker, _ = begin(num=3)
    fails_after(worker, 3)
    calls = {
        "advance": lambda: worker.advance(seconds=60),
        "generate": lambda: worker.generate(prompts(1, length=4)),
        "stream": lambda: list(worker.stream(prompts(1, length=4))),
    }
    with pytest.raises(MemoryError):
        calls[where]()
    assert len(worker.begun()) == 3
    assert texts(finish(worker)) == expected


def test_a_prompt_that_does_not_fit_leaves_the_others_as_they_were():
    worker, _ = begin(num=2)
    with pytest.raises(ValueError, match="request: got"):
        worker.begin(prompts(1, length=4), max_new_tokens=10_000)
    assert len(worker.begun()) == 2
    assert len(finish(worker)) == 4


def test_a_stream_and_begun_groups_do_not_take_each_others():
    worker, asked = begin(num=2, n=2)
    others = prompts(2, length=4)
    streamed = worker.stream(others, n=2)
    first = next(streamed)
    rest = [first, *streamed]
    begun = finish(worker)
    assert set(begun.meta["group_ids"]) == set(asked.meta["group_ids"])
    streamed_ids = {group for batch in rest for group in batch.meta["group_ids"].tolist()}
    assert streamed_ids == set(others.meta["group_ids"].tolist())


def test_responses_beyond_the_maximum_age_begin_again_under_the_new_weights():
    worker, _ = begin(num=3, n=2, steps=4)
    weights = {name: tensor.clone() for name, tensor in worker.weights().items()}
    worker.load_weights(weights, version=2)
    batch = finish(worker, max_age=1)
    assert (batch["token_version"][batch["response_mask"].bool()] == 2).all()
    assert texts(batch) == texts(finish(begin(num=3)[0]))  # the same draws, the same weights


def test_responses_within_the_maximum_age_go_on():
    worker, _ = begin(num=3, n=2, steps=2)
    running = set(worker.engine.first_versions())
    weights = {name: tensor.clone() for name, tensor in worker.weights().items()}
    worker.load_weights(weights, version=2)
    batch = finish(worker, max_age=2)
    first = dict(zip(batch.uids.tolist(), batch["token_version"][:, 0].tolist(), strict=True))
    assert {first[uid] for uid in running} == {0}
