"""What AReaL's tables were run with: models, layouts, lengths."""

from rlkit.config import Layout, ModelSpec

MODELS = {
    "1.5B": ModelSpec.qwen25_1_5b(),
    "7B": ModelSpec.qwen25_7b(),
    "14B": ModelSpec.qwen25_14b(),
    "32B": ModelSpec.qwen25_32b(),
}
# tp and share of the memory of an engine: AReaL's of its legacy benchmark (tag v0.3.1) and its blog
# (14B), verl's of the scripts with which AReaL's authors ran it (GitHub: nuzant/verl_benchmark).
ENGINE = {
    "areal": {"1.5B": (1, 0.8), "7B": (1, 0.7), "14B": (4, 0.7), "32B": (8, 0.7)},
    "verl": {"1.5B": (1, 0.6), "7B": (1, 0.6), "14B": (2, 0.6), "32B": (8, 0.4)},
}
TRAIN = {
    "1.5B": Layout(pp=2),
    "7B": Layout(pp=4),
    "14B": Layout(pp=8, tp=2),
    "32B": Layout(pp=8, tp=2),
}
SEQUENCE, PROMPT, LIMIT = 9276, 200, 27648  # tokens; the first follows from Fig. 5c and Table 1
MOST_RUNNING = 512  # groups; of the benchmark of Fig. 4
