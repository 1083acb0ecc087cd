"""Which replicas of pytorch_fault_tolerance.py are alive: they agree on it through a store."""

import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.cli import fail


class Rounds:
    """Which replicas are alive, in rounds. A round is the time between two changes of its members;
    each has its own groups, because a group with a dead member is useless.

    Args:
        args: with ``replicas``, ``patience`` and ``timeout``.
        device: of the model.
        store: that all replicas use; ``None`` if there is one replica.
    """

    def __init__(self, args: Any, device: torch.device, store: dist.Store | None):
        self.args = args
        self.device = device
        self.ranks = dist.get_world_size()  # of a replica
        self.rank = dist.get_rank()
        self.round = 0
        self.members = []  # numbers of replicas; a replica that starts again has a new one
        self.changed = False  # since the batch was divided
        self.step = 0  # of the weights
        self.group = None
        self.me = 0
        # Less than patience: a rank that waits for a dead one must be back when others count
        self.limit = timedelta(seconds=args.patience / 2)
        if store is None:
            return
        store.set_timeout(self.limit)
        self.store = dist.PrefixStore("replicas", store)
        number = torch.tensor(self.store.add("started", 1) if self.rank == 0 else 0, device=device)
        dist.broadcast(number, src=0)
        self.me = number.item()

    def agree(self, key: str, proposal: str) -> str:
        """The first value that anyone proposes for a key."""
        return self.store.compare_set(key, "", proposal).decode()

    def register(self, number: int) -> None:
        """Say that this rank wants to be in a round; the last of a replica's ranks adds it to the
        list, so a replica that has lost a rank is in no list."""
        self.store.set(f"{number}/step of {self.me}", str(self.step))
        if self.store.add(f"{number}/ranks of {self.me}", 1) == self.ranks:
            self.store.append(f"{number}/joined", f"{self.me} ")

    def joined(self, number: int) -> set[int]:
        key = f"{number}/joined"
        return set(map(int, self.store.get(key).split())) if self.store.check([key]) else set()

    def next_round_or_exit(self, newcomers: bool) -> None:
        """Agree on the members of the next round, or end the process if this replica is none. The
        old ones wait for each other, up to --patience; ``newcomers``: whether others are let in."""
        self.leave_group()
        if self.round == 0 and self.store.check(["round"]):
            self.round = int(self.store.get("round"))
        while True:
            number = self.round + 1
            first = number == 1
            self.register(number)
            end = time.monotonic() + (self.args.patience if self.members else self.args.timeout)
            while not self.store.check([f"{number}/members"]):
                found = self.joined(number)
                late = time.monotonic() > end
                whole = found.issuperset(self.members)
                if first:
                    whole = len(found) >= self.args.replicas
                if self.me in found and (self.members or first) and (whole or late):
                    if not newcomers:
                        found &= set(self.members)
                    chosen = sorted(found)[: self.args.replicas]  # old ones have lower numbers
                    self.agree(f"{number}/members", " ".join(map(str, chosen)))
                elif not self.members and self.store.check(["finished"]):
                    if self.rank == 0:
                        print("the other replicas have finished, and have saved the weights")
                    raise SystemExit(0)  # with another code, torchrun would start it again
                elif late:
                    time.sleep(self.args.patience)  # others may be about to decide
                    if not self.store.check([f"{number}/members"]):
                        again = "start the store and all replicas again, with --resume auto"
                        fail(f"no replica lets this one in; {again}", code=3)
                time.sleep(0.02)
            members = list(map(int, self.store.get(f"{number}/members").split()))
            self.round = number
            if self.me in members:
                break
            if self.members:
                late = f"this replica was more than --patience {self.args.patience} s late"
                fail(f"{late}, and the others continue; start it again", code=3)
        self.members = members
        self.changed = True
        self.calls = 0
        self.store.set("round", str(number))

    def steps(self) -> list[int]:
        """How many steps each member has done."""
        return [int(self.store.get(f"{self.round}/step of {m}")) for m in self.members]

    def end(self) -> None:
        """Let nobody in any more, because training is over."""
        if self.members:
            self.store.set("finished", "")

    def leave_group(self) -> None:
        """Close the connections: a rank that still waits for this one gets an error."""
        self.group = None

    def make_group(self) -> None:
        """Connect to this rank's counterparts. Unlike ``dist.new_group``, the class needs no group
        of all ranks, some of which are dead. Of gloo, whose waiting calls fail if a peer dies."""
        store = dist.PrefixStore(f"{self.round}/group {self.rank}", self.store)
        mine = self.members.index(self.me)
        self.group = dist.ProcessGroupGloo(store, mine, len(self.members), self.limit)


def serve(port: int) -> None:
    """Keep the store until somebody ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"the store listens on port {store.port}; Ctrl-C ends it", flush=True)
    signal.pause()


def connect(address: str | None) -> dist.Store | None:
    """The store that ``--serve`` hosts at HOST:PORT, for all replicas."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 2**16):
        fail(f"--store {address} is no address; use HOST:PORT, as of --serve PORT")
    host = host.strip("[]")  # around an IPv6 address, which the class takes without them
    try:
        return dist.TCPStore(host, int(port), timeout=timedelta(seconds=60))
    except RuntimeError as error:
        no = f"--store {address} does not answer ({error})"
        fail(f"{no}; start it with --serve {port}")


def is_here(store: str) -> bool:
    """Whether an address HOST:PORT is on loopback, so that all replicas are on this machine."""
    return store.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")
