"""Where the step time goes: by rank and phase, the straggler, and a one-line summary."""

import numpy as np

from harness.clock import StepClock
from harness.phases import PHASES
from harness.world import gather_objects

LATE = 0.1  # of a step: a rank this much later, in three of four steps, is a straggler


def break_down(clock: StepClock) -> dict:
    """The breakdown for ``result.json``, in milliseconds. All ranks call it."""
    trace = clock.look.found if clock.look else None
    everyone = gather_objects((own_steps(clock), trace))
    traces, hidden = [trace for _, trace in everyone], None
    if all(traces):
        under, besides = (sum(t[key] for t in traces) for key in ("overlapped_ms", "exposed_ms"))
        hidden = under / (under + besides) if under + besides else None
    ranks = [describe_rank(steps, trace, clock.on_gpu) for steps, trace in everyone if steps]
    straggler = None if clock.on_gpu else find_straggler([steps for steps, _ in everyone])
    return {
        "steps": len(everyone[0][0]),
        "ranks": ranks,
        "straggler": straggler,
        "overlap": hidden,
        "collectives": traces[0] and traces[0]["collectives"],
    }


def describe_rank(steps: list[tuple], trace: dict | None, on_gpu: bool) -> dict:
    """The phases of a rank. On a GPU they include waiting; only a trace shows how much of it."""
    kinds = [kind for kind in PHASES if any(kind in seconds for _, seconds, _ in steps)]
    phases = {kind: spread([seconds[kind] for _, seconds, _ in steps]) for kind in kinds}
    if on_gpu:
        exposed = trace and trace["exposed_ms"]
        waiting = trace and {"p50": exposed, "p95": None, "mean": exposed}
        return phases | {"waiting": waiting, "waiting_in": None}
    waits = [waited for _, _, waited in steps]
    waiting_in = {kind: spread([w[kind] for w in waits])["p50"] for kind in kinds[1:]}
    waiting = spread([sum(waited.values()) for waited in waits])
    return phases | {"waiting": waiting, "waiting_in": waiting_in}


def own_steps(clock: StepClock) -> list[tuple]:
    """The recorded steps of this process after the warm-up: see :meth:`StepClock.settled`."""
    return [step for step in clock.phases.steps if step[0] > clock.warmup]


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean and median, in milliseconds. Rare events show in the mean, not in the median."""
    found = {f"p{p}": np.percentile(seconds, p) for p in (50, 95)} | {"mean": np.mean(seconds)}
    return {name: round(1e3 * float(value), 6) for name, value in found.items()}


def differ(a: float, b: float) -> bool:
    return abs(a - b) > 0.1 * b


def find_straggler(ranks: list[list[tuple]]) -> dict | None:
    """The rank for which the other ranks wait: its work, without waiting, takes longest. ``None``
    unless it is later than all others in three of four steps, by :data:`LATE` of a step."""
    own = [[sum(seconds.values()) for _, seconds, _ in steps] for steps in ranks]
    if len(own) < 2 or not own[0] or len(set(map(len, own))) > 1:
        return None
    slowest = int(np.median(own, axis=1).argmax())
    mine, others = own[slowest], np.median(np.delete(own, slowest, axis=0), axis=0)
    late = mine - others
    if np.percentile(late, 25) <= 0 or np.median(late) < LATE * np.median(mine):
        return None
    return {"rank": slowest, "late_ms": spread(late)["p50"]}


def describe_step(result: dict) -> str:
    """The line at the end of a run: mean step time, share of each phase, and a straggler."""
    found, shares = result["breakdown"], {}
    for rank in found["ranks"]:
        for kind in (*PHASES[:4], "waiting", *PHASES[4:]):
            if rank.get(kind) and (kind != "waiting" or rank["waiting_in"]):
                shares[kind] = shares.get(kind, 0.0) + rank[kind]["mean"]
    whole, took = sum(shares.values()) or 1.0, result["step_ms"]
    more = {"mean {:,.0f} ms": took["mean"], "95% within {:,.0f} ms": took["p95"]}
    more = [text.format(ms) for text, ms in more.items() if differ(ms, took["p50"])]
    words = [f"step: {took['p50']:,.0f} ms" + (f" ({', '.join(more)})" if more else "")]
    words += [f"{kind} {share / whole:.0%}" for kind, share in shares.items()]
    line = ", ".join(words)
    if found["straggler"]:
        others = "the other" if len(found["ranks"]) == 2 else "the others"
        late = found["straggler"]
        line += f"; rank {late['rank']} is {late['late_ms']:,.0f} ms slower than {others}"
    if found["overlap"] is not None:
        line += f"; {found['overlap']:.0%} of communication overlaps with compute"
    return line
