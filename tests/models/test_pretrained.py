"""Checkpoint folders: what comes back, and what the errors say."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, make_model, make_spec

import rlkit as rk
from rlkit.models.pretrained import load_weights


def change_config(folder, **changes):
    """Edit config.json of a saved folder; None takes a key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_bit_equal(family, tmp_path):
    model = make_model(**FAMILIES[family])
    loaded = rk.models.load(model.save(tmp_path))
    assert loaded.spec == model.spec
    assert loaded.weights.keys() == model.weights.keys()
    assert all(torch.equal(loaded.weights[name], w) for name, w in model.weights.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_spec_counts_the_parameters_of_its_model(family):
    model = make_model(**FAMILIES[family])
    assert sum(w.numel() for w in model.weights.values()) == model.spec.num_parameters


@pytest.mark.parametrize("family", ["llama with tied embeddings", "qwen2 with tied embeddings"])
def test_tied_embeddings_are_one_parameter_after_build(family):
    decoder = make_model(**FAMILIES[family]).build()
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight


def test_build_copies_the_weights():
    model = make_model()
    decoder = model.build()
    with torch.no_grad():
        decoder.lm_head.weight.zero_()
    assert model.weights["lm_head.weight"].abs().sum() > 0


def test_build_casts_to_the_dtype_asked_for():
    assert {p.dtype for p in make_model().build(dtype=torch.bfloat16).parameters()} == {
        torch.bfloat16
    }


def test_a_model_travels_by_pickle():
    model = make_model()
    model.tokenizer.encode("1")  # builds what can't be pickled
    again = pickle.loads(pickle.dumps(model))
    assert again.spec == model.spec
    assert again.tokenizer.encode("12") == model.tokenizer.encode("12")
    assert torch.equal(again.weights["lm_head.weight"], model.weights["lm_head.weight"])


def test_saving_again_into_a_folder_replaces_the_model(tmp_path):
    make_model(num_layers=3).save(tmp_path)
    model = make_model(seed=2)
    loaded = rk.models.load(model.save(tmp_path))
    assert loaded.weights.keys() == model.weights.keys()
    assert torch.equal(loaded.weights["lm_head.weight"], model.weights["lm_head.weight"])


def test_the_whole_file_counts_where_parts_are_left_over(tmp_path):
    folder = make_model(num_layers=3).save(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert len(rk.models.load(folder).weights) == 30
    assert len(rk.models.load(make_model().save(folder)).weights) == 21


def test_repr_names_architecture_and_size():
    assert repr(make_model()) == "Pretrained(LlamaForCausalLM, 4,905 parameters)"


# ---- errors ----


def test_a_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json: not found, need a Hugging"):
        rk.models.load("nowhere")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", r"config\.json: not found"),
        ("tokenizer.json", r"tokenizer\.json: not found"),
        ("model.safetensors", r"no \.safetensors file"),
    ],
)
def test_a_missing_file_is_named(name, message, tmp_path):
    (make_model().save(tmp_path) / name).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        rk.models.load(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 5, 2000, -1])
def test_a_truncated_file_is_named(num_bytes, tmp_path):
    path = make_model().save(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors: can't be read .* cut short"):
        rk.models.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "not JSON"), (b'{"a": "\xff"}', "not JSON"), (b"[]", "got a list, need a JSON object")],
)
def test_a_file_that_is_not_a_json_object_is_named(name, content, says, tmp_path):
    (make_model().save(tmp_path) / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"/{name}: {says}"):
        rk.models.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "none"}}'])
def test_a_file_that_is_no_tokenizer_is_named(content, tmp_path):
    folder = make_model().save(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer .*Copy it again"):
        rk.models.load(tmp_path)


def shards(folder):
    """A saved folder with its weights in two files and the index of them."""
    whole = folder / "model.safetensors"
    weights, index = load_file(whole), {}
    for i, names in enumerate([sorted(weights)[:9], sorted(weights)[9:]]):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({key: weights[key] for key in names}, folder / name)
        index |= dict.fromkeys(names, name)
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_the_files_of_an_index_are_read_and_no_others(tmp_path):
    folder = shards(make_model().save(tmp_path))
    save_file({"other": torch.ones(2)}, folder / "consolidated.safetensors")
    assert rk.models.load(folder).weights.keys() == make_model().weights.keys()


def test_a_file_that_the_index_names_and_is_not_there_is_named(tmp_path):
    folder = shards(make_model().save(tmp_path))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"got no model-00002-of-.*, need all 2 files"):
        rk.models.load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"weights: missing \['model\..* not of this model"):
        rk.models.load(folder)


