import contextlib
import gc
import json
import pickle
import threading
import weakref
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit import device, trace
from rlkit.trace import (
    Span,
    Trace,
    current,
    idle_fractions,
    is_inside,
    label,
    labelled,
    merged,
    storage_bytes,
    wall_s,
)
from rlkit.trace import memory as memory_module
from rlkit.trace.chrome import events
from rlkit.trace.memory import Meter, counted
from rlkit.trace.tables import nested_tracks


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


# ---- recording ----


@pytest.fixture
def recorded():
    """A trace of its own for the test."""
    with trace.use(Trace()) as mine:
        yield mine


class Worker:
    """Explains 600 bytes; its version is 3."""

    version = 3

    def __init__(self, **sizes):
        self.sizes = sizes or {"weights": 400, "optimizer": 200, "gradients": 0}

    def memory(self):
        return self.sizes


def test_facts_of_a_span_may_be_set_until_it_ends(recorded):
    with trace.span("store/fetch") as opened:
        opened.rows, opened.bytes = 3, 48
        trace.note(bytes=2, tokens=5)
    (found,) = recorded.since(0)
    assert (found.rows, found.bytes, found.tokens) == (3, 50, 5)


def test_a_span_inside_a_stage_has_its_worker_node_and_call(recorded):
    with (
        trace.stage_span("update", Worker(), worker="actor/1", node="ab12", call=7),
        trace.wait("sum"),
    ):
        pass
    inner, outer = recorded.since(0)
    assert (inner.stage, inner.worker, inner.node, inner.call) == ("wait/sum", "actor/1", "ab12", 7)
    assert (outer.stage, outer.worker, outer.version) == ("update", "actor/1", 3)
    assert outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


def test_after_a_stage_spans_are_the_drivers_again(recorded):
    with pytest.raises(KeyError), trace.stage_span("update", Worker(), worker="actor/0"):
        raise KeyError
    with trace.span("score"):
        pass
    assert [s.worker for s in recorded.since(0)] == ["actor/0", "driver"]


def test_a_thread_of_its_own_records_as_the_driver(recorded):
    with trace.stage_span("update", Worker(), worker="actor/0"):
        thread = threading.Thread(target=lambda: trace.span("save").__enter__().__exit__())
        thread.start()
        thread.join()
    assert {s.stage: s.worker for s in recorded.since(0)} == {"save": "driver", "update": "actor/0"}


def test_a_note_outside_of_spans_is_dropped(recorded):
    trace.note(bytes=3)
    trace.sample_memory()
    assert recorded.since(0) == []


def test_draining_takes_the_spans_and_keeps_marks_right(recorded):
    recorded.add(span("a"))
    mark = recorded.mark()
    assert [s.stage for s in recorded.drain()] == ["a"]
    recorded.add(span("b"))
    assert [s.stage for s in recorded.since(mark)] == ["b"]
    assert len(recorded.drain()) == 1
    assert recorded.drain() == []


def test_drained_spans_join_the_drivers_with_the_clusters_devices(recorded):
    sent = pickle.loads(pickle.dumps([span("update", worker="actor/0", after={"allocated": 3})]))
    recorded.extend(sent, devices=8)
    assert recorded.since(0) == [replace(sent[0], devices=8)]


def test_a_trace_that_is_off_keeps_nothing_and_samples_nothing():
    worker = Worker(no_such_category=1)
    with trace.use(Trace(limit=0)) as off, trace.stage_span("update", worker, worker="a/0") as mine:
        mine.rows = 3
        trace.sample_memory()
    assert off.since(0) == []
    assert not off.on


def test_a_trace_in_use_is_the_processes_only_inside():
    before, mine = current(), Trace()
    seen = []
    with contextlib.suppress(KeyError), trace.use(mine):
        seen.append(current())
        raise KeyError
    assert seen == [mine]
    assert current() is before


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit: got -1, need 0 or more"):
        Trace(limit=-1)


def test_garbage_collected_while_a_span_is_added_may_add_one_itself(recorded):
    """A finalizer runs wherever Python allocates: here, while the trace is locked."""

    class Part:
        pass

    with recorded._lock:
        part = Part()
        part.itself = part
        weakref.finalize(part, recorded.add, span("store/free"))
        del part
        gc.collect()
    assert [s.stage for s in recorded.since(0)] == ["store/free"]


