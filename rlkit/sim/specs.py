"""Devices, nodes, networks and models that a run is simulated on, each with its source.

Rates are peaks that the vendor or the cited paper states; what share of them is reached is in
``rlkit.sim.cost.Costs``. ``assumed`` names the fields for which no public source was found.
"""

from dataclasses import dataclass

GB = 1e9
CLOUDMATRIX = "arXiv 2506.12708 (CloudMatrix384), section 3.3, of one die of a two-die 910C"
HOPPER = "NVIDIA H100 data sheet, SXM5, dense BF16"
CONFIG = "config.json on the Hugging Face hub, "


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator as a framework counts it: a die of a two-die card is a device."""

    name: str
    """What reports call it."""
    flops: float
    """Dense BF16 matrix operations, 1/s."""
    memory_bytes: float
    """High-bandwidth memory."""
    memory_bytes_per_s: float
    """Its bandwidth."""
    host_bytes_per_s: float
    """Copies to or from the host's memory, one direction."""
    devices_per_card: int = 1
    """Devices on one card: 2 for the 910C."""
    source: str
    """Where the numbers are from."""
    assumed: tuple[str, ...] = ()
    """Fields without a public source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Devices that share the fast links, and the links of each."""

    device: Device
    """What is in it."""
    num_devices: int
    """How many."""
    link_bytes_per_s: float
    """Inside the node, one device, one direction."""
    network_bytes_per_s: float
    """To other nodes, one device's share, one direction."""
    source: str
    """Where the numbers are from."""
    assumed: tuple[str, ...] = ()
    """Fields without a public source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What a cost needs to know of a decoder: counts of weights, and what a token keeps."""

    name: str
    """What reports call it."""
    parameters: float
    """All weights."""
    active_parameters: float
    """Weights a token passes through."""
    expert_parameters: float = 0.0
    """Weights of routed experts."""
    num_experts: int = 1
    """Routed experts a layer."""
    experts_per_token: int = 1
    """Of which a token uses these many."""
    num_layers: int
    """Decoder blocks."""
    hidden_size: int
    """Width of the residual stream."""
    attention_size: int
    """Query heads times their width."""
    kv_size: int
    """Numbers a layer keeps of a token: keys and values, or the latent of MLA."""
    source: str
    """Where the numbers are from."""

    @property
    def weight_bytes(self) -> float:
        """Of all weights in BF16."""
        return 2.0 * self.parameters

    @property
    def dense_bytes(self) -> float:
        """Of the weights every token uses, in BF16."""
        return 2.0 * (self.parameters - self.expert_parameters)

    @property
    def kv_bytes(self) -> float:
        """Bytes a token keeps in the cache, in BF16."""
        return 2.0 * self.num_layers * self.kv_size

    def expert_share(self, tokens: float) -> float:
        """Expected share of the experts that ``tokens`` tokens touch, routed evenly."""
        return 1.0 - (1.0 - self.experts_per_token / self.num_experts) ** tokens


H100 = Device(
    name="H100", flops=989e12, memory_bytes=80e9, memory_bytes_per_s=3.35e12,
    host_bytes_per_s=50e9, source=HOPPER, assumed=("host_bytes_per_s",),
)  # fmt: skip
H800 = Device(
    name="H800", flops=989e12, memory_bytes=80e9, memory_bytes_per_s=3.35e12,
    host_bytes_per_s=50e9, source=HOPPER + "; the H800 differs in NVLink alone",
    assumed=("host_bytes_per_s",),
)  # fmt: skip
H20 = Device(
    name="H20", flops=148e12, memory_bytes=96e9, memory_bytes_per_s=4.0e12,
    host_bytes_per_s=50e9, source="NVIDIA HGX H20 product brief, as the trade press printed it",
    assumed=("host_bytes_per_s",),
)  # fmt: skip
A2_910B = Device(
    name="910B", flops=376e12, memory_bytes=64e9, memory_bytes_per_s=1.6e12,
    host_bytes_per_s=25e9, source="taken as one die of the 910C: " + CLOUDMATRIX,
    assumed=("flops", "memory_bytes_per_s", "host_bytes_per_s"),
)  # fmt: skip
A3_910C = Device(
    name="910C die", flops=376e12, memory_bytes=64e9, memory_bytes_per_s=1.6e12,
    host_bytes_per_s=25e9, devices_per_card=2, source=CLOUDMATRIX, assumed=("host_bytes_per_s",),
)  # fmt: skip

