"""Derives from the records of all ranks which collective did not complete, in three lines."""

from collections import defaultdict

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
SAME_SIZE = ("all_reduce", "broadcast", "all_gather_base", "reduce_scatter_base")  # on all ranks


def describe(kind: str, sizes, dtype) -> str:
    shapes = " and ".join(str(list(size)) for size in sizes)
    return f"{kind} of {DTYPES.get(dtype, str(dtype).removeprefix('torch.'))} {shapes}"


def names(ranks) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def diagnose(answers: dict[int, dict | str]) -> list[str]:
    """Name the collective that did not complete, the ranks that called it and those that did not,
    from every rank's answer: that of :func:`hangs.recorder.account_of`, or why there is none."""
    accounts = {rank: found for rank, found in answers.items() if isinstance(found, dict)}
    groups = {name: ranks for a in accounts.values() for name, ranks in a["groups"].items()}
    smaller = {name: ranks for name, ranks in groups.items() if len(ranks) < len(answers)}
    of_group = {name: f" of the group of {names(ranks)}" for name, ranks in smaller.items()}
    calls = [(rank, call) for rank, account in accounts.items() for call in account["calls"]]
    table = defaultdict(dict)  # by group and number: each rank's call, the earliest first
    for rank, call in sorted(calls, key=lambda row: row[1]["time"]):
        if not call["alone"]:
            table[call["group"], call["number"]][rank] = call
    idle = [rank for rank, found in answers.items() if not (rank in accounts and found["waits"])]
    return (
        find_difference(table, of_group)
        or find_message(accounts, answers)
        or find_absence(table, groups, of_group, accounts, answers)
        or [f"waiting for {names(idle)}" if idle else "ranks wait for each other", *places(answers)]
    )


def find_difference(table: dict, of_group: dict) -> list[str]:
    """The first collective that differs between ranks."""
    for (group, number), calls in table.items():
        kinds = defaultdict(list)
        for rank, call in sorted(calls.items()):
            kind = call["what"] if call["kind"] in SAME_SIZE else call["kind"]
            kinds[kind].append(rank)
        if len(kinds) > 1:
            of = {names(ranks): calls[ranks[0]] for ranks in kinds.values()}
            said = ", ".join(f"{call['what']} on {ranks}" for ranks, call in of.items())
            lines = [f"{ranks}: {call['place']}" for ranks, call in of.items()]
            return [f"collective {number}{of_group.get(group, '')} differs: {said}", *lines]
    return []


def find_message(accounts: dict, answers: dict) -> list[str]:
    """A send or receive between two ranks that does not complete."""
    for rank, account in sorted(accounts.items()):
        message = account["message"]
        if message and message["peer"] is not None:
            peer = accounts.get(message["peer"])
            if not (peer and (peer["message"] or peer["waits"])):
                return [f"rank {rank} waits for a message: {message['what']}", *places(answers)]
    return []


def find_absence(table, groups, of_group, accounts, answers) -> list[str]:
    """A collective that some ranks of its group have not called. If there are several, one whose
    missing ranks do not wait themselves."""
    found = []
    waiting = {rank for rank, account in accounts.items() if account["waits"]}
    for name, ranks in groups.items():
        calls_of = {number: calls for (group, number), calls in table.items() if group == name}
        last = {rank: 0 for rank in ranks if rank in accounts}
        last |= {rank: number for number in sorted(calls_of) for rank in calls_of[number]}
        top = max(calls_of, default=0)
        absent = {rank for rank in ranks if last.get(rank, -1) < top}
        if top and absent:
            behind = [last[rank] + 1 for rank in absent if rank in last]
            open_ = []
            for number, calls in calls_of.items():
                if any(call["open"] for call in calls.values()):
                    open_.append(number)
            certain = behind or open_  # else it may have ended after this collective
            number = min(certain, default=top)
            call = next(iter((calls_of.get(number) or calls_of[top]).values()))
            rating = -len(absent - waiting), not certain, call["time"]
            found.append((rating, name, number, absent, call["what"]))
    if not found:
        return []
    _, name, number, absent, what = min(found, key=lambda row: row[0])
    there = {rank: answers[rank] for rank in groups[name] if rank not in absent}
    missing = {rank: answers[rank] for rank in answers if rank in absent}
    first = f"{names(absent)} did not join collective {number}, {what}{of_group.get(name, '')}"
    return [first, *places(there), *places(missing)]


def places(answers: dict) -> list[str]:
    """One line per source line, with the ranks that are there; then those that do not answer."""
    at = defaultdict(list)
    silent = []
    for rank, found in answers.items():
        if isinstance(found, str):
            silent.append(f"rank {rank}: {found}")
        else:
            note = " (stopped by a signal)" if found["stopped"] else ""
            at[found["place"], note, found["waits"]].append(rank)
    lines = []
    for (place, note, waiting), ranks in at.items():
        singular, plural = ("waits", "wait") if waiting else ("is", "are")
        verb = singular if len(ranks) == 1 else plural
        lines.append(f"{names(ranks)}{note} {verb} at {place}")
    return lines + silent