# ---- memory ----


def test_a_stage_has_memory_before_and_after_with_the_unexplained_rest(recorded):
    with trace.stage_span("update", Worker(), worker="actor/0"):
        pass
    (found,) = recorded.since(0)
    for memory in (found.before, found.after):
        assert {k: v for k, v in memory.items() if k in trace.CATEGORIES} == {
            "weights": 400,
            "optimizer": 200,
        }
        assert memory["residual"] == memory["allocated"] - 600
        assert memory["allocated"] > 10e6  # of a process with torch in it


@pytest.fixture
def counts(monkeypatch):
    """What the device counts, in turn: (allocated, peak). The last one stays."""

    def set_to(*pairs):
        left = list(pairs)
        monkeypatch.setattr(
            memory_module, "counted", lambda kind: left.pop(0) if len(left) > 1 else left[0]
        )
        monkeypatch.setattr(memory_module, "QUICK_S", 0.0)

    return set_to


def test_the_fullest_moment_may_lie_inside_the_stage(recorded, counts):
    counts((100, 0), (900, 0), (200, 0))
    worker = Worker(weights=50)
    with trace.stage_span("update", worker, worker="actor/0"):
        worker.sizes = {"weights": 50, "gradients": 700}
        trace.sample_memory()
        worker.sizes = {"weights": 50}
    (found,) = recorded.since(0)
    assert found.before == {"weights": 50, "allocated": 100, "residual": 50}
    assert found.peak == {"weights": 50, "gradients": 700, "allocated": 900, "residual": 150}
    assert found.after == {"weights": 50, "allocated": 200, "residual": 150}


def test_of_equally_full_moments_the_peak_is_the_one_that_explains_most(recorded, counts):
    counts((0, 0), (9000, 0), (9100, 0))
    worker = Worker(weights=50)
    with trace.stage_span("update", worker, worker="actor/0"):
        worker.sizes = {"weights": 50, "gradients": 50}
        trace.sample_memory()
        worker.sizes = {"weights": 50}
    assert recorded.since(0)[0].peak["gradients"] == 50


def test_a_second_look_inside_a_stage_is_taken_where_more_is_held(recorded, counts):
    counts((0, 0), (9 << 20, 0), (9 << 20, 0), (12 << 20, 0), (0, 0))
    looks = []
    worker = Worker()
    worker.memory = lambda: looks.append(1) or {"weights": 5}
    with trace.stage_span("update", worker, worker="actor/0"):
        for _ in range(3):
            trace.sample_memory()
    assert len(looks) == 4  # before, twice of three times inside, after
    assert recorded.since(0)[0].peak["allocated"] == 12 << 20


def test_what_a_device_held_between_two_looks_is_activations(recorded, counts):
    counts((100, 350))
    with trace.stage_span("update", Worker(weights=60), worker="actor/0"):
        pass
    (found,) = recorded.since(0)
    assert found.peak == {"weights": 60, "activations": 250, "allocated": 350, "residual": 40}
    assert "activations" not in found.after


def test_activations_that_a_worker_knows_are_not_made_up(recorded, counts):
    counts((100, 130))
    with trace.stage_span("update", Worker(activations=90), worker="actor/0"):
        pass
    assert recorded.since(0)[0].peak == {"activations": 90, "allocated": 130, "residual": 40}


def test_a_kept_meter_knows_what_was_there_before(recorded, counts):
    counts((100, 0), (300, 0), (300, 0))
    worker = Worker(weights=50)
    meter = Meter(worker)
    with trace.stage_span("update", meter, worker="actor/0"):
        worker.sizes = {"weights": 50, "optimizer": 200}
    worker.sizes = {}  # between two calls nobody looks
    with trace.stage_span("logprobs", meter, worker="actor/0"):
        worker.sizes = {"weights": 50, "optimizer": 200}
    first, second = recorded.since(0)
    assert first.before == {"weights": 50, "allocated": 100, "residual": 50}
    assert second.before == first.after
    assert second.version == worker.version


