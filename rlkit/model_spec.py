"""Shapes of decoders: dense (Llama, Qwen2, Qwen3), mixture of experts, and DeepSeek-V3's."""

from dataclasses import dataclass

from rlkit.checks import need, whole


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureOfExperts:
    """Routed experts in place of the MLP, in all layers but the first ``num_dense_layers``."""

    num_experts: int
    """E, routed experts a layer."""
    experts_per_token: int
    """Experts that one token is sent to."""
    intermediate_size: int
    """Width of one expert's gated MLP."""
    num_shared_experts: int = 0
    """Experts that every token is sent to; one MLP of that many widths."""
    num_dense_layers: int = 0
    """First layers, which keep the dense MLP."""
    router_bias: bool = False
    """A bias an expert on the router's scores, kept in fp32 (DeepSeek-V3, 2412.19437, 2.1.2)."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            whole(f"MixtureOfExperts.{name}", getattr(self, name))
        for name in ("num_shared_experts", "num_dense_layers"):
            whole(f"MixtureOfExperts.{name}", getattr(self, name), least=0)
        need(
            self.experts_per_token <= self.num_experts,
            f"MixtureOfExperts: got experts_per_token={self.experts_per_token}, need at most "
            f"num_experts={self.num_experts}.",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434): low-rank queries, keys and values.

    ``ModelSpec.head_dim`` is a query's width, ``rope_head_dim`` of it rotated.
    """

    q_lora_rank: int
    """Width of the compressed query."""
    kv_lora_rank: int
    """Width of the compressed key and value, which is what the cache holds."""
    rope_head_dim: int
    """Rotated part of a head; of keys, one for all heads."""
    v_head_dim: int
    """Width of a value head."""

    def __post_init__(self) -> None:
        for name in ("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim"):
            whole(f"LatentAttention.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape of a decoder.

    The names of a Hugging Face ``config.json`` in rlkit's words. rlkit's own decoder computes the
    dense ones; plans and simulations take all.
    """

    vocab_size: int
    """V, rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    head_dim: int
    """Width of a head."""
    max_positions: int = 4096
    """Longest prompt + response, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding (Su et al., 2021)."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Input and output embedding are one parameter."""
    qkv_bias: bool = False
    """Biases on q, k, v projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm on q and k heads (Qwen3)."""
    architecture: str = "LlamaForCausalLM"
    """Class named in a saved ``config.json``."""
    moe: MixtureOfExperts | None = None
    """Routed experts (Qwen3-MoE, DeepSeek-V3)."""
    mla: LatentAttention | None = None
    """Latent attention (DeepSeek-V3); num_kv_heads is num_heads then."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim",
        ):  # fmt: skip
            whole(f"ModelSpec.{name}", getattr(self, name))
        need(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            f"ModelSpec: got num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}; need a "
            "num_kv_heads that divides num_heads.",
        )
        need(
            self.head_dim % 2 == 0,
            f"ModelSpec.head_dim: got {self.head_dim}, need an even number: rotary embeddings "
            "turn pairs.",
        )

    @property
    def num_parameters(self) -> int:
        """Count of weights, tied embeddings once."""
        attention = self._latent() if self.mla else self._grouped_query()
        dense = 3 * self.hidden_size * self.intermediate_size
        num_dense = self.moe.num_dense_layers if self.moe else self.num_layers
        mlps = num_dense * dense + (self.num_layers - num_dense) * self._experts()
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = self.num_layers * (attention + 2 * self.hidden_size)
        return layers + mlps + embeddings + self.hidden_size

    def _grouped_query(self) -> int:
        heads = self.num_heads + 2 * self.num_kv_heads
        qkv = self.head_dim * heads * (self.hidden_size + self.qkv_bias)
        out = self.num_heads * self.head_dim * self.hidden_size
        return qkv + out + (2 * self.head_dim if self.qk_norm else 0)

    def _latent(self) -> int:
        mla, hidden, heads = self.mla, self.hidden_size, self.num_heads
        assert mla is not None
        query = mla.q_lora_rank * (hidden + 1 + heads * self.head_dim)
        heads_kv = heads * (self.head_dim - mla.rope_head_dim + mla.v_head_dim)
        key_value = mla.kv_lora_rank * (hidden + 1 + heads_kv) + mla.rope_head_dim * hidden
        return query + key_value + heads * mla.v_head_dim * hidden

    def _experts(self) -> int:
        moe = self.moe
        if moe is None:
            return 0
        experts = moe.num_experts + moe.num_shared_experts
        router = moe.num_experts * (self.hidden_size + moe.router_bias)
        return 3 * self.hidden_size * moe.intermediate_size * experts + router

    # ---- published shapes: the config.json of these Hugging Face repositories ----

    @classmethod
    def qwen25_1_5b(cls) -> "ModelSpec":
        """Qwen/Qwen2.5-1.5B: 1.5 billion parameters, embeddings tied."""
        return cls(
            vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28,
            num_heads=12, num_kv_heads=2, head_dim=128, max_positions=131072, rope_theta=1e6,
            norm_eps=1e-6, tie_embeddings=True, qkv_bias=True, architecture="Qwen2ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen25_7b(cls) -> "ModelSpec":
        """Qwen/Qwen2.5-7B: 7.6 billion parameters."""
        return cls(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28,
            num_heads=28, num_kv_heads=4, head_dim=128, max_positions=131072, rope_theta=1e6,
            norm_eps=1e-6, qkv_bias=True, architecture="Qwen2ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen25_14b(cls) -> "ModelSpec":
        """Qwen/Qwen2.5-14B: 14.8 billion parameters."""
        return cls(
            vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_layers=48,
            num_heads=40, num_kv_heads=8, head_dim=128, max_positions=131072, rope_theta=1e6,
            norm_eps=1e-5, qkv_bias=True, architecture="Qwen2ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen25_32b(cls) -> "ModelSpec":
        """Qwen/Qwen2.5-32B: 32.8 billion parameters."""
        return cls(
            vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_layers=64,
            num_heads=40, num_kv_heads=8, head_dim=128, max_positions=131072, rope_theta=1e6,
            norm_eps=1e-5, qkv_bias=True, architecture="Qwen2ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen3_8b(cls) -> "ModelSpec":
        """Qwen/Qwen3-8B: 8.2 billion parameters."""
        return cls(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36,
            num_heads=32, num_kv_heads=8, head_dim=128, max_positions=40960, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="Qwen3ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen3_32b(cls) -> "ModelSpec":
        """Qwen/Qwen3-32B: 32.8 billion parameters."""
        return cls(
            vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_layers=64,
            num_heads=64, num_kv_heads=8, head_dim=128, max_positions=40960, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="Qwen3ForCausalLM",
        )  # fmt: skip

    @classmethod
    def qwen3_30b_a3b(cls) -> "ModelSpec":
        """Qwen/Qwen3-30B-A3B: 30.5 billion parameters, 128 experts a layer."""
        return cls(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=48,
            num_heads=32, num_kv_heads=4, head_dim=128, max_positions=40960, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="Qwen3MoeForCausalLM",
            moe=MixtureOfExperts(num_experts=128, experts_per_token=8, intermediate_size=768),
        )  # fmt: skip

    @classmethod
    def qwen3_235b_a22b(cls) -> "ModelSpec":
        """Qwen/Qwen3-235B-A22B: 235 billion parameters, 128 experts a layer."""
        return cls(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=94,
            num_heads=64, num_kv_heads=4, head_dim=128, max_positions=40960, rope_theta=1e6,
            norm_eps=1e-6, qk_norm=True, architecture="Qwen3MoeForCausalLM",
            moe=MixtureOfExperts(num_experts=128, experts_per_token=8, intermediate_size=1536),
        )  # fmt: skip

    @classmethod
    def deepseek_r1_671b(cls) -> "ModelSpec":
        """deepseek-ai/DeepSeek-R1 (the shape of DeepSeek-V3): 671 billion parameters.

        The multi-token prediction layer of the checkpoint is left out: RL doesn't train it.
        """
        return cls(
            vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_layers=61,
            num_heads=128, num_kv_heads=128, head_dim=192, max_positions=163840,
            norm_eps=1e-6, architecture="DeepseekV3ForCausalLM",
            moe=MixtureOfExperts(
                num_experts=256, experts_per_token=8, intermediate_size=2048,
                num_shared_experts=1, num_dense_layers=3, router_bias=True,
            ),
            mla=LatentAttention(
                q_lora_rank=1536, kv_lora_rank=512, rope_head_dim=64, v_head_dim=128
            ),
        )  # fmt: skip
