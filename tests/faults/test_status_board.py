"""Which processes can never continue, from the statuses of all of them, and two that decide at once, with JAX's real store."""

import json

import jax
import pytest

from jdist._src.faults.status_board import Decision, Status, StatusBoard, awaited_processes, stuck_processes

from coordination import connect, coordination_service


def status(launches=0, awaits=None, program="step", **others):
    return Status("", launches={"all": launches}, newest_launch=("all", program), awaits=awaits, **others)


def in_step(number, program="step"):
    """A process that waits for the results of its launch with this number."""
    return status(number, ("all", number, None), program)


def in_round(name, launches=0, processes=None, **others):
    """A process that waits for messages."""
    return status(launches, (name, 0, processes), **others)


ENDED = status(3, has_ended=True)
CASES = {
    "no wait": ([status(), status()], set()),
    "one program": ([in_step(4), in_step(4)], set()),
    "late process runs": ([in_step(4), status(3)], set()),
    "late process works": ([in_step(4), in_round("save", 3, work="compiles")], set()),
    "late process has ended": ([in_step(4), ENDED], {0, 1}),
    "results before the end": ([in_step(3), ENDED], {1}),
    "program of other processes": ([status(4, ("0,2", 4, [0, 2])), ENDED, status(4)], {1}),
    "one round": ([in_round("save/1"), in_round("save/1")], set()),
    "two rounds": ([in_round("save/1"), in_round("save/2")], {0, 1}),
    "round and program": ([in_round("save/1", 3), in_step(4), in_step(4)], {0, 1, 2}),
    "round after the program": ([in_round("save/1", 4), in_step(4)], set()),
    "a third process runs": ([in_round("save/1", 3), in_step(4), status(3)], set()),
    "other programs": ([in_step(4, "step"), in_step(4, "gather")], {0, 1}),
    "in a chain": ([in_step(4), in_step(5), ENDED], {0, 1, 2}),
    "process that posted before its end": ([in_round("save/1"), ENDED, status()], {1}),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_can_never_continue(case):
    statuses, expected = CASES[case]
    assert stuck_processes(dict(enumerate(statuses))) == expected


def test_awaited_processes_are_those_that_have_not_launched_the_program():
    statuses = dict(enumerate([in_step(4), in_step(4), status(3), ENDED]))
    assert awaited_processes(0, statuses) == {2, 3}
    assert awaited_processes(2, statuses) == set()


class StoreWithDecision:
    """A store in which process 0 decides after the first read of the statuses. Mutable: it counts the reads."""

    def __init__(self, client):
        self._client, self.num_reads = client, 0

    def __getattr__(self, method):
        return getattr(self._client, method)

    def key_value_dir_get(self, prefix):
        entries = self._client.key_value_dir_get(prefix)
        if prefix == "jdist/status/":
            self.num_reads += 1
            if self.num_reads == 1:
                self.key_value_set("jdist/decisions/end", json.dumps(Decision(0, [], "decided")))
        return entries


@pytest.mark.parametrize("needs_answers", [True, False])
def test_process_does_not_wait_for_the_answer_of_one_that_has_decided(needs_answers, monkeypatch):
    """It would report only after the process that decided, whose end may end it."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with coordination_service(1) as address:
        client = connect(address)
        client.key_value_set("jdist/status/0", json.dumps(Status("the last one of process 0")))
        store, board = StoreWithDecision(client), StatusBoard(interval=0.02, answer_seconds=2)
        board.suspicion, board.needs_answers = "waits", needs_answers
        board._exchange(store)
        client.shutdown()
    assert board.decision == Decision(0, [], "decided")
    assert store.num_reads == 1