NODE_H100 = Node(
    device=H100, num_devices=8, link_bytes_per_s=450 * GB, network_bytes_per_s=50 * GB,
    source="NVIDIA DGX H100 data sheet: NVLink 900 GB/s both ways, 400 Gb/s a device",
)  # fmt: skip
NODE_H800 = Node(
    device=H800, num_devices=8, link_bytes_per_s=200 * GB, network_bytes_per_s=50 * GB,
    source="NVLink 400 GB/s both ways (H800); RoCE 3.2 Tb/s a node: arXiv 2505.24298, p. 7",
)  # fmt: skip
NODE_H20 = Node(
    device=H20, num_devices=8, link_bytes_per_s=450 * GB, network_bytes_per_s=50 * GB,
    source="NVIDIA HGX H20 product brief: NVLink 900 GB/s both ways",
    assumed=("network_bytes_per_s",),
)  # fmt: skip
NODE_A2 = Node(
    device=A2_910B, num_devices=8, link_bytes_per_s=196 * GB, network_bytes_per_s=25 * GB,
    source="none found", assumed=("link_bytes_per_s", "network_bytes_per_s"),
)  # fmt: skip
NODE_A3 = Node(
    device=A3_910C, num_devices=16, link_bytes_per_s=196 * GB, network_bytes_per_s=196 * GB,
    source=CLOUDMATRIX + ": all dies of the super pod share one plane of 196 GB/s a die",
)  # fmt: skip
NODES = (NODE_A2, NODE_A3, NODE_H100, NODE_H800, NODE_H20)
"""Every node known."""

QWEN25_1_5B = Model(
    name="Qwen2.5-1.5B", parameters=1.544e9, active_parameters=1.544e9, num_layers=28,
    hidden_size=1536, attention_size=1536, kv_size=512, source=CONFIG + "Qwen/Qwen2.5-1.5B",
)  # fmt: skip
QWEN25_7B = Model(
    name="Qwen2.5-7B", parameters=7.616e9, active_parameters=7.616e9, num_layers=28,
    hidden_size=3584, attention_size=3584, kv_size=1024, source=CONFIG + "Qwen/Qwen2.5-7B",
)  # fmt: skip
QWEN25_14B = Model(
    name="Qwen2.5-14B", parameters=14.77e9, active_parameters=14.77e9, num_layers=48,
    hidden_size=5120, attention_size=5120, kv_size=2048, source=CONFIG + "Qwen/Qwen2.5-14B",
)  # fmt: skip
QWEN25_32B = Model(
    name="Qwen2.5-32B", parameters=32.76e9, active_parameters=32.76e9, num_layers=64,
    hidden_size=5120, attention_size=5120, kv_size=2048, source=CONFIG + "Qwen/Qwen2.5-32B",
)  # fmt: skip
QWEN3_8B = Model(
    name="Qwen3-8B", parameters=8.191e9, active_parameters=8.191e9, num_layers=36,
    hidden_size=4096, attention_size=4096, kv_size=2048, source=CONFIG + "Qwen/Qwen3-8B",
)  # fmt: skip
QWEN3_32B = Model(
    name="Qwen3-32B", parameters=32.76e9, active_parameters=32.76e9, num_layers=64,
    hidden_size=5120, attention_size=8192, kv_size=2048, source=CONFIG + "Qwen/Qwen3-32B",
)  # fmt: skip
QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B", parameters=30.53e9, active_parameters=3.35e9,
    expert_parameters=48 * 128 * 3 * 2048 * 768, num_experts=128, experts_per_token=8,
    num_layers=48, hidden_size=2048, attention_size=4096, kv_size=1024,
    source=CONFIG + "Qwen/Qwen3-30B-A3B",
)  # fmt: skip
QWEN3_235B_A22B = Model(
    name="Qwen3-235B-A22B", parameters=235.1e9, active_parameters=22.2e9,
    expert_parameters=94 * 128 * 3 * 4096 * 1536, num_experts=128, experts_per_token=8,
    num_layers=94, hidden_size=4096, attention_size=8192, kv_size=1024,
    source=CONFIG + "Qwen/Qwen3-235B-A22B",
)  # fmt: skip
DEEPSEEK_R1 = Model(
    name="DeepSeek-R1-671B", parameters=671e9, active_parameters=37e9,
    expert_parameters=58 * 256 * 3 * 7168 * 2048, num_experts=256, experts_per_token=8,
    num_layers=61, hidden_size=7168, attention_size=128 * 192, kv_size=576,
    source=CONFIG + "deepseek-ai/DeepSeek-R1; counts of arXiv 2412.19437, abstract",
)  # fmt: skip
MODELS = (
    QWEN25_1_5B, QWEN25_7B, QWEN25_14B, QWEN25_32B, QWEN3_8B, QWEN3_32B, QWEN3_30B_A3B,
    QWEN3_235B_A22B, DEEPSEEK_R1,
)  # fmt: skip
"""Every model known."""