def test_after_a_failed_call_the_next_begins_with_a_look(recorded, counts):
    counts((100, 0), (300, 0), (300, 0))
    meter = Meter(Worker(weights=50))
    with contextlib.suppress(KeyError), trace.stage_span("update", meter, worker="actor/0"):
        raise KeyError
    with trace.stage_span("update", meter, worker="actor/0"):
        pass
    assert recorded.since(0)[1].before["allocated"] == 300


@pytest.mark.parametrize(("allocated", "num_looks"), [(100 + (1 << 20), 1), (101 + (1 << 20), 2)])
def test_a_quick_call_is_looked_at_only_where_memory_changed(
    recorded, counts, monkeypatch, allocated, num_looks
):
    counts((100, 0), (allocated, 0))
    monkeypatch.setattr(memory_module, "QUICK_S", 60.0)
    looks = []
    worker = Worker()
    worker.memory = lambda: looks.append(1) or {"kv_cache": len(looks)}
    with trace.stage_span("sleep", worker, worker="rollout/0"):
        pass
    (found,) = recorded.since(0)
    assert len(looks) == found.after["kv_cache"] == num_looks


def test_a_big_tensor_that_is_gone_at_the_end_shows_in_the_peak(recorded):
    if not counted("cpu")[1]:
        pytest.skip("this system does not let a process reset its peak")
    size = 64 << 20
    with trace.stage_span("update", Worker(), worker="actor/0"):
        torch.ones(size // 4).sum()
    (found,) = recorded.since(0)
    assert 0.8 * size < found.peak["allocated"] - found.before["allocated"] < 3 * size
    with trace.stage_span("update", Worker(), worker="actor/0"):
        pass
    after = recorded.since(0)[1]
    assert after.peak["allocated"] < found.peak["allocated"] - 0.5 * size


def test_on_a_cpu_the_resident_memory_of_the_process_is_counted():
    expected = device.allocated_bytes("cpu")
    allocated, peak = counted("cpu")
    assert allocated == pytest.approx(expected, rel=0.05)
    assert peak == 0 or peak >= 0.95 * allocated


def test_swapped_out_host_memory_counts_on_a_cpu_and_not_on_a_device(recorded, monkeypatch, counts):
    counts((1000, 0))
    monkeypatch.setattr(device, "reset_peak", lambda kind: None)
    worker = Worker(weights=600, host_swap=300)
    for kind in ("cpu", "other:1"):
        worker.context = type("Context", (), {"device": kind})()
        with trace.stage_span("update", worker, worker="actor/0"):
            pass
    assert [each.after["residual"] for each in recorded.since(0)] == [100, 400]


def test_a_worker_that_explains_nothing_is_all_residual(recorded):
    with trace.stage_span("score", object(), worker="runner/0"):
        pass
    after = recorded.since(0)[0].after
    assert set(after) == {"allocated", "residual"}
    assert after["allocated"] == after["residual"]


def test_an_unknown_category_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"Worker\.memory: got categories \['cache'\], need some of"
    ):
        Meter(Worker(cache=3)).start()


def test_memory_that_is_no_dict_is_refused():
    with pytest.raises(TypeError, match=r"Worker\.memory: got int, need a dict"):
        Meter(type("Worker", (), {"memory": lambda self: 3})()).start()


def test_a_failed_stage_is_a_span_without_its_memory(recorded):
    with pytest.raises(KeyError), trace.stage_span("update", Worker(), worker="actor/0"):
        raise KeyError
    (found,) = recorded.since(0)
    assert (found.stage, found.before, found.after) == ("update", None, None)


def test_a_storage_that_tensors_share_counts_once():
    whole = torch.zeros(10)
    assert storage_bytes([whole, whole[2:5], whole.view(2, 5)]) == 40
    assert storage_bytes([whole, torch.zeros(3, dtype=torch.float64)]) == 64
    assert storage_bytes([]) == 0


# ---- the table ----


