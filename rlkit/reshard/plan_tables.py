"""Tables of parameters: what a model consists of, and how tensor and expert parallelism cut it.

Names are those of Hugging Face checkpoints. Two things differ, so that a table stays short and a
plan quick: a name stands for all layers that have it, and the experts of a layer are one tensor.
"""

from dataclasses import dataclass

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
    layers = tuple(range(model.num_layers))
    norms = {
        name: ((model.hidden_size,), None, {})
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    attention = _latent(model, model.mla) if model.mla else _grouped_query(model)
    dense, moe = _mlp(model.hidden_size, model.intermediate_size, "mlp."), model.moe
    num_dense = model.num_layers if moe is None else min(moe.num_dense_layers, model.num_layers)
    embedding = (model.vocab_size, model.hidden_size)
    tied = model.tie_embeddings
    outside = [
        Parameter("model.embed_tokens.weight", embedding, dtype, ROWS, vocab=True, first=True,
                  last=tied),
        Parameter("model.norm.weight", (model.hidden_size,), dtype, last=True),
    ]  # fmt: skip
    if not tied:
        outside.append(Parameter("lm_head.weight", embedding, dtype, ROWS, vocab=True, last=True))
    found = [
        _in_layers(norms | attention, layers, dtype),
        _in_layers(dense, layers[:num_dense], dtype),
    ]
    if moe is not None:
        found.append(_in_layers(_experts(model.hidden_size, moe), layers[num_dense:], dtype))
    return (outside[0], *(p for each in found for p in each), *outside[1:])


_Rows = dict[str, tuple[tuple[int, ...], int | None, dict[str, object]]]


def _in_layers(rows: _Rows, layers: tuple[int, ...], dtype: str) -> list[Parameter]:
    """Rows (shape, cut, other fields) by name inside a layer -> parameters of these layers."""
    if not layers:
        return []
    prefix = "model.layers.{layer}."
    return [
        Parameter(**{"name": prefix + name, "shape": shape, "dtype": dtype, "cut": cut,
                     "layers": layers} | more)
        for name, (shape, cut, more) in rows.items()
    ]  # fmt: skip


def _grouped_query(model: ModelSpec) -> _Rows:
    hidden, head = model.hidden_size, model.head_dim
    query = model.num_heads * head
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    rows: _Rows = {}
    for kind, shape in (("weight", (hidden,)), ("bias", ())):
        if kind == "bias" and not model.qkv_bias:
            continue
        for name, num in heads.items():
            fields = {"width": head, "copies": name != "q"}
            rows[f"self_attn.{name}_proj.{kind}"] = ((num * head, *shape), ROWS, fields)
    rows["self_attn.o_proj.weight"] = ((hidden, query), COLUMNS, {"width": head})
    if model.qk_norm:
        rows["self_attn.q_norm.weight"] = rows["self_attn.k_norm.weight"] = ((head,), None, {})
    return rows


def _latent(model: ModelSpec, mla: LatentAttention) -> _Rows:
    hidden, heads = model.hidden_size, model.num_heads
    key_value = model.head_dim - mla.rope_head_dim + mla.v_head_dim
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    return {
        "self_attn.q_a_proj.weight": ((q_rank, hidden), None, {}),
        "self_attn.q_a_layernorm.weight": ((q_rank,), None, {}),
        "self_attn.q_b_proj.weight": (
            (heads * model.head_dim, q_rank), ROWS, {"width": model.head_dim}),
        "self_attn.kv_a_proj_with_mqa.weight": ((kv_rank + mla.rope_head_dim, hidden), None, {}),
        "self_attn.kv_a_layernorm.weight": ((kv_rank,), None, {}),
        "self_attn.kv_b_proj.weight": ((heads * key_value, kv_rank), ROWS, {"width": key_value}),
        "self_attn.o_proj.weight": (
            (hidden, heads * mla.v_head_dim), COLUMNS, {"width": mla.v_head_dim}),
    }  # fmt: skip


def _mlp(hidden: int, width: int, prefix: str) -> _Rows:
    return {
        f"{prefix}gate_proj.weight": ((width, hidden), ROWS, {}),
        f"{prefix}up_proj.weight": ((width, hidden), ROWS, {}),
        f"{prefix}down_proj.weight": ((hidden, width), COLUMNS, {}),
    }


def _experts(hidden: int, moe: MixtureOfExperts) -> _Rows:
    num = moe.num_experts
    rows: _Rows = {"mlp.gate.weight": ((num, hidden), None, {})}
    if moe.router_bias:
        rows["mlp.gate.e_score_correction_bias"] = ((num,), None, {"dtype": ROUTER_DTYPE})
    for name, (shape, cut, _) in _mlp(hidden, moe.intermediate_size, "").items():
        fields = {"experts": True}
        assert cut is not None
        rows[f"mlp.experts.{{expert}}.{name}"] = ((num, *shape), cut + 1, fields)
    if moe.num_shared_experts:
        width = moe.num_shared_experts * moe.intermediate_size
        rows |= _mlp(hidden, width, "mlp.shared_experts.")
    return rows
