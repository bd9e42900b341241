import pickle

import pytest

from rlkit.models import char_tokenizer


def test_special_tokens_come_first():
    tokenizer = char_tokenizer("ab")
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.encode("ab") == [1, 3, 4]


def test_encoding_without_bos_starts_with_the_text():
    assert char_tokenizer("ab").encode("ba", bos=False) == [4, 3]


def test_special_tokens_are_not_decoded():
    assert char_tokenizer("ab").decode([1, 3, 0, 4, 2, 0]) == "ab"


@pytest.mark.parametrize("text", ["a b", "\n\n", "a\nb", "", " ", "é€🙂", "(((", "\\."])
def test_every_character_is_one_token_and_comes_back(text):
    tokenizer = char_tokenizer(" ab\né€🙂(.\\")
    assert len(tokenizer.encode(text, bos=False)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_rows_are_decoded_each():
    assert char_tokenizer("ab").decode_batch([[3], [], [4, 4, 2]]) == ["a", "", "bb"]


def test_characters_outside_the_alphabet_are_named():
    with pytest.raises(ValueError, match=r"got characters \['c', 'd'\], need only those of 'ab'"):
        char_tokenizer("ab").encode("dac")


def test_a_character_twice_is_an_error():
    with pytest.raises(ValueError, match="more than once"):
        char_tokenizer("aba")


def test_sampled_ids_are_not_what_encoding_their_text_gives():  # faults C7: why ids are kept
    tokenizer = char_tokenizer("ab")
    sampled = [3, 0, 4]  # a padding token in between, as an untrained model samples
    assert tokenizer.encode(tokenizer.decode(sampled), bos=False) != sampled


def test_a_tokenizer_travels_by_pickle():
    tokenizer = char_tokenizer("ab")
    tokenizer.encode("a")
    assert pickle.loads(pickle.dumps(tokenizer)).encode("ab") == [1, 3, 4]


def test_repr_counts_the_tokens():
    assert repr(char_tokenizer("ab")) == "Tokenizer(5 tokens)"
