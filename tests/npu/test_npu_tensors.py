"""torch on device npu computes what it computes on a CPU, and refuses what a device refuses."""

import multiprocessing

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import make_model, make_spec
from torch.nn import functional as F

from rlkit.models.attention import PackedAttention, positions
from rlkit.models.decoder import Decoder


def test_a_tensor_comes_back_as_it_went():
    there = torch.arange(6.0).to("npu")
    assert there.device == torch.device("npu", 0)
    assert torch.equal(there.cpu(), torch.arange(6.0))


@pytest.mark.parametrize(
    "make_other",
    [lambda: torch.ones(2), lambda: torch.ones(2, device="npu:1")],
    ids=["host", "another device"],
)
def test_tensors_of_two_devices_do_not_mix(make_other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="npu") + make_other()


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="this process sees 8"):
        torch.ones(2, device="npu:8")


def test_a_seed_draws_the_same_numbers_again():
    torch.manual_seed(3)
    first = torch.randn(5, device="npu")
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(5, device="npu"))


def test_generators_of_the_device_and_of_the_host_are_apart():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(9, device="npu")
    assert torch.equal(torch.rand(4), expected)


def test_a_generator_of_the_device_draws_its_own_numbers():
    draw = lambda g: torch.randn(5, device="npu", generator=g)
    one, other = (torch.Generator("npu").manual_seed(seed) for seed in (1, 2))
    first = draw(one)
    assert not torch.equal(first, draw(other))
    assert torch.equal(first, draw(one.manual_seed(1)))


def test_dropout_follows_the_seed():
    drop = lambda: F.dropout(torch.ones(64, device="npu"), 0.5)
    torch.manual_seed(0)
    first = drop()
    assert 0 < int((first == 0).sum()) < 64
    torch.manual_seed(0)
    assert torch.equal(first, drop())


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_attention_is_that_of_a_cpu(num_kv_heads):
    q = torch.randn(2, 4, 7, 8)
    k, v = (torch.randn(2, num_kv_heads, 7, 8) for _ in range(2))
    call = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
    assert torch.allclose(call(q.npu(), k.npu(), v.npu()).cpu(), call(q, k, v), atol=1e-6)


def gradients(device: str) -> dict[str, torch.Tensor]:
    """Gradients of a decoder on packed sequences of three lengths."""
    decoder = make_model(num_kv_heads=1).build(device=device)
    lengths = torch.tensor([3, 1, 5])
    ids = torch.arange(9, device=device) + 3
    hidden = decoder(ids, positions(lengths), PackedAttention(lengths))
    decoder.logits(hidden).logsumexp(-1).sum().backward()
    return {name: p.grad for name, p in decoder.named_parameters()}


def test_gradients_of_a_decoder_are_those_of_a_cpu():
    on_npu, on_cpu = gradients("npu"), gradients("cpu")
    assert {g.device.type for g in on_npu.values()} == {"npu"}
    for name, expected in on_cpu.items():
        assert torch.allclose(on_npu[name].cpu(), expected, rtol=1e-4, atol=1e-5), name


def trained(device: str) -> dict[str, torch.Tensor]:
    """Weights after five AdamW steps."""
    decoder = Decoder(make_spec()).reset(torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    ids, lengths = torch.arange(8, device=device) + 3, torch.tensor([8])
    for _ in range(5):
        hidden = decoder(ids, positions(lengths), PackedAttention(lengths))
        F.cross_entropy(decoder.logits(hidden)[:-1], ids[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return decoder.weights()


def test_adamw_ends_with_the_weights_of_a_cpu():
    on_npu = trained("npu")
    for name, expected in trained("cpu").items():
        assert torch.allclose(on_npu[name].cpu(), expected, atol=1e-4), name


def test_safetensors_keeps_bits_and_loads_onto_the_device(tmp_path):
    weights = {"a": torch.randn(3, 4, device="npu"), "b": torch.ones(2, device="npu").bfloat16()}
    save_file(weights, tmp_path / "model.safetensors")
    for device in ("cpu", "npu:1"):
        loaded = load_file(tmp_path / "model.safetensors", device=device)
        for name, expected in weights.items():
            assert loaded[name].device == torch.device(device)
            assert torch.equal(loaded[name].cpu(), expected.cpu())


def test_a_saved_model_is_that_of_a_cpu(tmp_path):
    model = make_model()
    model.weights = {name: tensor.npu() for name, tensor in model.weights.items()}
    model.save(tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], make_model().weights[name]) for name in loaded)


def touch(queue) -> None:
    try:
        torch.ones(2, device="npu")
    except RuntimeError as error:
        queue.put(str(error))
    else:
        queue.put("no error")


@pytest.mark.parametrize(("method", "says"), [("fork", "'spawn' start"), ("spawn", "no error")])
def test_a_process_forked_from_one_that_used_a_device_may_not(method, says):
    torch.ones(2, device="npu")
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=touch, args=(queue,))
    child.start()
    assert says in queue.get()
    child.join(60)