def test_memory_becomes_columns_only_where_there_is_some():
    mine = Trace()
    mine.add(span("update", before={"weights": 7, "allocated": 9, "residual": 2}))
    mine.add(span("score"))
    frame = mine.frame()
    assert frame["before/weights_bytes"].tolist() == [7, pd.NA]
    assert [c for c in frame if "/" in c] == [
        "before/weights_bytes",
        "before/residual_bytes",
        "before/allocated_bytes",
    ]


# ---- idle fractions ----


def spans_frame(*rows) -> pd.DataFrame:
    """(worker, stage, start_s, end_s) each."""
    return pd.DataFrame(rows, columns=["worker", "stage", "start_s", "end_s"])


def idle_of(frame, worker):
    table = idle_fractions(frame).set_index("worker")
    return table.loc[worker, "idle_fraction"]


def test_idle_is_the_share_of_the_whole_window_that_no_span_covers():
    frame = spans_frame(("a", "generate", 0, 4), ("b", "update", 4, 10))
    assert idle_of(frame, "a") == pytest.approx(0.6)
    assert idle_of(frame, "b") == pytest.approx(0.4)


def test_overlapping_spans_of_a_worker_count_once():
    frame = spans_frame(
        ("a", "update", 0, 6), ("a", "store/put", 1, 3), ("a", "save", 5, 8), ("b", "x", 0, 10)
    )
    assert idle_of(frame, "a") == pytest.approx(0.2)


def test_waiting_is_idling_even_inside_a_stage():
    frame = spans_frame(
        ("a", "update", 0, 10),
        ("a", "wait/sum", 2, 5),
        ("a", "wait/sum", 4, 6),
        ("d", "wait/x", 0, 9),
    )
    table = idle_fractions(frame).set_index("worker")
    assert table.loc["a"].tolist() == pytest.approx([6, 4, 10, 0.4])
    assert table.loc["d"].tolist() == pytest.approx([0, 9, 10, 1.0])


def test_a_lane_with_one_span_that_fills_the_window_is_never_idle():
    assert idle_of(spans_frame(("a", "update", 3, 5)), "a") == 0.0


def test_a_span_of_no_length_is_no_work():
    frame = spans_frame(("a", "update", 1, 1), ("b", "update", 0, 2))
    assert idle_of(frame, "a") == 1.0


def test_a_window_of_no_length_has_no_idle_fraction():
    assert np.isnan(idle_of(spans_frame(("a", "update", 1, 1)), "a"))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.booleans()), min_size=1))
def test_busy_waiting_and_idle_agree_with_counting_seconds(pieces):
    """Whole seconds, marked one by one."""
    rows = [("a", "wait/x" if w else "x", s, s + n) for s, n, w in pieces]
    window = range(min(r[2] for r in rows), max(r[3] for r in rows))
    waits = {t for _, stage, s, e in rows if stage == "wait/x" for t in range(s, e)}
    covered = {t for _, _, s, e in rows for t in range(s, e)}
    found = idle_fractions(spans_frame(*rows)).iloc[0]
    assert found["waiting_s"] == len(waits)
    assert found["busy_s"] == len(covered - waits)
    if window:
        assert found["idle_fraction"] == pytest.approx(1 - len(covered - waits) / len(window))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_merged_intervals_are_disjoint_and_cover_the_same(pieces):
    found = merged([(start, start + n) for start, n in pieces])
    assert (found[1:, 0] > found[:-1, 1]).all()
    covered = {t for s, n in pieces for t in range(s, s + n)}
    assert covered == {t for s, e in found.tolist() for t in range(int(s), int(e))}


def test_gaps_up_to_a_length_are_closed():
    assert merged([(0, 1), (1.5, 2), (3, 4)], gap_s=0.5).tolist() == [[0, 2], [3, 4]]


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (None, TypeError, "got NoneType, need a DataFrame"),
        ([span()], TypeError, "got list, need a DataFrame"),
        (pd.DataFrame({"step": [1]}), ValueError, "got columns step, need stage, worker"),
        (spans_frame(), ValueError, "got no spans, need at least one"),
        (spans_frame(("a", "x", 2, 1)), ValueError, "got 'x' of a from 2 s to 1 s"),
        (spans_frame(("a", "x", 0, float("nan"))), ValueError, "need finite times"),
    ],
)
def test_what_is_no_frame_of_spans_is_refused(frame, error, message):
    with pytest.raises(error, match=message):
        idle_fractions(frame)


