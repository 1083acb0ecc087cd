"""What replicas agree on, without training: ranks are threads, each with its own client of a store.
test_faults.py kills real ones."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from parallel import rounds
from pytorch_fault_tolerance import Replicas

RANKS = 2  # of a replica


@pytest.fixture
def play(monkeypatch):
    """A function that runs a task on ranks of replicas at the same time, and returns its results;
    of one that ends its process, the exit code."""
    # The function prints, and sets a signal, which threads cannot
    monkeypatch.setattr(rounds, "fail", lambda message, code: sys.exit(code))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(task, ranks, patience=3, members=(1, 2), number=1):
        args = SimpleNamespace(patience=patience, timeout=2, replicas=3)

        def one(rank):
            replica, place = rank
            self = Replicas.__new__(Replicas)
            self.args = args
            self.me = replica
            self.rank = place
            self.ranks = RANKS
            self.round = number
            self.members = list(members) if replica in members else []
            self.calls = 1
            self.step = 0
            self.group = None
            client = dist.TCPStore("127.0.0.1", store.port)
            self.store = dist.PrefixStore("replicas", client)
            try:
                return task(self)
            except SystemExit as end:
                return end.code

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    return run


def test_an_address_of_ipv6(monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", lambda host, port, **_: (host, port))
    assert rounds.connect("[::1]:29510") == ("::1", 29510)


ALL = [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("failed", [set(), {(2, 1)}, {(1, 0), (2, 0)}])
def test_all_keep_a_sum_or_none(failed, play):
    found = play(lambda self: self.decide((self.me, self.rank) not in failed), ALL)
    assert found == ["redo" if failed else "keep"] * len(ALL)


def test_one_that_never_votes_is_not_waited_for(play):
    assert play(lambda self: self.decide(True), ALL[:3], patience=0.5) == ["redo"] * 3


def test_a_vote_that_arrives_as_patience_ends_is_the_same_for_all(play):
    """Some decide to redo while the last one votes."""

    def vote(self):
        if (self.me, self.rank) == ALL[3]:
            time.sleep(0.1 + random.uniform(-0.01, 0.01))
        return self.decide(True)

    for number in range(1, 6):
        assert len({*play(vote, ALL, patience=0.1, number=number)}) == 1


def test_a_replica_without_one_of_its_ranks_is_no_member(play):
    """Its other rank ends, so that its launcher starts it again."""

    def enter(self):
        self.next_round_or_exit(newcomers=False)
        return self.members

    assert play(enter, ALL[:3]) == [[1], [1], 3]


def test_a_replica_that_waits_is_let_in_after_a_step_only(play):
    """And then it is a member for all."""
    ranks = [*ALL, (3, 0), (3, 1)]

    def enter(self):
        if self.me == 3:
            self.round = 0
            self.next_round_or_exit(newcomers=True)
            return self.members
        self.store.set("round", "1")
        while not self.store.check(["2/joined"]):  # the newcomer is the first in the list
            time.sleep(0.01)
        self.next_round_or_exit(newcomers=False)
        alone = self.members
        while not self.store.check(["3/joined"]):
            time.sleep(0.01)
        self.next_round_or_exit(newcomers=True)
        return alone, self.members

    found = play(enter, ranks, patience=2)
    assert found[:4] == [([1, 2], [1, 2, 3])] * 4
    assert found[4:] == [[1, 2, 3]] * 2
