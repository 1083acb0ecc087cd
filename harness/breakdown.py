"""Where the steps of a run went: for each rank and phase, which rank is late, and in a line."""

import statistics

import numpy as np

from harness.clock import WARMUP_STEPS, StepClock
from harness.phases import PHASES
from harness.ranks import gather_objects

LATE = 0.1  # of a step: a rank that is later than this, in three of four steps, is a straggler


def break_down(clock: StepClock) -> dict:
    """What ``result.json`` says, in milliseconds. All ranks call it."""
    ranks = gather_objects((own_steps(clock), clock.look.found if clock.look else None))
    traces = [trace for _, trace in ranks]
    found = {"steps": len(ranks[0][0]), "ranks": [], "straggler": None, "overlap": None}
    if not found["steps"]:
        return found | {"collectives": None}
    for steps, trace in ranks:
        kinds = [kind for kind in PHASES if any(kind in seconds for _, seconds, _ in steps)]
        phases = {kind: spread([seconds[kind] for _, seconds, _ in steps]) for kind in kinds}
        waits = [waited for _, _, waited in steps]
        waiting, waiting_in = spread([sum(w.values()) for w in waits]), None
        if clock.on_gpu:
            waiting = {"p50": trace["exposed_ms"], "p95": None} if trace else None
        else:
            waiting_in = {kind: spread([w[kind] for w in waits])["p50"] for kind in kinds[1:]}
        found["ranks"].append({**phases, "waiting": waiting, "waiting_in": waiting_in})
    if not clock.on_gpu:
        found["straggler"] = find_straggler([steps for steps, _ in ranks])
    if all(traces):
        hidden, exposed = (sum(t[k] for t in traces) for k in ("overlapped_ms", "exposed_ms"))
        found["overlap"] = hidden / (hidden + exposed) if hidden + exposed else None
    return found | {"collectives": traces[0] and traces[0]["collectives"]}


def own_steps(clock: StepClock) -> list[tuple]:
    """The settled ones of this process, of those that are kept: see :meth:`StepClock.settled`."""
    warmup = min(WARMUP_STEPS, len(clock.seconds) // 2)
    return [step for step in clock.phases.steps if step[0] > warmup]


def spread(seconds: list[float]) -> dict[str, float]:
    return {f"p{p}": round(1e3 * float(np.percentile(seconds, p)), 3) for p in (50, 95)}


def find_straggler(ranks: list[list[tuple]]) -> dict | None:
    """The rank whose own work, all but waiting, takes the longest: others wait for it. ``None`` if
    it is not later than the others in three of four steps, by some share of a step."""
    own = [[sum(seconds.values()) for _, seconds, _ in steps] for steps in ranks]
    if len(own) < 2 or len(set(map(len, own))) > 1:
        return None
    slowest = max(range(len(own)), key=lambda rank: statistics.median(own[rank]))
    others = map(statistics.median, zip(*own[:slowest], *own[slowest + 1 :], strict=True))
    late = [mine - theirs for mine, theirs in zip(own[slowest], others, strict=True)]
    if np.percentile(late, 25) <= 0 or statistics.median(late) < LATE * statistics.median(
        own[slowest]
    ):
        return None
    return {"rank": slowest, "late_ms": spread(late)["p50"]}


def in_a_line(result: dict) -> str:
    """What is said when a run ends: shares of the ranks' mean, and who is late."""
    found, shares = result["breakdown"], {}
    for rank in found["ranks"]:
        for kind in (*PHASES[:4], "waiting", *PHASES[4:]):
            if rank.get(kind):
                shares[kind] = shares.get(kind, 0.0) + rank[kind]["p50"]
    whole = sum(shares.values()) or 1.0
    words = [f"{kind} {share / whole:.0%}" for kind, share in shares.items()]
    line = f"step: {result['step_ms']['p50']:,.0f} ms, {', '.join(words)}".replace("%", " %")
    if found["straggler"]:
        others = "the other" if len(found["ranks"]) == 2 else "the others"
        late = found["straggler"]
        line += f"; rank {late['rank']} is {late['late_ms']:,.0f} ms slower than {others}"
    if found["overlap"] is not None:
        line += f"; {found['overlap']:.0%} of communication under compute".replace("%", " %")
    return line
