"""Derives from the records of all ranks which collective did not complete, in three lines."""

from collections import defaultdict

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
SAME_SIZE = ("all_reduce", "broadcast", "all_gather_base", "reduce_scatter_base")  # on all ranks


def describe(kind: str, sizes, dtype) -> str:
    shapes = " and ".join(str(list(size)) for size in sizes)
    return f"{kind} of {DTYPES.get(dtype, str(dtype).removeprefix('torch.'))} {shapes}"


def names(ranks) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def diagnose(accounts: dict[int, dict], silent: dict[int, str], size: int) -> list[str]:
    """Name the collective that did not complete, the ranks that called it and those that did not.

    Args:
        accounts: by rank, from :func:`hangs.recorder.account_of`.
        silent: by rank: why it did not report.
        size: number of ranks.
    """
    table = defaultdict(dict)  # by group and number: each rank's call
    groups = {name: ranks for a in accounts.values() for name, ranks in a["groups"].items()}
    of_group = {
        name: "" if len(ranks) == size else f" of the group of {names(ranks)}"
        for name, ranks in groups.items()
    }
    for rank, account in accounts.items():
        for call in account["calls"]:
            if not call["alone"]:
                table[call["group"], call["number"]][rank] = call
    return (
        find_difference(table, of_group)
        or find_message(accounts, silent)
        or find_absence(table, groups, of_group, accounts, silent)
        or ["ranks wait for each other", *places(accounts, silent)]
    )


def find_difference(table: dict, of_group: dict) -> list[str]:
    """The first collective that differs between ranks."""
    for (group, number), calls in sorted(table.items(), key=lambda i: first_time(i[1])):
        kinds = defaultdict(list)
        for rank, call in calls.items():
            kinds[call["what"] if call["kind"] in SAME_SIZE else call["kind"]].append(rank)
        if len(kinds) > 1:
            of = {names(ranks): calls[ranks[0]] for ranks in kinds.values()}
            said = ", ".join(f"{call['what']} on {ranks}" for ranks, call in of.items())
            lines = [f"{ranks}: {call['place']}" for ranks, call in of.items()]
            return [f"collective {number}{of_group.get(group, '')} differs: {said}", *lines]
    return []


def first_time(calls: dict) -> int:
    return min(call["time"] for call in calls.values())


def find_message(accounts: dict, silent: dict) -> list[str]:
    """A send or receive between two ranks that does not complete."""
    for rank, account in sorted(accounts.items()):
        if message := account["message"]:
            peer = accounts.get(message["peer"])
            if not (peer and (peer["message"] or peer["waits"])):
                first = f"{names([rank])} waits for a message: {message['what']}"
                return [first, *places(accounts, silent)]
    return []


def find_absence(table, groups, of_group, accounts, silent) -> list[str]:
    """A collective that some ranks of its group have not called. If there are several, one whose
    missing ranks do not wait themselves."""
    found = []
    for name, ranks in groups.items():
        calls_of = {number: calls for (group, number), calls in table.items() if group == name}
        last = {rank: 0 for rank in ranks if rank in accounts}
        last |= {rank: number for number in sorted(calls_of) for rank in calls_of[number]}
        top = max(last.values(), default=0)
        absent = {rank for rank in ranks if last.get(rank, -1) < top}
        if top and absent:
            behind = [last[rank] + 1 for rank in absent if rank in last]
            open_ = [n for n, calls in calls_of.items() if any(c["open"] for c in calls.values())]
            certain = behind or open_  # else it may have ended after this collective
            number = min(certain, default=top)
            idle = sum(rank in silent or not accounts[rank]["waits"] for rank in absent)
            calls = calls_of.get(number) or calls_of[top]
            rating = -idle, not certain, first_time(calls)
            found.append((rating, name, number, absent, calls))
    if not found:
        return []
    _, name, number, absent, calls = min(found, key=lambda row: row[0])
    what = next(iter(calls.values()))["what"]
    there = {rank: accounts[rank] for rank in groups[name] if rank not in absent}
    missing = {rank: accounts[rank] for rank in absent if rank in accounts}
    gone = {rank: why for rank, why in silent.items() if rank in absent}
    return [
        f"{names(absent)} did not join collective {number}, {what}{of_group[name]}",
        *places(there, {}),
        *places(missing, gone),
    ]


def places(accounts: dict, silent: dict) -> list[str]:
    """One line per source line, with the ranks that are there."""
    at = defaultdict(list)
    for rank, account in accounts.items():
        note = " (stopped by a signal)" if account["stopped"] else ""
        at[account["place"], note, account["waits"]].append(rank)
    lines = []
    for (place, note, waiting), ranks in at.items():
        verb = ("waits" if waiting else "is") if len(ranks) == 1 else "wait" if waiting else "are"
        lines.append(f"{names(ranks)}{note} {verb} at {place}")
    return lines + [f"{names([rank])}: {why}" for rank, why in silent.items()]
