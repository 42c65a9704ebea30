"""Copies that differ between processes are the same error on all of them, and trees that differ do not hang."""

import pytest

pytestmark = pytest.mark.slow


def test_results_are_equal_on_all_processes_and_name_the_wrong_device(pair):
    results, others = pair.run("processes.copies_worker:results")
    for name, text in results.items():
        assert name in ("a bad leaf", "assertion") or others[name] == text, name
    equal = ("equal", "after an error", "per replica", "sharded", "equal numbers", "again", "of each process")
    equal += ("assertion of equal copies",)
    assert {name: results[name] for name in equal} == dict.fromkeys(equal, "equal")
    assert results["one bit"] == "[[\"['w']\", [3], (1,), True]]"
    assert results["a local change on process 0"] == "[[\"['b']\", [0], (0,), True]]"
    assert results["assertion"] == "['w'] float32[4,3] is not replicated: its bits differ between the processes."
    assert "hold different copies" in others["assertion"]  # of the two devices of process 1
    assert results["numbers"] == "[[\"['rate']\", [], (0, 1), False]]"
    assert results["arrays of the host"] == results["arrays on one device"] == "[[\"['x']\", [], (0, 1), False]]"
    for name, leaf in {"another leaf": "['v']", "no leaf": "['w']", "another dtype": "['w']"}.items():
        assert results[name].startswith("ValueError: The processes compare trees of different structures"), results[
            name
        ]
        assert leaf in results[name]
    assert results["a bad leaf"].startswith("TypeError: ['b'] is str")
    assert others["a bad leaf"].startswith(
        "RuntimeError: the comparison of the copies of replicated values failed on process 0: ['b']"
    )


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_fit_stops_on_all_processes_at_a_flipped_bit_of_one(pair, steps_per_call):
    (kind, text), other = pair.run("processes.copies_worker:fit_result", steps_per_call)
    assert other == [kind, text]
    assert kind == "CopiesDifferError" and "process 1) differs from the other 3 copies" in text
    assert "state.params['w']" in text
