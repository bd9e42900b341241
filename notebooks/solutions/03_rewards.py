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
# # Solutions of notebook 03: the last line, and partial credit
#
# Blank lines are dropped first; of a text without any other line nothing is left, and no line is no answer.

# %%
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st


def last_line(prompt, response, answer):
    lines = [line.strip() for line in response.splitlines()]
    lines = [line for line in lines if line]
    return float(bool(lines) and lines[-1] == answer)


# %% [markdown]
# The check of the notebook.

# %%
@given(above=st.text(), answer=st.from_regex(r"[a-z0-9]{1,4}", fullmatch=True))
def check_last_line(above, answer):
    assert last_line("", above, "no such line") == 0.0
    assert last_line("", f"{above}\n  {answer} \n\n", answer) == 1.0
    assert last_line("", f"{above}\n{answer}\nor not", answer) == 0.0


check_last_line()


# %% [markdown]
# ## Partial credit
#
# Dividing by the longer of the two takes something from every response but the answer.

# %%
def prefix_share(prompt, response, answer):
    if response == answer:
        return 1.0
    pairs = zip(response, answer, strict=False)
    right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return right / max(len(response), len(answer))


# %% [markdown]
# The check of the notebook.

# %%
@given(response=st.text("ab", max_size=6), answer=st.text("ab", max_size=6))
def check_prefix_share(response, answer):
    reward = prefix_share("", response, answer)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (response == answer)
    longer, long = (prefix_share("", answer + "x" + more, answer) for more in (response, ""))
    assert longer <= long < 1.0
    if answer:
        assert prefix_share("", answer[:-1], answer) == (len(answer) - 1) / len(answer)


check_prefix_share()