@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_tied_embeddings_must_be_equal(equal, tmp_path):
    model = make_model(tie_embeddings=True)
    path = model.save(tmp_path) / "model.safetensors"
    head = model.weights["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file(model.weights | {"lm_head.weight": head}, path)
    if equal:
        assert rk.models.load(tmp_path).weights.keys() == model.weights.keys()
    else:
        with pytest.raises(ValueError, match=r"got an lm_head\.weight other than .* need equal"):
            rk.models.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "got 'GPT2LMHeadModel', need one of"),
        ({"architectures": None}, "got 'none', need one of"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "need plain rotary"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "need plain rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "need plain rotary"),
        ({"hidden_act": "gelu"}, "need silu"),
        ({"mlp_bias": True}, "need silu without biases"),
        ({"attention_bias": True}, "attention_bias: got true, need false"),
        ({"use_sliding_window": True}, "sliding"),
        ({"quantization_config": {"bits": 4}}, "need weights that are not quantised"),
        ({"hidden_size": None}, "hidden_size"),
        ({"head_dim": 5}, "need an even number"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "experts: got no norm_topk_prob"),
        (
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "norm_topk_prob": True,
                "decoder_sparse_step": 2,
            },
            "got {'decoder_sparse_step': 2}, need weights of the experts that add up",
        ),
    ],
)
def test_a_config_the_decoder_does_not_compute_is_an_error(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        rk.models.load(change_config(make_model().save(tmp_path), **changes))


def test_a_config_of_another_depth_is_an_error(tmp_path):
    folder = change_config(make_model().save(tmp_path), num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"missing \['model\.layers\.2\..* \(9\), not of this"):
        rk.models.load(folder)


def test_a_checkpoint_without_output_embedding_must_say_it_is_tied(tmp_path):
    folder = make_model(tie_embeddings=True).save(tmp_path)
    with pytest.raises(ValueError, match=r"no lm_head\.weight and tie_word_embeddings is false"):
        rk.models.load(change_config(folder, tie_word_embeddings=False))


def test_a_weight_of_another_shape_is_named():
    model = make_model()
    model.weights["model.norm.weight"] = torch.ones(16)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: got shape \(16,\), need \(15,\)"):
        model.build()


def test_an_unknown_weight_is_named():
    model = make_model()
    model.weights["model.extra"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"not of this model \['model\.extra'\] \(1\)"):
        model.build()


def test_weights_that_do_not_fit_change_nothing():
    decoder, new = make_model(seed=1).build(), make_model(seed=2).weights
    before = {name: w.clone() for name, w in decoder.weights().items()}
    new[list(new)[-1]] = torch.ones(2, 2)
    with pytest.raises(ValueError, match="got shape"):
        load_weights(decoder, new)
    assert all(torch.equal(w, before[name]) for name, w in decoder.weights().items())


def test_a_spec_that_its_architecture_can_not_hold_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="qkv_bias: got True, need False for LlamaForCausalLM"):
        make_model(qkv_bias=True).save(tmp_path)


def test_experts_are_saved_and_loaded_but_the_decoder_computes_none(tmp_path):
    moe = rk.config.MixtureOfExperts(num_experts=4, experts_per_token=2, intermediate_size=6)
    spec = make_spec(architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=moe)
    weights = {"lm_head.weight": torch.ones(2, 2)}
    model = rk.models.Pretrained(spec, make_model().tokenizer, weights)
    loaded = rk.models.load(model.save(tmp_path))
    assert loaded.spec == spec
    with pytest.raises(ValueError, match="need a dense one"):
        loaded.build()


def test_tiny_makes_weights_of_a_shape_with_experts(tmp_path):
    moe = rk.config.MixtureOfExperts(num_experts=4, experts_per_token=2, intermediate_size=6)
    spec = make_spec(architecture="Qwen3MoeForCausalLM", qk_norm=True, moe=moe)
    model = rk.models.tiny(spec=spec)
    assert sum(w.numel() for w in model.weights.values()) == spec.num_parameters
    expert, norm = (
        f"model.layers.0.{x}.weight" for x in ("mlp.experts.3.up_proj", "input_layernorm")
    )
    assert model.weights[expert].std() > 0.1
    assert (model.weights[norm] == 1).all()
    loaded = rk.models.load(model.save(tmp_path))
    assert torch.equal(loaded.weights[expert], model.weights[expert])


@pytest.mark.parametrize(("eos", "got"), [(None, "no eos token"), (99, "eos token 99")])
def test_a_folder_without_eos_is_an_error(eos, got, tmp_path):
    folder = make_model().save(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=f"got {got}, need one of the model's 23 ids"):
        rk.models.load(change_config(folder, eos_token_id=eos))


def test_the_first_of_several_eos_ids_counts(tmp_path):
    folder = make_model().save(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    loaded = rk.models.load(change_config(folder, eos_token_id=[5, 6], pad_token_id=None))
    assert (loaded.tokenizer.eos_id, loaded.tokenizer.pad_id) == (5, 5)


def test_an_unknown_pretrained_name_lists_the_shipped_ones():
    with pytest.raises(ValueError, match=r"got 'nope', need one of \['reverse_digits'\]"):
        rk.models.tiny(pretrained="nope")


def test_shipped_weights_do_not_take_a_spec():
    with pytest.raises(ValueError, match="both pretrained and spec"):
        rk.models.tiny(pretrained="reverse_digits", spec=make_spec())
