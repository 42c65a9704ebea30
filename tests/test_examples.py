"""The digits and the recommender examples, run as a user does."""

import re

import pytest

from example_runs import EXAMPLES, assert_invalid_arguments, run

DIGITS = EXAMPLES / "digits.py"


@pytest.mark.slow
def test_digits_reaches_its_accuracy_and_prints_the_proof():
    done = run(DIGITS)
    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"epoch +(\d+)/20 +loss (\S+) +test accuracy +(\S+)% of (\d+)", done.stdout)
    assert [int(number) for number, *_ in epochs] == [*range(1, 21)] * 2
    assert {rows for *_, rows in epochs} == {"360"}  # every test image, once
    assert float(epochs[19][2]) >= 97.5
    difference = float(re.search(r"Largest difference between the two models' weights: (\S+)", done.stdout)[1])
    assert difference < 0.1
    assert re.fullmatch(r"Proved while tracing: 26 of 26 .* all 8 replicas .*", done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits.py", "digits_fit.py"])
def test_batch_size_of_example_needs_not_be_a_multiple_of_the_replicas(example, tmp_path):
    done = run(EXAMPLES / example, "--replicas", "3", "--epochs", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_digits_reports_invalid_flags():
    assert_invalid_arguments(
        "digits.py",
        {
            "--seed -1": "ValueError: `seed`",
            "--batch-size many": "argument --batch-size: invalid int value: 'many'",
            "--frobnicate": "unrecognized arguments: --frobnicate",
        },
    )


@pytest.mark.slow
def test_digits_help_lists_every_flag_and_its_default():
    text = run(DIGITS, "--help").stdout
    for flag in ("--replicas", "--epochs", "--batch-size", "--seed"):
        assert flag in text
    assert "(default: 128)" in text


@pytest.mark.slow
def test_recommender_predicts_almost_as_well_as_possible_and_its_replay_is_equal(tmp_path):
    flags = ("--users", "5000", "--batch-size", "1024", "--record", "run.log")
    done = run(EXAMPLES / "recommender.py", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    error = re.search(r"error on 20,000 other ratings: (\S+) \(noise: 0.1, always 0: (\S+)\)", done.stdout)
    assert float(error[1]) < 0.15 < float(error[2])
    last_lines = done.stdout.splitlines()[-2:]
    replayed = run("-m", "jdist", "replay", "run.log", folder=tmp_path)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.splitlines()[-2:] == last_lines
