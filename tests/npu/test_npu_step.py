"""Backend, engine and a whole GRPO step on device npu: the numbers of a CPU."""

import pytest
import torch
from small_models import as_batch, make_model, make_prompts
from torch.nn.attention import SDPBackend, sdpa_kernel

import rlkit as rk
from rlkit import device
from rlkit.algo import clipped_policy_loss, group_relative, kl_k3
from rlkit.backends.torch_backend import TorchBackend
from rlkit.config import SamplingParams
from rlkit.engines import Request, TorchEngine


def responses(where: str, *, max_rows: int = 7) -> list:
    """Five prompts, three samples each, through fewer slots than rows."""
    engine = TorchEngine(make_model(num_kv_heads=1), device=where, seed=4, max_rows=max_rows)
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=(2,))
    requests = [
        Request(prompt, range(3 * i, 3 * i + 3), sampling)
        for i, prompt in enumerate(make_prompts(5))
    ]
    return requests, engine.generate(requests)


def test_the_engine_samples_the_tokens_of_a_cpu():
    (_, on_npu), (_, on_cpu) = responses("npu"), responses("cpu")
    for there, here in zip(on_npu, on_cpu, strict=True):
        assert torch.equal(there.token_ids, here.token_ids)
        assert torch.allclose(there.logprobs, here.logprobs, atol=1e-5)
        assert there.finish_reason == here.finish_reason


def test_the_engine_frees_its_cache_when_it_sleeps():
    engine = TorchEngine(make_model(), device="npu", max_rows=4)
    before = device.allocated_bytes("npu")
    engine.generate([Request([3, 4], [0], SamplingParams(max_new_tokens=2))])
    assert device.allocated_bytes("npu") > before
    engine.sleep()
    assert device.allocated_bytes("npu") == before


def test_the_backend_computes_the_logprobs_and_gradients_of_a_cpu():
    batch = as_batch(*responses("cpu"))
    on_npu, on_cpu = (TorchBackend(make_model(num_kv_heads=1), device=d) for d in ("npu", "cpu"))
    for there, here in zip(
        on_npu.forward(batch, entropy=True), on_cpu.forward(batch, entropy=True), strict=True
    ):
        assert there.values.device.type == "cpu"  # rows live in host memory
        assert torch.allclose(there.values, here.values, atol=1e-5)
    loss = lambda logprobs, batch: (batch.token_mean(logprobs.square()), {})
    for backend in (on_npu, on_cpu):
        backend.forward_backward(as_batch(*responses("cpu")), loss)
    for (name, there), here in zip(
        on_npu.decoder.named_parameters(), on_cpu.decoder.parameters(), strict=True
    ):
        assert torch.allclose(there.grad.cpu(), here.grad, rtol=1e-4, atol=1e-5), name


def grpo_loss(logprobs, batch):
    loss, metrics = clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)
    kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
    return loss + 1e-3 * kl, metrics | {"policy/kl_ref": kl}


def share_right(prompt: str, response: str, answer: str) -> float:
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


def grpo(where: str, *, steps: int = 2) -> dict:
    """A short GRPO run: tokens, rewards, metrics, final weights and where they were."""
    task, model = rk.tasks.reverse_digits(length=5), rk.models.tiny(pretrained="reverse_digits")
    found = {"tokens": [], "rewards": [], "logprobs": [], "metrics": []}
    with rk.launch(backend="local", devices=where, num_devices=1) as cluster:
        rollout = cluster.spawn(rk.RolloutWorker, model)
        actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3)
        reference = cluster.spawn(rk.ReferenceWorker, model)
        resharder = rk.Resharder(source=actor, target=rollout)
        for prompts in task.batches(size=4, steps=steps):
            batch = rollout.generate(prompts, n=5)
            batch["rewards"] = rk.score(share_right, batch)
            batch["old_logprobs"] = actor.compute_logprobs(batch)
            batch["ref_logprobs"] = reference.compute_logprobs(batch)
            batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
            metrics = actor.update(batch, loss_fn=grpo_loss, minibatches=2)
            resharder.reshard()
            found["tokens"].append(batch["response_ids"])
            found["rewards"].append(batch["rewards"])
            found["logprobs"].append(batch["old_logprobs"])
            found["metrics"].append({k: v for k, v in metrics.items() if not isinstance(v, str)})
        found["weights"] = actor.weights()
        found["start"] = model.weights
    return found


@pytest.fixture(scope="module")
def on_npu():
    return grpo("npu")


@pytest.fixture(scope="module")
def on_cpu():
    with sdpa_kernel(SDPBackend.MATH):  # what torch computes on a device that has no kernel for it
        return grpo("cpu")


def test_a_step_runs_on_the_device_and_its_columns_lie_in_host_memory(on_npu):
    assert {tensor.device.type for tensor in on_npu["weights"].values()} == {"npu"}
    assert {tensor.device.type for tensor in on_npu["tokens"] + on_npu["logprobs"]} == {"cpu"}


def test_a_step_samples_and_scores_what_a_cpu_does(on_npu, on_cpu):
    for name in ("tokens", "rewards"):
        assert all(torch.equal(a, b) for a, b in zip(on_npu[name], on_cpu[name], strict=True))
    assert len(set(on_cpu["rewards"][0].tolist())) > 1  # or there would be nothing to learn


def test_a_step_has_the_logprobs_and_metrics_of_a_cpu(on_npu, on_cpu):
    for step in range(2):
        expected = pytest.approx(on_cpu["metrics"][step], rel=1e-4, abs=1e-4)
        assert on_npu["metrics"][step] == expected
    assert torch.allclose(on_npu["logprobs"][0], on_cpu["logprobs"][0], atol=1e-5)


def test_a_step_ends_with_the_weights_of_a_cpu(on_npu, on_cpu):
    moved = max(float((w - on_cpu["start"][n]).abs().max()) for n, w in on_cpu["weights"].items())
    assert moved > 1e-3
    for name, expected in on_cpu["weights"].items():
        assert torch.allclose(on_npu["weights"][name].cpu(), expected, atol=2e-4), name
