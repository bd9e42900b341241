"""A saved folder in vLLM by itself, text in, text out; a module of its own, as for tied ones."""

import pytest
from small_models import make_model
from vllm_models import SHAPE

import rlkit as rk
from rlkit.engines import Request, vllm_settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXTS = ["123+4>", "7 2 5=09>", "0"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_folder_writes_the_same_greedy_text_in_vllm(tied, tmp_path):
    model = make_model(2, **SHAPE | {"vocab_size": 23, "tie_embeddings": tied})
    vllm_settings.prepare("cpu")
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 64, "max_num_seqs": 8, "block_size": vllm_settings.BLOCK}
    llm = LLM(str(model.save(tmp_path)), dtype="float32", enforce_eager=True, **sizes)
    try:
        how = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = [output.outputs[0] for output in llm.generate(TEXTS, how, use_tqdm=False)]
    finally:
        llm.llm_engine.engine_core.shutdown()
    again = rk.models.load(tmp_path)
    greedy = rk.SamplingParams(temperature=0, max_new_tokens=24)
    requests = [Request(again.tokenizer.encode(t), [i], greedy) for i, t in enumerate(TEXTS)]
    expected = rk.TorchEngine(again).generate(requests)
    assert [list(o.token_ids) for o in found] == [r.token_ids.tolist() for r in expected]
    assert [o.text for o in found] == [again.tokenizer.decode(r.token_ids) for r in expected]
