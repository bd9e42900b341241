"""Stop strings: the text of a response while it grows."""

from rlkit.models.tokenizer import Tokenizer


class GrowingText:
    """Text of the tokens so far, decoded one at a time, and the stop string found in it."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self.inner, self.stop = tokenizer.inner, stop
        self.stream = DecodeStream(skip_special_tokens=True)
        self.text = ""
        self.found: str | None = None

    def push(self, token: int) -> bool:
        """Add a token; True once a stop string is there, however many tokens it is spread over.

        The text then ends before the first stop string in it. Bytes that are no whole character yet
        wait for the next token.
        """
        new = self.stream.step(self.inner, token) or ""
        old, self.text = len(self.text), self.text + new
        places = [(self.text.find(s, max(0, old - len(s) + 1)), s) for s in self.stop]
        found = min((place for place in places if place[0] >= 0), default=None, key=lambda p: p[0])
        if found:
            self.text, self.found = self.text[: found[0]], found[1]
        return found is not None
