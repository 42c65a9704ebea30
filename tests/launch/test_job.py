"""The job: when the processes of all machines start and end. No process runs, and the test moves the clock."""

import pytest

from jdist._src.launch.end_rules import EndTimes, Failure
from jdist._src.launch.job import Job, JobSettings
from jdist._src.launch.messages import Absent, End, Ended, Finish, Joining, Signal, Start, decode, encode
from jdist._src.launch.output import Console


class Machines:
    """A job with machines whose messages are stored. Mutable."""

    def __init__(self, machines=1, slots=2, minimum=None, max_restarts=3, console=None):
        minimum = machines * slots if minimum is None else minimum
        settings = JobSettings(machines, slots, minimum, max_restarts, 30.0, 600.0, EndTimes(1.0))
        self.time = 0.0
        self.job = Job(settings, console or Console(), lambda: self.time)
        self.received = {}

    def connect(self, *machines):
        for machine in machines:
            self.received[machine] = []
            self.job.connect(machine, f"host {machine}", self.received[machine].append)
        return self.next()

    def next(self, seconds=0.0):
        """Lets time pass; returns the new messages by machine."""
        self.time += seconds
        self.job.apply()
        without_reason = lambda message: message._replace(reason="") if isinstance(message, End) else message
        messages = {m: tuple(map(without_reason, stored)) for m, stored in self.received.items() if stored}
        for stored in self.received.values():
            stored.clear()
        return messages

    def receive(self, machine, *messages):
        for message in messages:
            self.job.receive(machine, decode(encode(message)))
        return self.next()


FAILED = (1, "output")


def started(messages):
    """Returns the number of processes, the first process and the slots of each machine."""
    return {m: (start.num_processes, start.first_process, list(start.slots)) for m, (start,) in messages.items()}


def test_job_starts_when_all_machines_are_connected_and_ends_with_them():
    machines = Machines(machines=2)
    assert machines.connect(0) == {}
    assert started(machines.connect(1)) == {0: (4, 0, [0, 1]), 1: (4, 2, [0, 1])}
    assert machines.receive(0, Ended([0, 0], None)) == {}
    assert machines.receive(1, Ended([0, 0], None)) == {0: (Finish(0, ""),), 1: (Finish(0, ""),)}


def test_failure_ends_the_other_machines_and_the_first_one_counts():
    machines = Machines(machines=2, max_restarts=1)
    machines.connect(0, 1)
    assert machines.receive(1, Failure(2, 3, "a")) == {0: (End(1.0, ""),)}
    assert machines.receive(0, Failure(0, 4, "b")) == {}
    assert machines.receive(0, Ended([4, 1], None)) == {}
    machines.time += 2
    messages = machines.receive(1, Ended([3, -9], None))
    text = "restart 1 of 1, 2.0 seconds after this: process 2 failed: exit status 3."
    assert messages == {0: (Start(1, 4, 0, [0, 1], text),), 1: (Start(1, 4, 2, [0, 1], text),)}
    machines.receive(0, Failure(1, -9, "c"), Ended([0, -9], None))
    report = (
        "process 1 of 4 failed first: ended by SIGKILL. The machine may be out of memory. The end of its output:\nc"
    )
    assert machines.receive(1, Ended([1, 1], None)) == {k: (Finish(137, report),) for k in range(2)}


@pytest.mark.parametrize("status, seconds", [(42, 30.0), (43, 5.0), (1, 1.0)])
def test_time_of_the_other_processes_depends_on_the_exit_status(status, seconds):
    machines = Machines(machines=2)
    machines.connect(0, 1)
    assert machines.receive(0, Failure(0, status, "")) == {1: (End(seconds, ""),)}


def test_slot_of_a_failed_process_rests_and_is_used_again():
    machines = Machines(slots=3, minimum=1)
    machines.connect(0)
    machines.receive(0, Failure(1, 5, ""))
    assert started(machines.receive(0, Ended([1, 5, 1], None))) == {0: (2, 0, [0, 2])}
    assert machines.next(29) == {}
    assert machines.next(2) == {0: (End(30.0, ""),)}
    messages = machines.receive(0, Ended([42, 42], None))
    assert started(messages) == {0: (3, 0, [0, 1, 2])}
    assert messages[0][0].restarts == 2
    assert messages[0][0].text.endswith(
        "1 more process can run on machine 0. The job continues with 3 instead of 2 processes."
    )


def test_resting_slots_are_used_if_too_few_are_free_and_the_one_that_rested_longest_first():
    machines = Machines(slots=3, minimum=2)
    machines.connect(0)
    for process, slots in ((2, [0, 1]), (1, [0, 2]), (0, [1, 2])):
        machines.receive(0, Failure(process, 5, ""))
        machines.time += 1
        assert started(machines.receive(0, Ended([5, 1], None)))[0][2] == slots
    assert started(machines.connect()) == {}


def test_process_0_runs_on_machine_0():
    machines = Machines(machines=2, slots=1, minimum=1)
    machines.connect(0, 1)
    machines.receive(0, Failure(0, 5, ""), Ended([5], None))
    assert started(machines.receive(1, Ended([1], None))) == {0: (2, 0, [0]), 1: (2, 1, [0])}


