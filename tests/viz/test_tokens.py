"""The token view: text, colours, marks, legend, errors."""

import math
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlkit as rk
from rlkit.algo import kl_k3
from rlkit.viz import show_tokens
from rlkit.viz.style import ROLE_COLOURS
from rlkit.viz.tokens import MAX_TOKENS, Scale


class Page(HTMLParser):
    """Spans of a view: class, style, title and text of each; names of all tags."""

    def __init__(self, html):
        super().__init__()
        self.spans, self.tags, self.text = [], set(), ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "span":
            self.spans.append({"class": "", "title": "", "text": ""} | dict(attrs))

    def handle_data(self, data):
        self.text += data
        if self.spans:
            self.spans[-1]["text"] += data

    def of(self, *kinds):
        return [span for span in self.spans if span["class"] in kinds]

    def tokens(self):
        return self.of("token", "masked", "nan")


class Words:
    """A tokenizer of a list of words."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[k] for k in ids)


def make_batch(**columns):
    base = {
        "prompt": ["1+1=", "2+2="],
        "response": ["abc", "ab"],
        "response_ids": [torch.tensor([4, 5, 6]), torch.tensor([4, 5])],
        "response_mask": [torch.tensor([1, 0, 1]), torch.tensor([1, 1])],
        "advantages": [torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.5, 0.5])],
    }
    return rk.Batch.from_columns(base | columns)


def page(batch, i=0, color="advantages", **options):
    return Page(show_tokens(batch, i, color, **options)._repr_html_())


def background(span):
    return span["style"].partition("background:")[2]


def test_tokens_are_the_text_of_the_response_and_the_prompt_is_grey():
    shown = page(make_batch())
    assert [span["text"] for span in shown.tokens()] == ["a", "b", "c"]
    (prompt,) = shown.of("prompt")
    assert prompt["text"] == "1+1="
    assert "opacity" in prompt["style"]


def test_rows_have_their_own_lengths():
    assert len(page(make_batch(), 1).tokens()) == 2
    assert len(page(make_batch(), -2).tokens()) == 3


def test_masked_tokens_look_different_and_say_so():
    shown = page(make_batch())
    assert [span["class"] for span in shown.tokens()] == ["token", "masked", "token"]
    masked = shown.of("masked")[0]
    assert background(masked) == ""
    assert "dashed" in masked["style"]
    assert "masked: not trained on" in masked["title"]
    assert "masked" in shown.text
    assert "masked" not in page(make_batch(), 1).text


def test_values_of_both_signs_are_white_at_zero_and_symmetric():
    shown = page(make_batch(advantages=[torch.tensor([2.0, 9.0, -2.0]), torch.zeros(2)]))
    first, _, last = shown.tokens()  # the masked 9 does not count
    assert background(first) == ROLE_COLOURS["rollout"]
    assert background(last) == ROLE_COLOURS["actor"]
    assert "-2 … 0 … 2" in shown.text
    assert {
        background(span) for span in page(make_batch(advantages=torch.zeros(2, 3))).of("token")
    } == {"#ffffff"}


@pytest.mark.parametrize(
    ("values", "centre", "ends"),
    [
        ([1.0, 3.0], 0.0, (0, 0, 3)),
        ([-1.0, -3.0], 0.0, (-3, 0, 0)),
        ([-1.0, 3.0], 0.0, (-3, 0, 3)),
        ([0.5, 1.2], 1.0, (0.5, 1, 1.5)),
        ([7, 9], 0.0, (7, 7, 9)),
        ([math.nan, math.inf], 0.0, (0, 0, 0)),
        ([], 0.0, (0, 0, 0)),
    ],
)
def test_the_range_follows_the_values(values, centre, ends):
    scale = Scale.of(np.asarray(values), centre)
    assert (scale.low, scale.centre, scale.high) == pytest.approx(ends)


def test_hover_shows_the_value_and_other_columns_of_the_token():
    batch = make_batch(rollout_logprobs=[torch.tensor([-0.25, -1, -1]), torch.zeros(2)])
    title = page(batch).tokens()[0]["title"]
    assert title.splitlines() == ["token 0, id 4", "advantages 1", "rollout_logprobs -0.25"]


def test_a_number_a_response_is_shown_once_expanded():
    batch = make_batch()
    batch["advantages"] = batch.expand(torch.tensor([3.0, -1.0]))
    assert page(batch).tokens()[2]["title"].splitlines()[1] == "advantages 3"


LOGPROBS = {
    "logprobs": [torch.tensor([-1.0, -1.0, -3.0]), torch.zeros(2)],
    "old_logprobs": [torch.tensor([-2.0, -1.0, -1.0]), torch.zeros(2)],
    "ref_logprobs": [torch.tensor([-1.5, -1.0, -4.0]), torch.zeros(2)],
    "rollout_logprobs": [torch.tensor([-2.5, -1.0, -1.0]), torch.zeros(2)],
}


@pytest.mark.parametrize(
    ("color", "first"),
    [
        ("ratio", math.e),
        ("kl", float(kl_k3(torch.tensor([[-2.0]]), torch.tensor([[-1.5]])))),
        ("engine_difference", 0.5),
        ("ref_logprobs", -1.5),
    ],
)
def test_ratio_kl_and_engine_difference_are_made_of_two_columns(color, first):
    title = page(make_batch(**LOGPROBS), color=color).tokens()[0]["title"]
    assert title.splitlines()[1] == f"{color} {first:.5g}"


def test_a_ratio_is_white_at_one():
    shown = page(make_batch(**LOGPROBS | {"old_logprobs": LOGPROBS["logprobs"]}), color="ratio")
    assert {background(span) for span in shown.of("token")} == {"#ffffff"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.bool])
def test_columns_of_any_dtype_are_shown(dtype):
    values = [torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1, 1]).to(dtype)]
    assert len(page(make_batch(mine=values), color="mine").tokens()) == 3


def test_token_versions_start_at_the_smallest():
    versions = [torch.tensor([7, 7, 8]), torch.tensor([7, 7])]
    first, _, last = page(make_batch(token_version=versions), color="token_version").tokens()
    assert background(first) == "#ffffff"
    assert background(last) == ROLE_COLOURS["rollout"]


def test_values_that_are_not_finite_are_hatched_and_leave_the_range_alone():
    values = [torch.tensor([math.nan, 0.0, -2.0]), torch.zeros(2)]
    shown = page(make_batch(advantages=values))
    assert [span["class"] for span in shown.tokens()] == ["nan", "masked", "token"]
    assert "not finite" in shown.text
    assert "-2 … 0" in shown.text


def test_a_response_of_html_is_text():
    words = ["<script>", "alert(1)", "</script>"]
    batch = make_batch(
        prompt=["<b>", ""], response_ids=[torch.tensor([0, 1, 2]), torch.tensor([0, 1])]
    )
    shown = page(batch, tokenizer=Words(*words))
    assert [span["text"] for span in shown.tokens()] == words
    assert shown.of("prompt")[0]["text"] == "<b>"
    assert "script" not in shown.tags


def test_a_column_named_like_html_is_text():
    name = '"><script>'
    values = [torch.tensor([1.0, 0.0, -2.0]), torch.zeros(2)]
    shown = page(make_batch(**{name: values}), color=name)
    assert "script" not in shown.tags
    assert shown.tokens()[0]["title"].splitlines()[1] == f"{name} 1"


def test_without_text_of_one_character_a_token_ids_are_shown():
    assert [s["text"] for s in page(make_batch(response=["ab", ""])).tokens()] == [
        "[4]",
        "[5]",
        "[6]",
    ]
    batch = make_batch(response=["aba", "ab"])  # as many characters, but 4 and 6 are not both "a"
    assert [s["text"] for s in page(batch).tokens()] == ["[4]", "[5]", "[6]"]


def test_the_stop_token_is_named():
    batch = make_batch(response=["ab", "ab"], finish_reason=["stop", "length"])
    assert [span["text"] for span in page(batch).tokens()] == ["a", "b", "<stop>"]


def test_what_a_model_generates_is_shown_as_its_text():
    task = rk.tasks.reverse_digits(length=4)
    rollout = rk.RolloutWorker(rk.models.tiny(pretrained="reverse_digits"), max_new_tokens=8)
    batch = rollout.generate(next(task.batches(size=2, steps=1)), n=2, temperature=1.0)
    for i in range(len(batch)):
        shown = page(batch, i, "rollout_logprobs").tokens()
        text = "".join(span["text"] for span in shown)
        assert text.removesuffix("<stop>") == batch["response"][i]
        again = page(batch, i, "rollout_logprobs", tokenizer=rollout.tokenizer).tokens()
        assert [s["text"] for s in again][: len(batch["response"][i])] == list(batch["response"][i])


def test_line_ends_are_seen():
    batch = make_batch(response_ids=[torch.tensor([0, 1, 0]), torch.tensor([0, 0])])
    assert page(batch, tokenizer=Words("\n", "\t")).tokens()[0]["text"] == "↵\n"


def test_a_long_response_is_cut_and_says_so():
    num = MAX_TOKENS + 5
    batch = rk.Batch.from_columns(
        {"response_ids": torch.zeros(1, num).long(), "advantages": torch.zeros(1, num)}
    )
    shown = page(batch)
    assert len(shown.tokens()) == MAX_TOKENS
    assert "and 5 more tokens" in shown.text


def test_an_empty_response_has_no_tokens():
    batch = rk.Batch.from_columns(
        {"response_ids": torch.zeros(1, 0).long(), "advantages": torch.zeros(1, 0)}
    )
    assert page(batch).tokens() == []


def test_as_text_it_is_one_line():
    assert repr(show_tokens(make_batch(), 0)) == (
        "TokenView(response 0, 3 tokens, advantages from -2 to 2)"
    )


@pytest.mark.parametrize(
    ("i", "color", "error", "message"),
    [
        (2, "advantages", IndexError, "got 2, need a position in this batch of 2 rows"),
        (-3, "advantages", IndexError, "got -3"),
        (0.0, "advantages", TypeError, "got float, need an int"),
        (True, "advantages", TypeError, "got bool, need an int"),
        (0, "entropy", KeyError, r"no column entropy; it has .*'advantages'.*or by one of"),
        (0, "ratio", KeyError, r"no column logprobs, old_logprobs.*actor.compute_logprobs"),
        (0, "kl", KeyError, r"no column old_logprobs, ref_logprobs"),
        (0, "prompt", TypeError, "got text or objects, need a column of numbers"),
        (0, "uid", ValueError, r"need \[1, 3\], one a response token"),
        (0, "prompt_ids", ValueError, r"got values of shape \[1, 1\] for one row"),
        (0, len, TypeError, "got builtin_function_or_method, need the name of a column"),
    ],
)
def test_a_wrong_call_says_what_it_needs(i, color, error, message):
    batch = make_batch(prompt_ids=[torch.tensor([1]), torch.tensor([1])])
    with pytest.raises(error, match=message):
        show_tokens(batch, i, color)


def test_something_else_than_a_batch_is_an_error():
    with pytest.raises(TypeError, match=r"got list, need an rk\.Batch"):
        show_tokens([1], 0)


TOKENS = st.tuples(
    st.text(min_size=1, max_size=5).filter(
        lambda x: x not in "\n\t" and "\r" not in x and "\0" not in x
    ),
    st.floats(width=32),
    st.booleans(),
)


@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_any_text_and_any_values_come_back_from_the_page(tokens):
    words, values, mask = zip(*tokens, strict=True)
    batch = rk.Batch.from_columns(
        {
            "prompt": [words[0]],
            "response_ids": torch.arange(len(words))[None],
            "response_mask": torch.tensor([mask]),
            "advantages": torch.tensor([values]),
        }
    )
    shown = page(batch, tokenizer=Words(*words))
    assert [span["text"] for span in shown.tokens()] == list(words)
    assert [span["class"] == "masked" for span in shown.tokens()] == [not x for x in mask]
    assert shown.tags <= {"div", "span", "b"}
