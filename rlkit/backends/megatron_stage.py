"""This rank's part of a cut model, and micro-batches on their way through all of its stages."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.algo.logprobs import in_pieces, rows_at_once
from rlkit.backends.context_parallel import Part, part_of
from rlkit.backends.megatron_groups import open_groups
from rlkit.backends.megatron_model import MegatronOptions, make_config, make_model, packed_params
from rlkit.backends.megatron_optimizer import with_gradients
from rlkit.backends.packing import pack
from rlkit.backends.ranks import highest
from rlkit.backends.vocab_parallel import Ranks, logprobs_and_entropy
from rlkit.batch import Batch
from rlkit.config import Layout, ModelSpec
from rlkit.reshard.plan_forms import megatron

Use = Callable[[Batch | None, Part, Tensor], Any]
"""(rows, None of a filler; what this rank reads of them; hidden states [m, hidden] of its m
response tokens) -> what is kept of them.

In training (loss, number of tokens as Megatron wants one, what is kept).
"""


class Stage:
    """A pipeline stage's layers, tensor-parallel part, as Megatron's model; weights not set."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        options: MegatronOptions,
        *,
        device: torch.device,
        context: Any,
    ) -> None:
        self.spec, self.layout, self.options, self.device = spec, layout, options, device
        open_groups(layout, context, device)
        rows = megatron(spec, layout).rows_of_vocab(spec.vocab_size, layout.tp)
        config = make_config(spec, layout, options, device)
        self.module: Any = make_model(spec, config, vocab_rows=rows).to(device)
        self._picked: Tensor | None = None  # rows of the micro-batch in work that predict something
        if self.module.post_process:
            layer = self.module.output_layer
            self._columns, self._head = layer.output_size_per_partition, layer.forward
            layer.forward = self._instead_of_logits
        self.model = with_gradients(self.module, config, options)

    def run(self, batches: Sequence[Batch], use: Use, *, train: bool) -> list[Any]:
        """What ``use`` keeps of each batch on the last stage; an empty list on the others.

        Each stage does one forward and one backward in turn (1F1B: PipeDream, 1806.03377).
        """
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        num = self._num_in_step(len(batches))
        if not num:
            return []

        def forward_step(queue: Iterator[Batch | None], model: Any) -> tuple[Tensor, Any]:
            batch = next(queue)
            packed = None if batch is None else pack(batch, device=self.device)
            group: Any = parallel_state.get_context_parallel_group()
            part = part_of(packed, tp=self.layout.tp, group=group, device=self.device)
            self._picked = part.predict
            params = packed_params(part.packed.lengths, part.attend, self.device)
            output = model(part.ids[None], None, None, packed_seq_params=params)
            return output, lambda hidden, **_: use(batch, part, hidden[0])

        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([*batches, *[None] * (num - len(batches))]),
            model=self.model,
            num_microbatches=num,
            seq_length=1,  # stages tell each other
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
        )
        return found[: len(batches)]

    def _num_in_step(self, num: int) -> int:
        """Micro-batches to run: with experts on several ranks all need the same number."""
        if self.layout.ep == 1:
            return num
        return int(highest(torch.tensor(num, device=self.device)))

    def _instead_of_logits(self, hidden: Tensor, weight: Tensor | None, **_: Any) -> Any:
        """In the output layer's place: of [n, 1, hidden] the m that predict a token.

        ``per_token`` makes their logits, some rows at a time.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        self._logits = partial(self._head, weight=weight)  # a tied embedding's, or None: its own
        if self.options.sequence_parallel:
            # Each rank's gradient is whole, the output layer adds it up, so its own part suffices.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[self._picked], None

    def per_token(self, hidden: Tensor, part: Part, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs [M] and entropies [M] (none unless asked for) of all response tokens, of this
        rank's hidden states [m, hidden].
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        group: Any = parallel_state.get_tensor_model_parallel_group()
        ranks = Ranks(
            first=group.rank() * self._columns,
            vocab_size=self.spec.vocab_size,
            total=reduce_from_tensor_model_parallel_region,
            highest=lambda tensor: highest(tensor, group),
        )

        def piece(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
            logits = self._logits(hidden)[0]  # [n, columns]
            return logprobs_and_entropy(logits, targets, temperature, ranks, entropy=entropy)

        packed, num_rows = part.packed, rows_at_once(self._columns)
        targets, temperature = packed.targets.tensor[part.mine], packed.temperature[part.mine]
        logprobs, entropies = in_pieces(piece, hidden, targets, temperature, num_rows=num_rows)
        return part.of_all(logprobs), part.of_all(entropies) if entropy else entropies