def test_first_attempt_waits_for_the_largest_number_of_processes_for_some_time():
    machines = Machines(machines=3, slots=1, minimum=1)
    assert machines.connect(0) == {}
    assert machines.next(29) == {}
    machines.connect(1)
    assert started(machines.next(2)) == {0: (2, 0, [0]), 1: (2, 1, [0])}
    assert machines.connect(2) == {}
    assert machines.next(29) == {}
    assert machines.next(2) == {0: (End(30.0, ""),), 1: (End(30.0, ""),)}
    machines.receive(0, Ended([42], None))
    assert started(machines.receive(1, Ended([42], None))) == {k: (3, k, [0]) for k in range(3)}


def test_job_without_enough_machines_waits_with_messages_and_ends(capsys):
    machines = Machines(machines=3, slots=1, minimum=2)
    machines.connect(0)
    for seconds, count in ((0.5, 0), (1, 1), (29, 0), (2, 1)):
        machines.next(seconds)
        errors = capsys.readouterr().err
        text = "jdist run: waits for machines 1, 2 of 3: at least 2 processes must run, and 1 can run now.\n"
        assert errors == text * count
    (finish,) = machines.next(600)[0]
    assert finish.status == 1
    assert "machines 1, 2 of 3 have not connected within 600 seconds" in finish.text


def test_lost_machine_is_a_failure_and_its_return_a_restart():
    machines = Machines(machines=2, slots=1, minimum=1, max_restarts=0)
    machines.connect(0, 1)
    machines.job.disconnect(1, "no answer for 60 seconds")
    assert machines.next()[0] == (End(1.0, ""),)
    report = "machine 1 (host 1) was lost: no answer for 60 seconds"
    assert machines.receive(0, Ended([1], None))[0] == (Finish(1, report),)


def test_machine_that_leaves_after_a_signal_is_not_a_failure():
    machines = Machines(machines=2, slots=1, minimum=1, max_restarts=0)
    machines.connect(0, 1)
    assert machines.receive(1, Signal(15, 1)) == {}
    assert machines.receive(0, Failure(0, 42, "")) == {1: (End(30.0, ""),)}  # all processes have saved a checkpoint
    machines.receive(0, Ended([42], None))
    messages = machines.receive(1, Ended([42], 15))
    assert messages[1] == (Finish(42, ""),)
    assert started({0: messages[0]}) == {0: (1, 0, [0])}
    machines.connect(1)
    machines.next(31)
    machines.receive(0, Ended([42], None))
    assert machines.receive(1, Signal(15, 1), Ended([0], 15))[1] == (Finish(0, ""),)


def test_signal_to_a_machine_that_runs_no_process_dismisses_it():
    machines = Machines(machines=3, slots=1, minimum=2)
    machines.connect(0, 1)
    machines.next(31)
    machines.connect(2)
    assert machines.receive(2, Signal(2, 1)) == {2: (Finish(130, ""),)}
    assert machines.receive(2, Signal(2, 2), Ended([], 2)) == {}
    assert machines.receive(0, Signal(2, 1), Ended([-2], 2)) == {1: (Signal(2, 1),)}
    assert machines.receive(1, Ended([-2], 2)) == {0: (Finish(130, ""),), 1: (Finish(130, ""),)}


def test_signal_before_the_start_ends_the_job():
    machines = Machines(machines=2)
    machines.connect(0)
    assert machines.receive(0, Signal(15, 1)) == {0: (Finish(143, ""),)}
    assert machines.next(1000) == {}


def test_failure_after_a_signal_is_the_exit_status():
    machines = Machines(max_restarts=5)
    machines.connect(0)
    machines.receive(0, Signal(15, 1), Failure(1, 9, "no"))
    (finish,) = machines.receive(0, Ended([42, 9], 15))[0]
    assert finish == Finish(9, "process 1 of 2 failed first: exit status 9. The end of its output:\nno")


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"kind": "End"}', b'{"kind": "Other"}', b"\xff"])
def test_line_that_is_not_a_message_is_an_error(line):
    with pytest.raises(ValueError, match="not a message"):
        decode(line)


def test_machine_that_is_refused_is_named_and_may_connect_again(capsys):
    machines = Machines(machines=2)
    machines.connect(0)
    machines.job.refuse("host b, pid 7", "machine 1 has --nodes 3, but machine 0 has 2.")
    assert machines.next() == {}
    text = "the launcher on host b, pid 7 was refused: machine 1 has --nodes 3, but machine 0 has 2."
    assert text in capsys.readouterr().err
    machines.next(2.0)
    assert f"1 of 2: at least 4 processes must run, and 2 can run now. T{text[1:]}" in capsys.readouterr().err
    assert set(machines.connect(1)) == {0, 1}


@pytest.mark.parametrize("messages", [[(0, Absent(1)), (1, Joining())], [(1, Joining()), (0, Absent(1))]])
def test_process_that_ends_before_it_joins_fails_where_processes_of_another_machine_wait(messages):
    machines = Machines(machines=2, max_restarts=0)
    machines.connect(0, 1)
    assert machines.receive(0, Joining(), Absent(0)) == {}  # the machine ends the wait of its own processes
    first, second = [machines.receive(machine, message) for machine, message in messages]
    assert {**first, **second} == {0: (End(1.0, ""),), 1: (End(1.0, ""),)}
    machines.receive(0, Ended([0, 0], None))
    finish = machines.receive(1, Ended([-15, -15], None))[1][0]
    assert finish.status == 1
    assert "process 0 of 4 failed first: it ended with exit status 0 before it joined the others" in finish.text
