import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from rlkit import viz


def comparison(**gradients):
    """What compare_losses returns for two responses of two tokens and one, by objective."""
    rows = []
    for objective, values in gradients.items():
        for (uid, token), gradient in zip([(4, 0), (4, 1), (9, 0)], values, strict=True):
            row = {"objective": objective, "loss": sum(values), "uid": uid, "token": token}
            row |= {"advantage": 1.0, "ratio": 1.0, "gradient": gradient, "clipped": gradient == 0}
            rows.append(row)
    return pd.DataFrame(rows)


FRAME = comparison(PPO=[-3.0, 0.0, 4.0], CISPO=[-1.0, -1.0, -1.0])


def test_summary_has_a_row_an_objective():
    summary = viz.loss_summary(FRAME)
    assert list(summary.index) == ["PPO", "CISPO"]
    assert summary.loc["PPO"].to_dict() == {
        "loss": 1,
        "gradient_norm": 5,
        "gradient_max": 4,
        "clipped_fraction": pytest.approx(1 / 3),
        "num_tokens": 3,
    }


def test_heat_map_shows_the_push_on_each_token_and_masks_what_is_clipped():
    ax = viz.plot_losses(FRAME)
    (image,) = ax.images
    assert image.get_array().tolist() == [[3, None, -4], [1, 1, 1]]
    assert (image.norm.vmin, image.norm.vmax) == (-4, 4)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["PPO", "CISPO"]
    assert ax.get_legend().get_texts()[0].get_text() == "clipped: no gradient"


def test_numbers_stand_beside_the_rows():
    texts = [text.get_text() for text in viz.plot_losses(FRAME).texts]
    assert texts == ["loss", "|gradient|", "clipped", "1", "5", "33%", "−3", "1.73", "0%"]


def test_the_order_of_rows_in_the_frame_does_not_matter():
    mixed = FRAME.iloc[[0, 2, 1, 5, 4, 3]]
    expected, got = (viz.plot_losses(f).images[0].get_array() for f in (FRAME, mixed))
    assert np.array_equal(expected.mask, got.mask)
    assert np.array_equal(expected.filled(0), got.filled(0))


def test_gradients_of_zero_are_drawn():
    frame = comparison(none=[0.0, 0.0, 0.0])
    assert viz.plot_losses(frame.assign(clipped=False)).images[0].norm.vmax == 1


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (None, TypeError, "got NoneType, need a pandas DataFrame"),
        (FRAME.drop(columns="clipped"), ValueError, r"got 6 rows without \['clipped'\]"),
        (FRAME.iloc[:0], ValueError, "got 0 rows without tokens"),
        (FRAME.iloc[:5], ValueError, "tokens by objective, need equally many"),
    ],
)
def test_what_is_no_comparison_is_refused_and_draws_nothing(frame, error, message):
    with pytest.raises(error, match=message):
        viz.plot_losses(frame)
    assert not plt.get_fignums()
