import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from rlkit import viz
from rlkit.trace import Span, Trace
from rlkit.viz.style import PHASE_COLOURS

COLUMNS = ["worker", "stage", "start_s", "end_s"]


def spans(*rows):
    """(worker, stage, start_s, end_s) each; time begins at 1000 s."""
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return frame.assign(start_s=frame["start_s"] + 1000.0, end_s=frame["end_s"] + 1000.0)


STEP = spans(
    ("rollout/0", "generate", 1, 4),
    ("driver", "wait/generate", 0.5, 4),
    ("actor/1", "update", 5, 9),
    ("actor/0", "update", 5, 10),
    ("actor/0", "wait/sum", 8, 9),
    ("actor/0", "store/fetch", 5, 6),
    ("driver", "reshard", 0, 0.5),
)


def lanes(ax):
    """Worker -> its y."""
    return {
        text.get_text(): y for text, y in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)
    }


def bars(ax):
    """(lane's worker, left, right, height, artist) of every bar drawn."""
    names = {y: worker for worker, y in lanes(ax).items()}
    found = []
    for artist in ax.collections:
        for path in artist.get_paths():
            box = path.get_extents()
            middle = (box.y0 + box.y1) / 2
            found.append((names[round(middle, 6)], box.x0, box.x1, box.y1 - box.y0, artist))
    return found


def notes(ax):
    return [text.get_text() for text in ax.texts]


def test_the_driver_is_first_then_groups_by_start_then_ranks_by_number():
    frame = pd.concat([STEP, spans(("actor/10", "update", 5, 6), ("actor/2", "update", 5, 6))])
    assert list(lanes(viz.plot_timeline(frame))) == [
        "driver",
        "rollout/0",
        "actor/0",
        "actor/1",
        "actor/2",
        "actor/10",
    ]


def test_lanes_go_from_top_to_bottom():
    ax = viz.plot_timeline(STEP)
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    assert lanes(ax)["driver"] == 0


def test_time_begins_at_the_first_span():
    ax = viz.plot_timeline(STEP)
    assert ax.get_xlim() == (0, 10)
    assert [(left, right) for worker, left, right, *_ in bars(ax) if worker == "rollout/0"] == [
        pytest.approx((1, 4))
    ]
    assert ax.get_xlabel() == "time since the first span [s], measured"


def test_colour_says_the_stage_in_every_lane():
    ax = viz.plot_timeline(STEP)
    update = {
        worker for worker, *_, artist in bars(ax) if is_colour(artist, PHASE_COLOURS["update"])
    }
    assert update == {"actor/0", "actor/1"}


def is_colour(artist, colour):
    return to_hex(artist.get_facecolor()[0]) == to_hex(colour)


def test_waits_and_only_waits_are_hatched():
    hatched = [
        (w, *edges) for w, *edges, _, artist in bars(viz.plot_timeline(STEP)) if artist.get_hatch()
    ]
    assert sorted(hatched) == [("actor/0", pytest.approx(8), pytest.approx(9)), ("driver", 0.5, 4)]


def test_what_lies_inside_a_span_is_lower_than_it():
    heights = {}
    for worker, left, _, height, _ in bars(viz.plot_timeline(STEP)):
        heights[worker, round(left, 3)] = round(height, 3)
    assert heights["actor/0", 5] == 0.4  # drawn last: the fetch; the update is 0.78
    assert heights["actor/0", 8] == 0.4
    assert heights["driver", 0.5] == 0.78


def test_idle_time_is_written_at_the_lanes_end():
    ax = viz.plot_timeline(STEP)
    places = {text.get_text(): text.xy for text in ax.texts}
    assert notes(ax) == ["idle 95%", "idle 70%", "idle 60%", "idle 60%"]
    assert places["idle 70%"] == (1.0, lanes(ax)["rollout/0"])


def test_a_window_of_no_length_has_no_idle_text():
    ax = viz.plot_timeline(spans(("actor/0", "update", 2, 2)))
    assert notes(ax) == ["–"]
    assert ax.get_xlim() == (0, 1)


def test_a_stage_is_once_in_the_legend_and_parts_of_stages_belong_to_them():
    frame = pd.concat([STEP, spans(("actor/0", "reshard/transfer", 10, 11), ("d", "mine", 0, 1))])
    legend = viz.plot_timeline(frame).get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "generate",
        "update",
        "reshard",
        "mine",
        "store",
        "waiting",
    ]


def test_runs_are_stacked_over_one_time_axis_each_from_its_own_start():
    later = STEP.assign(start_s=STEP["start_s"] + 500, end_s=STEP["end_s"] + 505)
    ax = viz.plot_timeline({"sync": STEP, "async": later})
    assert [n for n in notes(ax) if "idle" not in n] == ["sync", "async"]
    assert len(ax.get_yticks()) == 8
    assert ax.get_xlim() == (0, 15)
    assert len(ax.get_legend().get_texts()) == 5


def test_the_figure_grows_with_the_lanes():
    heights = []
    for num in (2, 30):
        rows = [(f"actor/{i}", "update", 0, 1) for i in range(num)]
        heights.append(viz.plot_timeline(spans(*rows)).figure.get_size_inches()[1])
    assert heights[0] < heights[1] <= 14


def test_axes_of_ones_own_are_drawn_on():
    _, ax = plt.subplots()
    assert viz.plot_timeline(STEP, ax=ax) is ax


def test_thousands_of_spans_become_few_bars():
    rows = [("actor/0", "update", i * 1e-3, i * 1e-3 + 9e-4) for i in range(20_000)]
    assert len(bars(viz.plot_timeline(spans(*rows)))) == 1


def test_a_trace_draws_itself():
    trace = Trace()
    trace.add(Span(stage="update", worker="actor/0", start_s=1.0, end_s=2.0))
    assert list(lanes(trace.timeline())) == ["actor/0"]


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({}, "got a dict without runs"),
        (pd.DataFrame({"step": [1]}), "need stage, worker, start_s, end_s too"),
        (STEP.head(0), "got no spans"),
        ({"a": STEP, "b": STEP.head(0)}, "got no spans"),
    ],
)
def test_what_is_no_frame_of_spans_is_refused_and_draws_nothing(frame, message):
    with pytest.raises(ValueError, match=message):
        viz.plot_timeline(frame)
    assert not plt.get_fignums()


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="source: got 'guessed'"):
        viz.plot_timeline(STEP, source="guessed")
