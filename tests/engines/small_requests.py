"""Requests for models of a few hundred weights, and what comes of them."""

from small_models import make_model, make_prompts

import rlkit as rk
from rlkit.engines import Request, TorchEngine


def make_requests(num, *, n=1, max_new_tokens=8, temperature=1.0, stop=(), first_uid=0):
    """Prompts of 1 to 9 tokens, ``n`` samples of each."""
    sampling = rk.SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop)
    )
    return [
        Request(prompt, range(first_uid + i * n, first_uid + (i + 1) * n), sampling)
        for i, prompt in enumerate(make_prompts(num))
    ]


def make_engine(model=None, **changes):
    return TorchEngine(model or make_model(), **changes)


def generate(requests, **changes):
    return make_engine(**changes).generate(requests)


def tokens(responses):
    """uid -> tokens."""
    return {r.uid: r.token_ids.tolist() for r in responses}


def run_tokens(engine, work) -> int:
    """Tokens that the decoder computes while ``work`` runs."""
    seen = []
    embedding = engine.decoder.inner.model.embed_tokens
    handle = embedding.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    work()
    handle.remove()
    return sum(len(ids) for ids in seen)
