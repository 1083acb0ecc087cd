"""What a rank keeps and sends when a GPT is shared out: within 2 % of docs/parallelism.md."""

import pytest
from conftest import cases, flat

LAYERS, WIDTH, CONTEXT, BATCH, TOKENS = 4, 48, 12, 24, 27  # TOKENS: of the vocabulary
JOB = (
    f"--model gpt-{LAYERS}x4x{WIDTH} --context {CONTEXT} --batch-size {BATCH} --max-steps 3 "
    "--dataset synthetic --train-samples 96 --eval-samples 8 --print-freq 100"
)
THROUGH = "tests/count_sent.py"
MATRICES = 4 * LAYERS * 12 * WIDTH**2  # bytes, of the blocks
NORMS = 4 * LAYERS * 4 * WIDTH
FIRST, LAST = 4 * (TOKENS + CONTEXT) * WIDTH, 4 * (TOKENS + 2) * WIDTH  # embeddings; norm, head
WHOLE = MATRICES + NORMS + FIRST + LAST
EXPERT = MATRICES * 8 / 12  # bytes, of one expert in each block
A = 4 * BATCH * CONTEXT * WIDTH  # bytes between two layers


def share(n):
    return (n - 1) / n


def tensor(n, tp=None):
    """Bytes of parameters, and sent in the blocks."""
    return MATRICES / n + WHOLE - MATRICES, 8 * LAYERS * A * share(n)


def sequence(n):
    matrices = MATRICES + FIRST + LAST - 4 * 2 * WIDTH  # all but norms
    _, sent = tensor(n)
    sent += 4 * A * share(n)  # before the first block and after the last
    return matrices / n + WHOLE - matrices, sent


def grid(n, tp=2):
    rows = n // tp
    rest = WHOLE - MATRICES
    # Gathered twice and reduce-scattered; what is in no block stays gathered until backward.
    of_part = (3 * (MATRICES / tp + NORMS) + 2 * (rest - NORMS)) * share(rows)
    return (MATRICES / tp + rest) / rows, tensor(tp)[1] / rows + of_part


def pipeline(n, cuts=1, ends=max):
    """``cuts``: between two ranks."""
    return (MATRICES + NORMS) / n + ends((FIRST, LAST)), 2 * A * cuts * (n - 1) / n


def looped(n):
    return pipeline(n)[0], 2 * A * (2 * n - 1) / n


def in_a_v(n):
    return pipeline(n, cuts=2, ends=sum)


def context(of_layer):
    return lambda n: (WHOLE, 2 * WHOLE * share(n) + LAYERS * A * of_layer(n) * share(n))


def experts(e, k):
    def of(n):
        shared = WHOLE - EXPERT + 4 * LAYERS * e * WIDTH  # and the routers
        sent = 2 * shared * share(n) + 4 * k * LAYERS * A / n * share(n)
        return shared + e * EXPERT / n, sent

    return of


def local(n):
    return WHOLE, 2 * WHOLE * share(n)  # at every step, with H = 1


THEORY = {
    "pytorch_TP": tensor,
    "pytorch_TP --sequence-parallel": sequence,
    "pytorch_FSDP_TP --tp 2": grid,
    "pytorch_PP": pipeline,
    "pytorch_PP --pipeline-schedule interleaved": looped,
    "pytorch_PP --pipeline-schedule zbv": in_a_v,
    "pytorch_CP": context(lambda n: 6),
    "pytorch_CP --attention allgather": context(lambda n: 4),
    "pytorch_CP --attention ulysses": context(lambda n: 8 / n),
    "pytorch_EP --experts 4": experts(4, 1),
    "pytorch_EP --experts 4 --top-k 2": experts(4, 2),
    "pytorch_LocalSGD --sync-every 1": local,
}
RUNS = [(script, n) for script in THEORY for n in (2, 4)]
RUNS.remove(("pytorch_FSDP_TP --tp 2", 2))  # one row
RUNS.remove(("pytorch_TP --sequence-parallel", 4))  # a quarter of 27 characters is 7
RUNS.remove(("pytorch_PP --pipeline-schedule interleaved", 4))  # eight stages, of four blocks
RUNS.remove(("pytorch_PP --pipeline-schedule zbv", 4))


@pytest.mark.parametrize(
    "script, n", cases(RUNS, lambda script, n: n == 2 or script.startswith("pytorch_FSDP"))
)
def test_kept_and_sent(script, n, train, measured):
    state, result = train(script, n)
    parameters, sent = THEORY[script](n)
    numbers = len(flat(state)) - TOKENS  # the vocabulary is no parameter
    kept = {kind: size / numbers for kind, size in result["state_bytes"].items() if size}
    expected = {kind: parameters / numbers for kind in ("parameters", "gradients")}
    expected["optimizer"] = 2 * expected["parameters"]
    counted = sum(result["sent"].values())
    measured(
        "shared", script=script, ranks=n, kept=sum(kept.values()), sent=counted,
        kept_theory=sum(expected.values()), sent_theory=sent, how=list(result["sent"]),
    )  # fmt: skip
    assert kept == pytest.approx(expected, rel=0.02)
    assert counted == pytest.approx(sent, rel=0.02)
