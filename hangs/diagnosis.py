"""Derives from the records of all ranks which collective did not complete, in three lines."""

from collections import defaultdict

DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
SAME_SIZE = ("all_reduce", "broadcast", "all_gather_base", "reduce_scatter_base")  # on all ranks


def describe(kind: str, sizes, dtype) -> str:
    shapes = " and ".join(str(list(size)) for size in sizes)
    return f"{kind} of {DTYPES.get(dtype, str(dtype).removeprefix('torch.'))} {shapes}"


def call_of(entry: dict, place: str) -> dict:
    """The relevant fields of an entry of PyTorch's flight recorder."""
    kind = entry["profiling_name"].partition(":")[2].lstrip("_")
    dtypes = entry.get("input_dtypes") or [""]
    return {
        "group": entry["process_group"][0], "number": entry["collective_seq_id"], "kind": kind,
        "what": describe(kind, entry["input_sizes"], dtypes[0]), "place": place,
        "time": entry["time_created_ns"], "over": entry["retired"], "alone": entry["is_p2p"],
    }  # fmt: skip


def names(ranks) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def diagnose(accounts: dict[int, dict], silent: dict[int, str], world: int) -> list[str]:
    """Name the collective that did not complete, the ranks that called it and those that did not.

    Args:
        accounts: by rank: ``why`` it reported ("" if it was asked), its ``place``, the ``message``
            that it waits for, its ``calls`` and ``groups``.
        silent: by rank: why it did not report.
    """
    table = defaultdict(dict)  # by position: what each rank has called
    for rank, account in accounts.items():
        for call in account["calls"]:
            if not call["alone"]:
                table[call["group"], call["number"]][rank] = call
    groups = {name: ranks for a in accounts.values() for name, ranks in a["groups"].items()}
    return (
        find_difference(table, groups, world)
        or find_message(accounts, silent)
        or find_absence(table, groups, accounts, silent, world)
        or ["ranks wait for each other", *places(accounts, silent)]
    )


def of_group(name: str, groups: dict, world: int) -> str:
    ranks = groups.get(name, range(world))
    return "" if len(ranks) == world else f" of the group of {names(ranks)}"


def find_difference(table: dict, groups: dict, world: int) -> list[str]:
    """The first collective that differs between ranks."""
    for (group, number), calls in sorted(table.items(), key=lambda i: first_time(i[1])):
        kinds = defaultdict(list)
        for rank, call in calls.items():
            kind = call["kind"]
            kinds[call["what"] if kind in SAME_SIZE else kind].append(rank)
        if len(kinds) > 1:
            of = {names(ranks): calls[ranks[0]] for ranks in kinds.values()}
            said = ", ".join(f"{call['what']} on {ranks}" for ranks, call in of.items())
            lines = [f"{ranks}: {call['place']}" for ranks, call in of.items()]
            return [f"collective {number}{of_group(group, groups, world)} differs: {said}", *lines]
    return []


def first_time(calls: dict) -> int:
    return min(call["time"] for call in calls.values())


def find_message(accounts: dict, silent: dict) -> list[str]:
    """A send or receive between two ranks that does not complete."""
    waiting = {rank for rank, a in accounts.items() if a["message"]}
    for rank in sorted(waiting):
        peer = accounts[rank]["message"]["peer"]
        if peer not in waiting and not (peer in accounts and waits(accounts[peer])):
            what = accounts[rank]["message"]["what"]
            return [f"{names([rank])} waits for a message: {what}", *places(accounts, silent)]
    return []


def find_absence(table, groups, accounts, silent, world) -> list[str]:
    """A collective that some ranks of its group have not called. If there are several, one whose
    missing ranks do not wait themselves."""
    found = []
    for name, ranks in groups.items():
        last = {rank: 0 for rank in ranks if rank in accounts}
        for (group, number), calls in table.items():
            if group == name:
                last |= {rank: max(last[rank], number) for rank in calls}
        top = max(last.values(), default=0)
        absent = {rank for rank in ranks if last.get(rank, -1) < top}
        if top and absent:
            behind = [last[rank] for rank in absent if rank in last]
            number = min(behind) + 1 if behind else first_open(table, name, top, accounts)
            idle = sum(rank in silent or not waits(accounts[rank]) for rank in absent)
            calls = table.get((name, number)) or table[name, top]
            found.append((-idle, first_time(calls), name, number, absent, calls))
    if not found:
        return []
    _, _, name, number, absent, calls = min(found, key=lambda row: row[:2])
    what = next(iter(calls.values()))["what"]
    there = {rank: accounts[rank] for rank in groups[name] if rank not in absent}
    missing = {rank: accounts[rank] for rank in absent if rank in accounts}
    gone = {rank: why for rank, why in silent.items() if rank in absent}
    return [
        f"{names(absent)} did not join collective {number}, {what}{of_group(name, groups, world)}",
        *places(there, {}),
        *places(missing, gone),
    ]


def first_open(table: dict, group: str, top: int, accounts: dict) -> int:
    """The first collective in whose call a rank is waiting; else the last one."""
    numbers = [
        number
        for (name, number), calls in table.items()
        for rank, call in calls.items()
        if name == group and stands_in(accounts[rank], call)
    ]
    return min(numbers, default=top)


def waits(account: dict) -> bool:
    if account.get("stopped"):
        return False
    told = account["why"] or account["message"]
    return bool(told) or any(stands_in(account, call) for call in account["calls"])


def stands_in(account: dict, call: dict) -> bool:
    """Whether the rank is still in the line that called this unfinished collective."""
    return not call["over"] and call["place"] == account["place"]


def places(accounts: dict, silent: dict) -> list[str]:
    """One line per source line, with the ranks that are there."""
    at = defaultdict(list)
    for rank, account in accounts.items():
        note = " (stopped by a signal)" if account.get("stopped") else ""
        at[account["place"], note, waits(account)].append(rank)
    lines = []
    for (place, note, waiting), ranks in at.items():
        verb = ("waits" if waiting else "is") if len(ranks) == 1 else "wait" if waiting else "are"
        lines.append(f"{names(ranks)}{note} {verb} at {place}")
    return lines + [f"{names([rank])}: {why}" for rank, why in silent.items()]
