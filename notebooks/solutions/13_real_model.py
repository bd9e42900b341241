# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Solution of notebook 13: the last number
#
# The look-behind keeps a minus between two digits from being a sign.

# %%
import re

from hypothesis import given, settings
from hypothesis import strategies as st


def last_number(text):
    found = re.findall(r"(?<!\d)-?\d+|\d+", text)
    return int(found[-1]) if found else None


# %% [markdown]
# The check of the notebook.

# %%
def check_last_number(fn):
    words = st.text(st.sampled_from("ab .,=\n"), max_size=6)

    @settings(deadline=None)
    @given(words, st.integers(-99, 99), st.sampled_from(["", ".", " is it", "\n"]))
    def run(text, number, end):
        assert fn(text + " " + str(number) + end) == number
        assert fn(text) is None
        assert fn(f"{abs(number)}-4") == fn(f"{abs(number)} - 4") == 4

    run()
    return "right"


check_last_number(last_number)
