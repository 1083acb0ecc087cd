"""The examples in examples/silent/: right is right, and wrong is far off. docs/silent_mistakes.md
shows their lines."""

import re

import pytest
from conftest import ROOT, succeed

WEIGHS = "labels weigh unequally"
EXAMPLES = {  # file: {mistake as it is printed: in words, and what it does}
    "averaged_twice": {"": ("gradients averaged twice", "steps are too short")},
    "batchnorm_statistics": {
        "": ("BatchNorm statistics of rank 0 alone", "evaluation knows 1/N of the samples")
    },
    "buffers_not_saved": {
        "": ("buffers missing from the checkpoint", "evaluation uses initial statistics")
    },
    "clip_shards": {"": ("clipped by the norm of local shards", "each rank clips differently")},
    "learning_rate": {
        "not scaled": ("global batch grows, learning rate does not", "fewer steps, none longer"),
        "scaled twice": ("learning rate scaled twice", "steps are too long"),
    },
    "no_sync": {"": ("`no_sync` left on", "each rank trains its own model")},
    "optimizer_before_sharding": {
        "": ("optimizer made before `fully_shard`", "the model never learns")
    },
    "repeated_samples": {"": ("evaluation counts repeated samples", "loss and accuracy are off")},
    "same_dropout": {"": ("identical dropout on every rank", "gradients are noisier")},
    "scaler_not_restored": {"": ("GradScaler not restored", "steps are skipped after resuming")},
    "schedule_per_rank": {
        "stepped per rank": ("schedule stepped once per rank", "the learning rate falls too fast"),
        "counted for all ranks": (
            "schedule counts every rank's steps",
            "the learning rate stays too high",
        ),
    },
    "set_epoch": {"": ("`set_epoch` forgotten", "the same order in every epoch")},
    "tied_before_sharding": {"": ("weights tied before sharding", "they drift apart")},
    "token_weights": {
        "over ranks": ("token loss averaged per rank", WEIGHS),
        "over parts": ("token loss averaged per micro-batch", WEIGHS),
        "over both": ("token loss averaged per rank and micro-batch", WEIGHS),
    },
    "unscale_after_clip": {"": ("clipped before `unscale_`", "the model hardly learns")},
}
LINE = re.compile(r"^(right|wrong) ?(.*): (.+) off by (\S+)$", re.MULTILINE)
# Drawn noise, and a mean of variances, which lacks that of the means. Others: rounding.
INEXACT = {"same_dropout": 0.05, "batchnorm_statistics": 1e-3}


@pytest.mark.parametrize("name", EXAMPLES)
def test_right_and_wrong(name, measured):
    finished = succeed(f"python examples/silent/{name}.py", forked=True)
    (kind, _, of, right), *wrongs = LINE.findall(finished.stdout)
    assert kind == "right" and float(right) < INEXACT.get(name, 1e-11)
    assert [mistake for _, mistake, _, _ in wrongs] == list(EXAMPLES[name])
    for _, mistake, _, wrong in wrongs:
        words, effect = EXAMPLES[name][mistake]
        row = {"script": f"examples/silent/{name}", "mistake": words, "effect": effect, "of": of}
        measured("silent_examples", **row, right=float(right), value=float(wrong))
        assert float(wrong) > 0.01


def test_the_page_shows_their_lines():
    """Each code block names its file, and every line of it stands there; no example is left out."""
    page = (ROOT / "docs/silent_mistakes.md").read_text()
    blocks = re.findall(r"^```python\n# examples/silent/(\w+)\.py\n(.*?)^```", page, re.M | re.S)
    assert sorted(name for name, _ in blocks) == sorted(EXAMPLES)
    assert {p.stem for p in (ROOT / "examples/silent").glob("*.py")} == {*EXAMPLES, "two_ranks"}
    for name, block in blocks:
        lines = {line.strip() for line in (ROOT / f"examples/silent/{name}.py").open()}
        assert {line.strip() for line in block.splitlines()} - {""} <= lines, name
