"""Parameter tables and forms: names and shapes of transformers, rows where Megatron has them."""

import pytest
import torch
import transformers
from toys import FAMILIES, SIZES, whole

from rlkit.config import Layout, ModelSpec, from_dict, to_dict
from rlkit.reshard import megatron, parameters, separate, shard, vllm

PUBLISHED = {
    "qwen25_7b": 7.62e9,
    "qwen25_32b": 32.76e9,
    "qwen3_8b": 8.19e9,
    "qwen3_30b_a3b": 30.53e9,
    "deepseek_r1_671b": 671.0e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_count_of_parameters(name):
    """Counts of the model cards on Hugging Face."""
    assert getattr(ModelSpec, name)().num_parameters == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("model", [*FAMILIES.values(), ModelSpec.deepseek_r1_671b()])
def test_a_table_has_as_many_elements_as_the_spec_counts(model):
    sizes = [torch.Size(p.shape).numel() * len(p.instances) for p in parameters(model)]
    assert sum(sizes) == model.num_parameters


def theirs(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of a transformers model of the same sizes, made without memory."""
    config = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
    }
    if model.moe:
        config |= {"moe_intermediate_size": 8, "num_experts": 8, "n_routed_experts": 8,
                   "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}  # fmt: skip
    if model.mla:
        make = transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config
        config |= {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "v_head_dim": 2}
        config |= {"qk_nope_head_dim": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    elif model.moe:
        make = transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig
        config |= {"head_dim": 2}
    else:
        make = (
            (transformers.Qwen3ForCausalLM, transformers.Qwen3Config)
            if model.qk_norm
            else (transformers.Qwen2ForCausalLM, transformers.Qwen2Config)
        )
        config |= {"head_dim": 2} if model.qk_norm else {}
    with torch.device("meta"):
        return {n: tuple(t.shape) for n, t in make[0](make[1](**config)).state_dict().items()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3 moe", "deepseek"])
def test_names_and_shapes_are_those_of_transformers(family):
    """Newer transformers stack experts, as vLLM does; checkpoints have them one by one."""
    model = FAMILIES[family]
    if not model.moe:  # a Qwen2 head is hidden_size / num_heads wide
        model = ModelSpec(
            **SIZES | {"hidden_size": 16}, qkv_bias=model.qkv_bias, qk_norm=model.qk_norm
        )
    ours = {name: tuple(t.shape) for name, t in whole(model).items()}
    stacked = {}
    for name, (rows, columns) in [(n, s) for n, s in ours.items() if ".experts." in n]:
        prefix, _, rest = name.partition(".experts.")
        down = rest.endswith("down_proj.weight")
        key = f"{prefix}.experts.{'down_proj' if down else 'gate_up_proj'}"
        stacked[key] = (8, rows if down else 2 * rows, columns)
        del ours[name]
    assert ours | stacked == theirs(model)


def test_the_router_bias_is_fp32_whatever_the_model_is():
    (bias,) = (p for p in parameters(FAMILIES["deepseek"]) if "correction_bias" in p.name)
    assert bias.dtype == "float32"
    assert bias.shape == (8,)


def test_megatron_lays_qkv_by_group_by_hand():
    """4 groups of 2 queries, 1 key, 1 value, each 2 rows: rank 1 of 2 has groups 2 and 3."""
    model = FAMILIES["llama"]
    tensors = whole(model)
    q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    expected = torch.cat([q[8:12], k[4:6], v[4:6], q[12:16], k[6:8], v[6:8]])
    rank = shard(model, Layout(tp=2), megatron, tensors)[1]
    assert torch.equal(rank["decoder.layers.0.self_attention.linear_qkv.weight"], expected)


def test_vllm_lays_queries_keys_and_values_below_each_other_by_hand():
    model = FAMILIES["qwen2"]
    tensors = whole(model)
    q, k, v = (tensors[f"model.layers.3.self_attn.{x}_proj.bias"] for x in "qkv")
    rank = shard(model, Layout(tp=2), vllm, tensors)[1]
    expected = torch.cat([q[8:], k[4:], v[4:]])
    assert torch.equal(rank["model.layers.3.self_attn.qkv_proj.bias"], expected)


def test_gate_and_up_are_fused_rank_by_rank_by_hand():
    model = FAMILIES["llama"]
    tensors = whole(model)
    gate, up = (tensors[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    expected = torch.cat([gate[4:8], up[4:8]])
    for form, name in (
        (megatron, "decoder.layers.1.mlp.linear_fc1.weight"),
        (vllm, "model.layers.1.mlp.gate_up_proj.weight"),
    ):
        assert torch.equal(shard(model, Layout(tp=4), form, tensors)[1][name], expected)


def test_columns_are_cut_for_the_output_projections():
    model = FAMILIES["llama"]
    tensors = whole(model)
    rank = shard(model, Layout(tp=4), megatron, tensors)[2]
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(rank["decoder.layers.0.mlp.linear_fc2.weight"], down[:, 8:12])


def test_more_ranks_than_keys_share_a_key():
    model = FAMILIES["llama"]
    tensors = whole(model)
    k = tensors["model.layers.0.self_attn.k_proj.weight"]
    ranks = shard(model, Layout(tp=8), vllm, tensors)
    fused = [r["model.layers.0.self_attn.qkv_proj.weight"] for r in ranks]  # q 2, k 2, v 2 rows
    assert torch.equal(fused[4][2:4], k[4:6])
    assert torch.equal(fused[5][2:4], k[4:6])


@pytest.mark.parametrize(
    ("form", "rows", "name"),
    [
        (megatron, 128, "embedding.word_embeddings.weight"),  # 256 = 128 x tp, by 2 ranks
        (vllm, 32, "model.embed_tokens.weight"),
        (separate, 25, "model.embed_tokens.weight"),
    ],
)
def test_the_vocabulary_is_padded_with_zeros_to_what_the_form_asks_for(form, rows, name):
    tensors = whole(FAMILIES["llama"])
    ranks = shard(FAMILIES["llama"], Layout(tp=2), form, tensors)
    padded = torch.cat([rank[name] for rank in ranks])
    assert padded.shape == (2 * rows, 12)
    assert torch.equal(padded[:50], tensors["model.embed_tokens.weight"])
    assert not padded[50:].any()


def test_layers_of_a_megatron_stage_are_numbered_from_0():
    ranks = shard(
        FAMILIES["llama"], Layout(pp=2, stages=(3, 1)), megatron, whole(FAMILIES["llama"])
    )
    names = [{int(n.split(".")[2]) for n in rank if ".layers." in n} for rank in ranks]
    assert names == [{0, 1, 2}, {0}]
    assert "output_layer.weight" in ranks[1]
    assert "output_layer.weight" not in ranks[0]


def test_experts_of_a_rank_are_numbered_from_0_in_megatron_and_stacked_in_vllm():
    model = FAMILIES["qwen3 moe"]
    tensors = whole(model)
    fifth = tensors["model.layers.0.mlp.experts.5.down_proj.weight"]
    train = shard(model, Layout(ep=4), megatron, tensors)[2]
    assert torch.equal(
        train["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"], fifth
    )
    infer = shard(model, Layout(ep=4), vllm, tensors)[2]
    assert torch.equal(infer["model.layers.0.mlp.experts.w2_weight"][1], fifth)


def test_a_shape_with_experts_comes_back_from_plain_values():
    model = ModelSpec.deepseek_r1_671b()
    assert from_dict(ModelSpec, to_dict(model)) == model


def test_rlkits_decoder_refuses_shapes_it_does_not_compute():
    from rlkit.models.decoder import Decoder

    with pytest.raises(ValueError, match="with experts or latent attention, need a dense one"):
        Decoder(FAMILIES["deepseek"])
