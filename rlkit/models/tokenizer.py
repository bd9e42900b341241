"""Text to ids and back, by the ``tokenizers`` library; a tokenizer travels as its JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>")


class Tokenizer:
    """A ``tokenizer.json`` with the ids that generation needs."""

    def __init__(
        self,
        text: str,
        *,
        eos_id: int,
        pad_id: int,
        bos_id: int | None = None,
        chat_template: Any = None,
    ) -> None:
        self.text, self.eos_id, self.pad_id, self.bos_id = text, eos_id, pad_id, bos_id
        self.chat_template = chat_template  # not used here, but a saved folder keeps it
        self._tokenizer: Any = None

    @property
    def inner(self) -> Any:
        """The ``tokenizers.Tokenizer``, built when first asked for."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer as Inner

            self._tokenizer = Inner.from_str(self.text)
        return self._tokenizer

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of ``text``, after the begin-of-sequence id if the tokenizer has one and ``bos`` asks
        for it.
        """
        ids = self.inner.encode(text, add_special_tokens=False).ids
        unknown = len(text) > 0 and not ids
        if unknown:
            raise ValueError(f"tokenizer: got {text!r}, none of which is in the vocabulary.")
        return ([self.bos_id] if bos and self.bos_id is not None else []) + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of several rows of ids."""
        return self.inner.decode_batch([list(row) for row in rows], skip_special_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, special tokens included."""
        return self.inner.get_vocab_size()

    def token(self, index: int | None) -> str | None:
        """The token of an id."""
        return None if index is None else self.inner.id_to_token(index)

    def config(self) -> dict[str, Any]:
        """Content of a ``tokenizer_config.json`` that transformers reads."""
        named = {
            "pad_token": self.token(self.pad_id),
            "bos_token": self.token(self.bos_id),
            "eos_token": self.token(self.eos_id),
            "chat_template": self.chat_template,
        }
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.bos_id is not None,
            "clean_up_tokenization_spaces": False,
            **{name: value for name, value in named.items() if value is not None},
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokenizer": None}

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size} tokens)"


def char_tokenizer(characters: str = "0123456789+-*=()> ,?") -> Tokenizer:
    """One token a character, after ``<pad>``, ``<bos>`` and ``<eos>``.

    Any other character is an error.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Inner

    twice = sorted({c for c in characters if characters.count(c) > 1})
    if twice:
        raise ValueError(f"characters: got {twice} more than once, need each character once.")
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    inner = Inner(models.WordLevel(vocab, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return CharTokenizer(inner.to_str(), characters=characters, eos_id=2, pad_id=0, bos_id=1)


class CharTokenizer(Tokenizer):
    """A tokenizer that refuses characters outside its alphabet instead of losing them."""

    def __init__(
        self, text: str, *, characters: str, eos_id: int, pad_id: int, bos_id: int
    ) -> None:
        super().__init__(text, eos_id=eos_id, pad_id=pad_id, bos_id=bos_id)
        self.characters = characters

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of ``text``; ValueError names characters that are not in the alphabet."""
        odd = sorted(set(text) - set(self.characters))
        if odd:
            raise ValueError(
                f"tokenizer: got characters {odd}, need only those of {self.characters!r}. "
                "Make a tokenizer with char_tokenizer(characters), or for a model of yours pass "
                "tokenizer=model.tokenizer to the task."
            )
        return super().encode(text, bos=bos)


def from_folder(folder: Path, *, names: Mapping[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    ``names``: its ``tokenizer_config.json``. Ids not named there come from the model's ``config``.
    """
    path, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    plain = Tokenizer(path.read_text(encoding="utf-8"), eos_id=0, pad_id=0)
    try:
        first = plain.inner.encode("", add_special_tokens=True).ids[:1]
    except Exception as error:  # tokenizers has no narrower one
        raise ValueError(f"{path}: not a tokenizer ({error}). Copy it again.") from error

    def index(kind: str) -> int | None:
        token = names.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        found = None if token is None else plain.inner.token_to_id(token)
        value = config.get(f"{kind}_token_id") if found is None else found
        return value[0] if isinstance(value, list) else value

    eos, pad, bos = index("eos"), index("pad"), index("bos")
    if eos is None or not 0 <= eos < config["vocab_size"]:
        raise ValueError(
            f"{folder}: got {'no eos token' if eos is None else f'eos token {eos}'}, need one of "
            f"the model's {config['vocab_size']} ids: responses end there. Name it in "
            "tokenizer_config.json (eos_token) or config.json (eos_token_id)."
        )
    return Tokenizer(
        plain.text,
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        bos_id=bos if first == [bos] or names.get("add_bos_token") else None,
        chat_template=template.read_text() if template.exists() else names.get("chat_template"),
    )
