"""Tables of parameters: what a model consists of, and how tensor and expert parallelism cut it.

Names are those of Hugging Face checkpoints. Two things differ, so that a table stays short and a
plan quick: a name stands for all layers that have it, and the experts of a layer are one tensor.
"""

from dataclasses import dataclass, replace

from rlkit.config import LatentAttention, MixtureOfExperts, ModelSpec

ROWS, COLUMNS = 0, 1
"""Dimensions of a matrix [out, in]; rows are its outputs."""
ROUTER_DTYPE = "float32"  # bf16 makes the router pick other experts: Megatron-LM #1482


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor a layer, or one outside the layers."""

    name: str
    """Hugging Face name, with ``{layer}`` for its number and, of experts, ``{expert}``."""
    shape: tuple[int, ...]
    """Of the whole tensor, [E, ...] of experts."""
    dtype: str
    """torch's name of it."""
    cut: int | None = None
    """Dimension that tensor parallelism cuts; None: every rank has all of it."""
    width: int = 1
    """Rows that are never parted: those of a head."""
    copies: bool = False
    """With more ranks than heads, ranks share a head: keys and values."""
    experts: bool = False
    """Dimension 0 is cut by expert parallelism, ``cut`` by expert_tp."""
    vocab: bool = False
    """Rows are padded to a multiple that the form asks for; padding never moves."""
    layers: tuple[int, ...] = ()
    """Layers that have it; empty: ``first`` or ``last`` says where it is."""
    first: bool = False
    """On the first stage."""
    last: bool = False
    """On the last stage; on both, a tied embedding is held twice."""

    @property
    def axis(self) -> int:
        """Dimension along which pieces are counted: the cut one, or rows."""
        return int(self.experts) if self.cut is None else self.cut

    @property
    def instances(self) -> tuple[int, ...]:
        """Layers; -1 for a tensor outside of them."""
        return self.layers or (-1,)

    def named(self, layer: int, expert: int | None = None) -> str:
        """Name of one instance; experts without a number stay ``*``."""
        return self.name.format(layer=layer, expert="*" if expert is None else expert)


def parameters(model: ModelSpec, *, dtype: str = "bfloat16") -> tuple[Parameter, ...]:
    """All parameters of a model, in the order of its layers."""
    hidden, moe, tied = model.hidden_size, model.moe, model.tie_embeddings
    num_dense = model.num_layers if moe is None else min(moe.num_dense_layers, model.num_layers)
    layers = tuple(range(model.num_layers))
    norms = [
        Parameter(f"{name}_layernorm.weight", (hidden,), dtype)
        for name in ("input", "post_attention")
    ]
    attention = _latent(model, model.mla, dtype) if model.mla else _grouped_query(model, dtype)
    dense = _mlp("mlp.", hidden, model.intermediate_size, dtype)
    experts = [] if moe is None else _experts(hidden, moe, dtype)
    embedding = Parameter("model.embed_tokens.weight", (model.vocab_size, hidden), dtype, ROWS)
    embedding = replace(embedding, vocab=True, first=True, last=tied)
    head = replace(embedding, name="lm_head.weight", first=False, last=True)
    return (
        embedding,
        *_in_layers(layers, norms + attention),
        *_in_layers(layers[:num_dense], dense),
        *_in_layers(layers[num_dense:], experts),
        Parameter("model.norm.weight", (hidden,), dtype, last=True),
        *([] if tied else [head]),
    )


def _in_layers(layers: tuple[int, ...], found: list[Parameter]) -> list[Parameter]:
    prefix = "model.layers.{layer}."
    return [replace(p, name=prefix + p.name, layers=layers) for p in found] if layers else []


def _grouped_query(model: ModelSpec, dtype: str) -> list[Parameter]:
    hidden, head = model.hidden_size, model.head_dim
    query, heads = model.num_heads * head, {"q": model.num_heads}
    heads |= dict.fromkeys("kv", model.num_kv_heads)
    kinds = {"weight": (hidden,)} | ({"bias": ()} if model.qkv_bias else {})
    found = [
        Parameter(f"self_attn.{name}_proj.{kind}", (num * head, *rest), dtype, ROWS, head,
                  copies=name != "q")
        for kind, rest in kinds.items()
        for name, num in heads.items()
    ]  # fmt: skip
    found.append(Parameter("self_attn.o_proj.weight", (hidden, query), dtype, COLUMNS, head))
    normed = "qk" if model.qk_norm else ""
    return found + [Parameter(f"self_attn.{x}_norm.weight", (head,), dtype) for x in normed]


def _latent(model: ModelSpec, mla: LatentAttention, dtype: str) -> list[Parameter]:
    hidden, heads, q_rank, kv_rank = (
        model.hidden_size, model.num_heads, mla.q_lora_rank, mla.kv_lora_rank,
    )  # fmt: skip
    query, value = model.head_dim, mla.v_head_dim
    both = query - mla.rope_head_dim + value
    found = [
        Parameter("q_a_proj.weight", (q_rank, hidden), dtype),
        Parameter("q_a_layernorm.weight", (q_rank,), dtype),
        Parameter("q_b_proj.weight", (heads * query, q_rank), dtype, ROWS, query),
        Parameter("kv_a_proj_with_mqa.weight", (kv_rank + mla.rope_head_dim, hidden), dtype),
        Parameter("kv_a_layernorm.weight", (kv_rank,), dtype),
        Parameter("kv_b_proj.weight", (heads * both, kv_rank), dtype, ROWS, both),
        Parameter("o_proj.weight", (hidden, heads * value), dtype, COLUMNS, value),
    ]
    return [replace(p, name=f"self_attn.{p.name}") for p in found]


def _mlp(prefix: str, hidden: int, width: int, dtype: str) -> list[Parameter]:
    return [
        Parameter(f"{prefix}gate_proj.weight", (width, hidden), dtype, ROWS),
        Parameter(f"{prefix}up_proj.weight", (width, hidden), dtype, ROWS),
        Parameter(f"{prefix}down_proj.weight", (hidden, width), dtype, COLUMNS),
    ]


def _experts(hidden: int, moe: MixtureOfExperts, dtype: str) -> list[Parameter]:
    num, width = moe.num_experts, moe.intermediate_size
    found = [Parameter("mlp.gate.weight", (num, hidden), dtype)]
    if moe.router_bias:
        found.append(Parameter("mlp.gate.e_score_correction_bias", (num,), ROUTER_DTYPE))
    for p in _mlp("mlp.experts.{expert}.", hidden, width, dtype):
        cut = 1 + (p.cut or 0)  # behind the experts
        found.append(replace(p, shape=(num, *p.shape), cut=cut, experts=True))
    if moe.num_shared_experts:
        found += _mlp("mlp.shared_experts.", hidden, moe.num_shared_experts * width, dtype)
    return found
