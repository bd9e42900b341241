"""Tasks of reasoning-gym: procedural puzzles with verifiers of their own."""

from collections.abc import Callable, Mapping
from typing import Any

from rlkit.checks import did_you_mean, whole
from rlkit.models.tokenizer import Tokenizer
from rlkit.tasks.listed import from_list, split_tenth
from rlkit.tasks.task import Task


def from_reasoning_gym(
    dataset: str,
    *,
    size: int = 1000,
    template: str = "{question}",
    extract: Callable[[str], str | None] = str.strip,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    **config: Any,
) -> Task:
    """A task over ``size`` puzzles of a dataset of reasoning-gym (2505.24760, 2025), every tenth of
    them held out by a hash of its prompt.

    The prompt is ``template`` with the question in it. The dataset's own verifier scores what
    ``extract`` finds in a response (None: no answer), from 0 to 1. ``config`` goes to the dataset.
    """
    if "{question}" not in template:
        raise ValueError(f"template: got {template!r}, need a text with {{question}} in it.")
    config |= {"size": whole("size", size, what="puzzle"), "seed": seed}
    entries = {template.replace("{question}", e["question"]): e for e in _create(dataset, config)}
    training, held_out = split_tenth([(p, str(e["answer"])) for p, e in entries.items()])
    return from_list(
        training,
        held_out=held_out,
        verify=_Verifier(dataset, config, entries, extract),
        name=dataset,
        seed=seed,
        tokenizer=tokenizer,
    )


def _create(dataset: str, config: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "from_reasoning_gym: reasoning_gym can not be imported, need it here and where rewards "
            "run: pip install reasoning-gym."
        ) from error
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise ValueError(
            f"from_reasoning_gym: got {dataset!r}, need one of the {len(known)} in "
            f"reasoning_gym.factory.DATASETS.{did_you_mean(dataset, known)}"
        )
    return reasoning_gym.create_dataset(dataset, **config)


class _Verifier:
    """``score_answer`` of a dataset for the entry that a prompt was made from."""

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any],
        entries: Mapping[str, Mapping[str, Any]],
        extract: Callable[[str], str | None],
    ) -> None:
        self.dataset, self.config, self.extract = dataset, dict(config), extract
        self.entries = dict(entries)
        self._made: Any = None

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """From 0 to 1."""
        if self._made is None:
            self._made = _create(self.dataset, self.config)
        return float(self._made.score_answer(self.extract(response), self.entries[prompt]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}

    def __repr__(self) -> str:
        return f"reasoning_gym.{self.dataset}"
