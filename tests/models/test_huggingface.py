"""The same numbers as transformers, through folders written by either side."""

import json

import pytest
import torch
import transformers
from small_models import FAMILIES, make_model, make_spec
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import rlkit as rk
from rlkit.engines import Request
from rlkit.models.attention import PackedAttention, positions
from rlkit.models.hf_config import spec_to_hf

TEXTS = ["123+4>", "7 2 5=09>", "", "0"]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.disable_progress_bar()


def logits(model: rk.models.Pretrained, ids: torch.Tensor) -> torch.Tensor:
    """[L] -> [L, V]."""
    decoder, lengths = model.build(), torch.tensor([len(ids)])
    with torch.no_grad():
        return decoder.logits(decoder(ids, positions(lengths), PackedAttention(lengths)))


def assert_same_logits(model: rk.models.Pretrained, theirs: torch.nn.Module) -> None:
    ids = torch.randint(model.spec.vocab_size, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0].float()
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(model, ids), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_has_the_same_logits_in_transformers(family, tmp_path):
    model = make_model(**FAMILIES[family])
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        model.save(tmp_path), local_files_only=True, output_loading_info=True
    )
    assert type(theirs).__name__ == model.spec.architecture
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same_logits(model, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_saved_by_transformers_has_the_same_logits_here(family, tmp_path):
    source = make_model(**FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.save(tmp_path / "a"))
    theirs.save_pretrained(tmp_path / "b")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    model = rk.models.load(tmp_path / "b")
    assert model.spec == source.spec
    assert_same_logits(model, theirs)


@pytest.mark.parametrize(
    ("config_class", "changes"),
    [
        (transformers.LlamaConfig, {"architecture": "LlamaForCausalLM"}),
        (transformers.Qwen2Config, {"architecture": "Qwen2ForCausalLM", "qkv_bias": True}),
        (transformers.Qwen3Config, {"architecture": "Qwen3ForCausalLM", "qk_norm": True}),
    ],
)
def test_a_model_made_by_transformers_has_the_same_logits_here(config_class, changes, tmp_path):
    spec, tokenizer = make_spec(**changes), rk.models.char_tokenizer()
    known = spec_to_hf(spec, tokenizer, dtype="float32")
    transformers.set_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config_class(**known))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.4)
    make_model(**changes).save(tmp_path)  # for the tokenizer
    theirs.save_pretrained(tmp_path)
    assert_same_logits(rk.models.load(tmp_path), theirs)


def test_a_checkpoint_in_several_files_is_read_whole(tmp_path):
    source = make_model()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.save(tmp_path / "a"))
    theirs.save_pretrained(tmp_path / "b", max_shard_size="5KB")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    transformers.AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    loaded = rk.models.load(tmp_path / "b")
    assert all(torch.equal(loaded.weights[name], w) for name, w in source.weights.items())


def test_weights_saved_in_bfloat16_say_so(tmp_path):
    source = make_model()
    source.weights = {name: w.bfloat16() for name, w in source.weights.items()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.save(tmp_path))
    assert theirs.dtype == torch.bfloat16


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_auto_tokenizer_encodes_and_decodes_a_saved_folder_equally(family, text, tmp_path):
    model = make_model(**FAMILIES[family])
    theirs = transformers.AutoTokenizer.from_pretrained(model.save(tmp_path))
    ids = model.tokenizer.encode(text)
    assert theirs.encode(text) == ids
    ids = [*ids, model.tokenizer.eos_id, model.tokenizer.pad_id]
    assert theirs.decode(ids, skip_special_tokens=True) == text == model.tokenizer.decode(ids)


def test_auto_tokenizer_knows_the_special_tokens_of_a_saved_folder(tmp_path):
    model = make_model()
    theirs = transformers.AutoTokenizer.from_pretrained(model.save(tmp_path))
    ours = model.tokenizer
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (
        ours.pad_id,
        ours.bos_id,
        ours.eos_id,
        ours.vocab_size,
    )


def trained(folder, **changes):
    """A policy after two updates, as its actor saves it; and the engine that has its weights."""
    model = make_model(max_positions=128, **changes)
    with rk.launch(backend="local") as cluster:
        rollout = cluster.spawn(rk.RolloutWorker, model)
        actor = cluster.spawn(rk.ActorWorker, model, lr=1e-2)
        for prompts in rk.tasks.sort().batches(size=4, steps=2):
            batch = rollout.generate(prompts)
            actor.update(batch, loss_fn=lambda logprobs, batch: (batch.token_mean(logprobs), {}))
        rk.Resharder(source=actor, target=rollout).reshard()
        actor.save_pretrained(folder)
        engine = rk.TorchEngine(model)
        engine.load_weights(rollout._transport.worker.weights(), version=2)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_folder_writes_the_same_greedy_text_in_transformers(family, tmp_path):
    engine = trained(tmp_path, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model.generation_config.eos_token_id = None
    greedy = rk.SamplingParams(temperature=0, max_new_tokens=24)
    for uid, text in enumerate(["123+4>", "7 2 5=09>", "0"]):
        ids = engine.tokenizer.encode(text)
        (ours,) = engine.generate([Request(ids, [uid], greedy)])
        (theirs,) = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        assert engine.tokenizer.decode(ours.token_ids) == tokenizer.decode(
            theirs[len(ids) :], skip_special_tokens=True
        )
        assert ours.token_ids.tolist() == theirs[len(ids) :].tolist()


def byte_level_folder(folder, *, bos: bool):
    """A checkpoint with a byte-level BPE; the post-processor puts bos in front (Llama 3) or not."""
    inner = Inner(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the thin thing then thanks them"] * 5, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    make_model(vocab_size=300).save(folder)
    (folder / "tokenizer.json").write_text(inner.to_str())
    named = {"bos_token": special[0], "eos_token": special[1]}
    named["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.parametrize("bos", [True, False])
def test_a_byte_level_tokenizer_encodes_as_in_transformers(bos, tmp_path):
    folder, text = byte_level_folder(tmp_path, bos=bos), "the thing, é€ 12\nthen"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = rk.models.load(folder).tokenizer
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.encode(text)[0] == ours.bos_id) == bos
    assert ours.decode([*ours.encode(text), ours.eos_id]) == text


@pytest.mark.parametrize("bos", [True, False])
def test_a_tokenizer_that_was_loaded_is_the_same_after_save_and_load(bos, tmp_path):
    model = rk.models.load(byte_level_folder(tmp_path / "a", bos=bos))
    again = rk.models.load(model.save(tmp_path / "b"))
    assert again.tokenizer.__dict__ | {"_tokenizer": None} == model.tokenizer.__getstate__()
    assert again.tokenizer.encode("then") == model.tokenizer.encode("then")


def test_a_saved_folder_keeps_the_chat_template(tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    folder = byte_level_folder(tmp_path / "a", bos=False)
    (folder / "chat_template.jinja").write_text(template)
    saved = rk.models.load(folder).save(tmp_path / "b")
    theirs = transformers.AutoTokenizer.from_pretrained(rk.models.load(saved).save(tmp_path / "c"))
    said = theirs.apply_chat_template([{"role": "user", "content": "then"}], tokenize=False)
    assert said == "<user>then"
