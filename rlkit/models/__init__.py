"""Models: the decoder, Hugging Face folders, and the tiny model with shipped weights."""

from rlkit.models.decoder import Critic, Decoder
from rlkit.models.pretrained import Pretrained, load, save
from rlkit.models.tiny import tiny, tiny_spec
from rlkit.models.tokenizer import Tokenizer, char_tokenizer

__all__ = [
    "Critic",
    "Decoder",
    "Pretrained",
    "Tokenizer",
    "char_tokenizer",
    "load",
    "save",
    "tiny",
    "tiny_spec",
]
