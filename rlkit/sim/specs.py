"""Devices, nodes and networks that a run is simulated on, each with its source; counts of a model.

Rates are peaks that the vendor or the cited paper states; what share of them is reached is in
``rlkit.sim.cost.Costs``. ``assumed`` names the fields for which no public source was found.
"""

from dataclasses import dataclass
from functools import lru_cache

from rlkit.checks import finite, whole
from rlkit.config import ModelSpec

GB = 1e9
CLOUDMATRIX = "arXiv 2506.12708 (CloudMatrix384), section 3.3, of one die of a two-die 910C"
HOPPER = "NVIDIA H100 data sheet, SXM5, dense BF16"


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

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "memory_bytes_per_s", "host_bytes_per_s"):
            finite(f"Device.{name}", getattr(self, name), above=True)
        whole("Device.devices_per_card", self.devices_per_card)


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

    def __post_init__(self) -> None:
        whole("Node.num_devices", self.num_devices)
        for name in ("link_bytes_per_s", "network_bytes_per_s"):
            finite(f"Node.{name}", getattr(self, name), above=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What costs need to know of a decoder: its weights, and what a token keeps."""

    parameters: float
    """All weights."""
    expert_parameters: float
    """Weights of routed experts."""
    touched: float
    """Share of a layer's experts that one token uses; 1 without experts."""
    attention_size: int
    """Query heads times their width."""
    kv_size: int
    """Numbers a layer keeps of a token: keys and values, or the latent of MLA."""

    @property
    def active_parameters(self) -> float:
        """Weights a token passes through."""
        return self.parameters - (1.0 - self.touched) * self.expert_parameters

    @property
    def weight_bytes(self) -> float:
        """Of all weights in BF16."""
        return 2.0 * self.parameters

    @property
    def dense_bytes(self) -> float:
        """Of the weights every token uses, in BF16."""
        return 2.0 * (self.parameters - self.expert_parameters)

    def expert_share(self, tokens: float) -> float:
        """Expected share of the experts that ``tokens`` tokens touch, routed evenly."""
        return 1.0 - (1.0 - self.touched) ** tokens


@lru_cache(maxsize=64)
def counts(model: ModelSpec) -> Counts:
    """Counts of a shape."""
    moe, mla = model.moe, model.mla
    experts = 0
    if moe:
        experts = (model.num_layers - moe.num_dense_layers) * moe.num_experts
        experts *= 3 * model.hidden_size * moe.intermediate_size
    keys_values = 2 * model.num_kv_heads * model.head_dim
    return Counts(
        parameters=model.num_parameters,
        expert_parameters=experts,
        touched=moe.experts_per_token / moe.num_experts if moe else 1.0,
        attention_size=model.num_heads * model.head_dim,
        kv_size=mla.kv_lora_rank + mla.rope_head_dim if mla else keys_values,
    )


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
NODE_CPU = Node(
    device=Device(
        name="CPU core", flops=10e9, memory_bytes=2e9, memory_bytes_per_s=10e9,
        host_bytes_per_s=10e9, source="none: rk.sim.fit takes its rate from a trace",
        assumed=("flops", "memory_bytes", "memory_bytes_per_s", "host_bytes_per_s"),
    ),
    num_devices=2, link_bytes_per_s=1 * GB, network_bytes_per_s=1 * GB,
    source="none", assumed=("link_bytes_per_s", "network_bytes_per_s"),
)  # fmt: skip
NODES = (NODE_A2, NODE_A3, NODE_H100, NODE_H800, NODE_H20)
"""Every node whose rates are published, or assumed from such."""
