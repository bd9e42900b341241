import json
import math

import pytest
import torch

import rlkit as rk
from rlkit.algo import exact_match
from rlkit.tasks import pass_at_k


def write(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def sums(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": i + 1, "level": i % 3} for i in range(40)]
    return write(tmp_path / "sums.jsonl", rows)


def prompts_of(task, num):
    (batch,) = task.batches(size=num, steps=1)
    return batch["prompt"]


def test_rows_become_prompts_and_numbers_texts(sums):
    task = rk.tasks.from_jsonl(sums, verify=exact_match)
    training = [task.item(i) for i in range(len(task.training))]
    assert set(training + task.other) == {(f"{i}+1=", str(i + 1)) for i in range(40)}
    assert 1 <= len(task.other) <= 10
    assert task.name == "sums"


def test_held_out_prompts_may_have_a_file_of_their_own(sums, tmp_path):
    other = write(tmp_path / "test.jsonl", [{"prompt": "9+9=", "answer": "18"}])
    task = rk.tasks.from_jsonl(sums, verify=exact_match, held_out=other)
    assert len(task.training) == 40
    assert task.held_out(1)["prompt"] == ["9+9="]


def test_columns_may_have_other_names(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"q": "1+1=", "a": "2"}, "", {"q": "1+3=", "a": "4"}])
    other = write(tmp_path / "o.jsonl", [{"q": "1+2=", "a": "3"}])
    task = rk.tasks.from_jsonl(path, held_out=other, verify=exact_match, prompt="q", answer="a")
    assert sorted(task.training) == [("1+1=", "2"), ("1+3=", "4")]


def test_a_stream_of_a_file_goes_on_where_it_stopped(sums):
    task = rk.tasks.from_jsonl(sums, verify=exact_match, seed=3)
    stream = task.stream(size=7)
    whole = [next(stream)["prompt"] for _ in range(12)]  # over the ends of two epochs
    again = rk.tasks.from_jsonl(sums, verify=exact_match, seed=3).stream(size=7)
    again.load_state({"task": task.identity(), "position": 35})
    assert [next(again)["prompt"] for _ in range(7)] == whole[5:]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 3: "),
        ([1], "line 3: is list, need an object"),
        ({"prompt": "1+1="}, "line 3: no column 'answer' among 'prompt'"),
        ({"prompt": "", "answer": "2"}, "line 3: prompt is '', need a text"),
        ({"prompt": 3, "answer": "2"}, "line 3: prompt is 3, need a text"),
        ({"prompt": "1+1=", "answer": None}, "line 3: answer is None, need a text or a number"),
        ({"prompt": "1+1=", "answer": True}, "line 3: answer is True, need a text or a number"),
        ('{"prompt": "1+1=", "answer": NaN}', "line 3: answer is nan, need a text or a number"),
        ('{"prompt": "\\ud83d", "answer": "2"}', "line 3: 'utf-8' codec can't encode"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path, row, said):
    good = {"prompt": "1+1=", "answer": "2"}
    path = write(tmp_path / "bad.jsonl", [good, "", row, good])
    with pytest.raises(ValueError, match="got 1 bad lines of 3") as caught:
        rk.tasks.from_jsonl(path, verify=exact_match)
    assert said in str(caught.value)


def test_text_that_is_no_utf8_is_named_by_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "na\xefve", "answer": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*utf-8"):
        rk.tasks.from_jsonl(path, verify=exact_match)


def test_a_byte_order_mark_and_line_ends_of_windows_are_passed_over(tmp_path):
    path = tmp_path / "marked.jsonl"
    row = b'{"prompt": "na\xc3\xafve", "answer": %d}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + row % 1 + b"\r\n" + row % 10**400)
    task = rk.tasks.from_jsonl(path, verify=exact_match)
    assert sorted(task.training + task.other) == [("naïve", "1"), ("naïve", f"1{'0' * 400}")]


def test_of_many_bad_rows_the_first_are_named_and_the_rest_counted(tmp_path):
    path = write(tmp_path / "bad.jsonl", [{}] * 9)
    with pytest.raises(ValueError, match=r"line 1: .* line 3: .* and 6 more") as caught:
        rk.tasks.from_jsonl(path, verify=exact_match)
    assert "line 4" not in str(caught.value)


def test_a_file_without_rows_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="got no rows"):
        rk.tasks.from_jsonl(write(tmp_path / "empty.jsonl", [""]), verify=exact_match)


def test_gsm8k_answers_are_the_number_after_the_marks(tmp_path):
    worked = {"question": "How many?", "answer": "6 * 200 = <<6*200=1200>>1,200\n#### 1,200"}
    path = write(tmp_path / "train.jsonl", [worked])
    other = write(tmp_path / "test.jsonl", [{"question": "Why?", "answer": "#### -3"}])
    task = rk.tasks.from_gsm8k(path, held_out=other, template="Q: {question} A:")
    assert task.item(0) == ("Q: How many? A:", "1200")
    assert task.other == [("Q: Why? A:", "-3")]
    assert task.verify("", "so it is 1,200.", "1200") == 1.0
    assert task.verify("", "so it is 120.", "1200") == 0.0


def test_gsm8k_rows_without_a_number_are_named(tmp_path):
    rows = [{"question": "How many?", "answer": "#### 3"}, {"question": "Why?", "answer": "so"}]
    with pytest.raises(ValueError, match="line 2: answer 'so' has no '#### number'"):
        rk.tasks.from_gsm8k(write(tmp_path / "train.jsonl", rows))
    with pytest.raises(ValueError, match=r"need a text with \{question\}"):
        rk.tasks.from_gsm8k(tmp_path / "train.jsonl", template="Q:")


def test_pass_at_k_by_hand():
    verdicts = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert pass_at_k(verdicts, 1) == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert pass_at_k(verdicts, 2) == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)  # 1 - 3/6, 1 - 1/6
    assert pass_at_k(verdicts, 4) == pytest.approx(2 / 3)


def test_responses_that_could_not_be_judged_are_not_among_the_n():
    nan = math.nan
    assert pass_at_k(torch.tensor([[1.0, nan, 0.0]]), 1) == 0.5
    assert pass_at_k(torch.tensor([[1.0, nan, nan], [0.0, 0.0, 0.5]]), 2) == 0.0
    assert math.isnan(pass_at_k(torch.tensor([[nan, nan]]), 1))


def test_evaluate_reports_pass_at_k():
    task = rk.tasks.reverse_digits()
    worker = rk.RolloutWorker(rk.models.tiny(pretrained="reverse_digits"), max_new_tokens=12)
    prompts, how = task.held_out(8), {"n": 4, "temperature": 1.0}
    found = rk.evaluate(worker, prompts, task.verify, k=4, **how)
    once = rk.evaluate(worker, prompts, task.verify, k=1, **how)
    assert once["eval/pass_at_k"] == pytest.approx(once["eval/accuracy"])
    assert found["eval/accuracy"] == once["eval/accuracy"] < found["eval/pass_at_k"] <= 1
