"""Sizes, stages and rank order of a layout; bad ones are errors at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config import Layout, from_dict, to_dict

R1 = Layout(tp=4, pp=8, ep=32, expert_tp=1, stages=(7, 7, 8, 8, 8, 8, 8, 7))


def test_dp_follows_from_the_devices():
    assert Layout(tp=4, pp=4).on(32).dp == 2


def test_a_layout_without_dp_takes_the_fewest_devices_it_fits_on():
    assert Layout(tp=2, pp=3).num_devices == 6
    assert R1.num_devices == 256  # 8 stages of 32 experts' places


def test_ranks_by_hand_in_megatrons_order():
    place = Layout(tp=2, cp=2, dp=2, pp=2).coordinates()
    assert place["tp"][:4].tolist() == [0, 1, 0, 1]
    assert place["cp"][:4].tolist() == [0, 0, 1, 1]
    assert place["dp"][:8].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert place["pp"].tolist() == [0] * 8 + [1] * 8


def test_another_rank_order():
    place = Layout(tp=2, dp=2, rank_order="dp-tp-cp-ep-pp").coordinates()
    assert place["dp"].tolist() == [0, 1, 0, 1]
    assert place["tp"].tolist() == [0, 0, 1, 1]


def test_with_expert_tp_1_neighbours_in_a_tensor_parallel_group_have_other_experts():
    place = Layout(tp=2, ep=4, expert_tp=1, dp=2).coordinates()
    assert place["tp"].tolist() == [0, 1, 0, 1]
    assert place["ep"].tolist() == [0, 1, 2, 3]
    assert place["expert_tp"].tolist() == [0, 0, 0, 0]


@given(*[st.integers(1, 4)] * 4, st.permutations(["tp", "cp", "ep", "dp"]))
def test_every_rank_has_a_place_of_its_own(tp, cp, dp, pp, order):
    place = Layout(tp=tp, cp=cp, dp=dp, pp=pp, rank_order="-".join([*order, "pp"])).coordinates()
    rows = np.stack([place[name] for name in ("tp", "cp", "dp", "pp")])
    assert np.unique(rows, axis=1).shape[1] == tp * cp * dp * pp


def test_virtual_stages_are_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"need pp=2 .*Virtual stages.*wrong gradients"):
        Layout(pp=2, stages=(1, 1, 1, 1))


def test_stages_are_as_even_as_can_be_unless_they_are_given():
    assert Layout(pp=4).layers_of_stages(61) == (16, 15, 15, 15)
    assert R1.layers_of_stages(61) == R1.stages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(tp=0), r"Layout\.tp: got 0, need an integer of at least 1"),
        (lambda: Layout(dp=True), r"Layout\.dp: got True, .*Leave it out"),
        (lambda: Layout(ep=2.0), r"Layout\.ep: got 2\.0"),
        (lambda: Layout(pp=2, stages=(3,)), r"stages: got \(3,\), need pp=2 counts"),
        (lambda: Layout(pp=2, stages=(4, 0)), r"stages: got \(4, 0\)"),
        (lambda: Layout(pp=2, stages=[4, 4]), r"stages: got \[4, 4\], .* in a tuple"),
        (lambda: Layout(pp=2, stages=(1.5, 1.5)), r"stages: got \(1\.5, 1\.5\)"),
        (lambda: Layout(pp=2, stages="44"), "stages: got '44'"),
        (lambda: Layout(rank_order=None), "rank_order: got None"),
        (lambda: Layout(rank_order="tp-pp"), r"rank_order: got 'tp-pp', need tp, cp, ep, dp and"),
        (lambda: Layout(tp=2, dp=2, ep=8), r"got tp=2 x cp=1 x dp=2 = 4 .* expert_tp=2 x ep=8"),
        (lambda: Layout(tp=4, pp=4).on(24), "got 24 devices, need a multiple of 16"),
        (lambda: Layout(tp=4, dp=2).on(16), "got dp=2, which takes 8 devices, on 16"),
        (lambda: Layout(pp=8).layers_of_stages(4), "got 8 stages for 4 layers"),
        (lambda: R1.layers_of_stages(60), "61 layers in all, need 60"),
        (
            lambda: Layout(
                tp=4, pp=2, ep=4, expert_tp=1, rank_order="tp-pp-cp-ep-dp"
            ).coordinates(),
            "experts lie on other pipeline stages",
        ),
    ],
)
def test_a_bad_layout_is_an_error_that_says_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layout_comes_back_from_plain_values():
    assert from_dict(Layout, to_dict(R1)) == R1


def test_a_layout_draws_a_few_ranks():
    text = R1._repr_html_()
    assert "TP4 PP8 EP32 expert-TP1, 256 devices" in text
    assert text.count("<tr>") == 11
