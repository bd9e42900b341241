import pytest

from rlkit.trace import Span, Trace, current, label, labelled, wall_s


def span(stage="update", start_s=0.0, end_s=1.0, **facts) -> Span:
    return Span(stage=stage, start_s=start_s, end_s=end_s, **facts)


# ---- the trace ----


def test_spans_after_a_mark_are_those_added_after_it():
    trace = Trace()
    trace.add(span("a"))
    mark = trace.mark()
    trace.add(span("b"))
    assert [s.stage for s in trace.since(mark)] == ["b"]
    assert [s.stage for s in trace.since(0)] == ["a", "b"]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 10, 100])
def test_a_trace_keeps_at_most_its_limit_and_the_newest(limit):
    trace = Trace(limit=limit)
    for i in range(350):
        trace.add(span(str(i)))
    kept = [int(s.stage) for s in trace.since(0)]
    assert limit / 2 <= len(kept) <= limit
    assert kept == list(range(350 - len(kept), 350))


def test_a_mark_holds_when_old_spans_are_dropped():
    trace = Trace(limit=4)
    for i in range(4):
        trace.add(span(str(i)))
    mark = trace.mark()
    for i in range(4, 6):
        trace.add(span(str(i)))
    assert [s.stage for s in trace.since(mark)] == ["4", "5"]


def test_a_frame_has_a_row_a_span_and_all_columns_when_empty():
    trace = Trace()
    columns = list(trace.frame().columns)
    trace.add(span("generate", worker="rollout/1", tokens=7))
    row = trace.frame().iloc[0]
    assert list(trace.frame().columns) == columns
    assert (row["stage"], row["worker"], row["tokens"], row["end_s"]) == (
        "generate",
        "rollout/1",
        7,
        1.0,
    )


def test_a_span_of_this_process_lasts_as_long_as_its_body():
    trace = Trace()
    with trace.span("score", rows=3):
        pass
    (found,) = trace.since(0)
    assert (found.stage, found.rows) == ("score", 3)
    assert 0 <= found.end_s - found.start_s < 5


def test_a_span_is_recorded_when_its_body_fails():
    trace = Trace()
    with pytest.raises(ZeroDivisionError), trace.span("score"):
        _ = 1 / 0
    assert len(trace.since(0)) == 1


def test_a_process_has_one_trace():
    assert current() is current()


# ---- labels ----


def test_a_label_renames_the_stages_inside_it_and_only_there():
    with labelled("evaluate"):
        assert label("generate") == "evaluate"
    assert label("generate") == "generate"


def test_a_label_ends_with_an_error():
    with pytest.raises(ValueError, match="x"), labelled("evaluate"):
        raise ValueError("x")
    assert label("generate") == "generate"


# ---- seconds ----


def test_seconds_of_a_stage_add_up_over_its_calls():
    assert wall_s([span(), span(start_s=5.0, end_s=7.0), span("score")]) == {
        "update": 3.0,
        "score": 1.0,
    }


def test_ranks_of_one_call_count_once_from_the_first_start_to_the_last_end():
    ranks = [span(start_s=1.0, end_s=3.0, call=4), span(start_s=2.0, end_s=6.0, call=4)]
    assert wall_s(ranks) == {"update": 5.0}


def test_two_calls_count_twice():
    calls = [span(call=4), span(call=5), span(start_s=0.5, end_s=1.0, call=5)]
    assert wall_s(calls) == {"update": 2.0}


def test_no_spans_take_no_time():
    assert wall_s([]) == {}