def test_inside_is_in_one_other_span_not_in_several_together():
    times = [(0, 10), (2, 5), (8, 12), (2, 5), (11, 12), (12, 12.5)]
    assert is_inside(times) == [False, True, False, True, True, False]


# ---- Chrome's format ----


def by_phase(found):
    """Events by ph."""
    return {ph: [e for e in found if e["ph"] == ph] for ph in "MXC"}


def test_a_file_for_perfetto_holds_events_of_the_documented_shape(tmp_path, recorded):
    with trace.stage_span("update", Worker(), worker="actor/0", node="n1") as opened:
        opened.rows, opened.tokens = 4, 90
        with trace.wait("sum"):
            pass
    with trace.span("store/put", bytes=64):
        pass
    path = recorded.to_chrome(tmp_path / "deep" / "run.json")
    found = json.loads(path.read_text())["traceEvents"]
    for event in found:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        assert event["ph"] in "MXC"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    update = next(e for e in found if e["name"] == "update")
    assert (update["args"]["rows"], update["args"]["tokens"]) == (4, 90)
    assert update["args"]["version"] == 3
    assert next(e for e in found if e["name"] == "store/put")["args"]["bytes"] == 64


def test_a_node_is_a_process_and_a_worker_a_thread():
    found = by_phase(
        events(
            [
                span("a", worker="actor/0", node="n1"),
                span("b", worker="actor/1", node="n2"),
                span("c", worker="rollout/0", node="n1"),
            ]
        )
    )
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in found["M"]}
    assert list(names.values()).count("node n1") == 1
    pids = {e["name"]: e["pid"] for e in found["X"]}
    assert pids["a"] == pids["c"] != pids["b"]
    threads = {e["name"]: names["thread_name", e["pid"], e["tid"]] for e in found["X"]}
    assert threads == {"a": "actor/0", "b": "actor/1", "c": "rollout/0"}


def test_slices_are_microseconds_from_the_first_start_and_stay_in_their_parents():
    day = 1_790_000_000.0
    outer, inner = span("update", day, day + 0.3), span("wait/sum", day + 0.1, day + 0.3)
    first, second = by_phase(events([outer, inner]))["X"]
    assert (first["ts"], first["dur"]) == (0, pytest.approx(300_000, abs=1))
    assert second["ts"] == pytest.approx(100_000, abs=1)
    assert second["ts"] + second["dur"] <= first["ts"] + first["dur"]
    assert (first["cat"], second["cat"]) == ("update", "wait")


def test_spans_that_overlap_without_nesting_get_a_second_thread():
    found = by_phase(events([span("a", 0, 2), span("b", 1, 3), span("c", 1, 2)]))
    tids = {e["name"]: e["tid"] for e in found["X"]}
    assert tids["a"] == tids["c"] != tids["b"]
    names = [e["args"]["name"] for e in found["M"]]
    assert names == ["node local", "driver", "driver (2)"]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=25))
def test_intervals_on_a_track_lie_apart_or_in_one_another(pieces):
    times = [(start, start + n) for start, n in pieces]
    tracks = nested_tracks(times)
    assert sorted(i for track in tracks for i in track) == list(range(len(times)))
    for track in tracks:
        for n, i in enumerate(track):
            for j in track[:n]:
                (a, b), (c, d) = times[i], times[j]
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_memory_is_a_counter_without_its_total():
    memory = {"weights": 7, "allocated": 9, "residual": 2}
    (counter,) = by_phase(events([span(worker="actor/0", after=memory)]))["C"]
    assert counter["name"] == "memory of actor/0 [B]"
    assert counter["args"] == {"weights": 7, "residual": 2}
    assert counter["ts"] == 1e6


def test_an_empty_trace_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="got no spans, need at least one"):
        Trace().to_chrome(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_the_module_speaks_of_the_processes_trace(tmp_path, recorded):
    recorded.add(span("generate"))
    assert trace.frame()["stage"].tolist() == ["generate"]
    assert trace.to_chrome(tmp_path / "x.json").exists()
