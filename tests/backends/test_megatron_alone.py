"""MegatronBackend on one rank: packing, experts as transformers computes them, what it refuses."""

import os
from types import SimpleNamespace

import pytest
import torch
from megatron_ranks import SIZES, dense_model, expert_model, make_batch

import rlkit as rk
from rlkit.algo import logprobs
from rlkit.backends import megatron_cpu, megatron_stage
from rlkit.config import Layout, MixtureOfExperts, ModelSpec

pytestmark = pytest.mark.megatron


@pytest.fixture
def alone():
    """Makes backends of one rank; their process groups are gone after the test."""
    made = []

    def make(model, **options):
        made.append(rk.MegatronBackend(model, options=rk.MegatronOptions(**options)))
        return made[-1]

    yield make
    for backend in made[:1]:
        backend.close()


def rows(*pairs) -> rk.Batch:
    prompts, responses = ([torch.tensor(ids) for ids in side] for side in zip(*pairs, strict=True))
    return rk.Batch.from_columns(
        {
            "prompt_ids": prompts,
            "response_ids": responses,
            "response_mask": [torch.ones(len(ids)) for ids in responses],
        }
    ).as_step()


def test_packed_sequences_do_not_see_each_other(alone):  # faults C8
    backend = alone(dense_model("qwen3"))
    first, other, second = ([11, 12], [13]), ([21, 12], [13]), ([14], [15, 16, 17])
    found = [
        backend.forward(rows(*pair))[0].unpack() for pair in ((first, second), (other, second))
    ]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], backend.forward(rows(second))[0].unpack()[0])


def test_no_gradient_leaks_between_packed_sequences(alone):
    backend = alone(dense_model("llama"))
    loss_fn = lambda logprobs, batch: (logprobs[1].sum(), {})  # of the second row alone
    backend.forward_backward(rows(([11, 12], [13]), ([14], [15, 16])), loss_fn)
    (weight,) = [p for n, p in backend.stage.module.named_parameters() if "word_embeddings" in n]
    touched = weight.main_grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert touched == [14, 15]


def test_recomputing_changes_no_bit(alone):
    norms = []
    for recompute in (False, True):
        backend = alone(dense_model("qwen3"), recompute=recompute)
        loss_fn = lambda logprobs, batch: (batch.token_mean(logprobs), {})
        backend.forward_backward_all(make_batch().microbatches(18), loss_fn)
        norms.append(backend.step()["grad_norm"])
    assert norms[0] == norms[1]


def test_logits_of_some_rows_at_a_time_change_no_number(alone, monkeypatch):
    norms, made = [], []

    def seen(logits, *args, **options):
        made[-1].append(len(logits))
        return whole(logits, *args, **options)

    whole = megatron_stage.logprobs_and_entropy
    monkeypatch.setattr(megatron_stage, "logprobs_and_entropy", seen)
    for at_once in (1 << 22, 3000):
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
        backend, batch = alone(dense_model("qwen3")), make_batch()
        made.append([])
        backend.forward_backward(batch, lambda logprobs, batch: (batch.token_mean(logprobs), {}))
        norms.append(backend.step()["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert max(made[1]) < max(made[0]) == sum(made[0]) == sum(made[1]) / 2  # twice: the backward


def test_two_backends_share_a_process(alone):
    one, two = alone(dense_model("qwen3")), alone(dense_model("llama"))
    first = one.forward(make_batch())[0].tensor
    two.forward(make_batch())
    assert torch.equal(one.forward(make_batch())[0].tensor, first)


def test_experts_are_those_of_transformers(alone, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = expert_model().save(tmp_path / "experts")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt, response = [11, 12, 13], [14, 15, 16, 17]
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + response])).logits[0]
    expected = logits.log_softmax(-1)[2:-1].gather(1, torch.tensor(response)[:, None])[:, 0]
    backend = alone(rk.models.load(folder))
    found = backend.forward(rows((prompt, response)))[0].tensor
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


MOE = MixtureOfExperts(num_experts=4, experts_per_token=2, intermediate_size=12)
SHARED = MixtureOfExperts(
    num_experts=4, experts_per_token=2, intermediate_size=12, num_shared_experts=1
)
SP = rk.MegatronOptions(sequence_parallel=True)


@pytest.mark.parametrize(
    ("spec", "layout", "options", "message"),
    [
        ({}, Layout(tp=4), None, "got tp=4 for 2 key-value heads"),
        (
            {"intermediate_size": 25},
            Layout(tp=2),
            None,
            "for .*gate_proj.* of 25 rows, need a divisor",
        ),
        ({"moe": MOE}, Layout(ep=3), None, "got 3, need a divisor of the model's 4 experts"),
        ({}, Layout(ep=2), None, "got 2, need 1: the model has no experts"),
        ({}, Layout(), SP, "got True with tp=1"),
        ({}, Layout(cp=2, pp=2, rank_order="pp-tp-cp-ep-dp"), None, "CP2, .* need pp last"),
        ({"moe": SHARED}, Layout(), None, "shared experts"),
        ({"moe": MOE}, Layout(tp=2), None, "got expert_tp=2 on a CPU"),
        ({"moe": MOE}, Layout(tp=2, ep=2, expert_tp=1), None, "without sequence parallelism"),
    ],
)
def test_what_is_not_computed_is_refused(spec, layout, options, message):
    model = rk.models.Pretrained(ModelSpec(**SIZES | spec), None, {})
    context = rk.WorkerContext.at(0, layout.num_devices, layout)
    with pytest.raises(ValueError, match=message):
        rk.MegatronBackend(model, context=context, options=options)


def test_a_critic_is_refused():
    with pytest.raises(ValueError, match="got a critic"):
        rk.CriticWorker(dense_model("llama"), backend=rk.MegatronBackend)


def test_weights_of_another_shape_are_an_error_and_change_nothing(alone):
    backend = alone(dense_model("llama"))
    before = backend.state_dict()
    wrong = before | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"model.norm.weight \(3,\), need \(16,\)"):
        backend.load_state_dict(wrong)
    assert all(torch.equal(before[name], w) for name, w in backend.state_dict().items())


def test_the_distributed_optimizer_keeps_no_checkpoint_by_weight(alone):
    backend = alone(dense_model("llama"), distributed_optimizer=True)
    with pytest.raises(ValueError, match="Leave distributed_optimizer out"):
        backend.optimizer_state()


def test_torch_cuda_is_itself_outside_of_a_call(alone):
    before = torch.cuda.current_device, torch.Tensor.type, torch.zeros
    alone(dense_model("llama")).forward(make_batch())
    assert (torch.cuda.current_device, torch.Tensor.type, torch.zeros) == before


def test_with_an_accelerator_nothing_is_patched():
    before = torch.cuda.current_device, torch.Tensor.type, torch.zeros
    with megatron_cpu.patches(torch.device("cuda")):
        assert (torch.cuda.current_device, torch.Tensor.type, torch.zeros) == before


def test_on_an_npu_the_adaptor_of_mindspeed_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").touch()
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(
        "import os; os.environ['ADAPTED'] = os.environ['CUDA_DEVICE_MAX_CONNECTIONS']"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ADAPTED", "")
    megatron_cpu.prepare(SimpleNamespace(type="npu"))
    assert os.environ["ADAPTED"] == "1"
