"""The main job, run as a user runs it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

DIGITS = pathlib.Path(__file__).parent.parent / "examples" / "digits.py"


def _digits(*arguments):
    # Without the devices that the tests force: the example asks for its own.
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment["COLUMNS"] = "200"  # no line is broken
    command = [sys.executable, DIGITS, *arguments]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240)


def test_digits_reaches_its_accuracy_and_says_what_was_proved():
    done = _digits()
    assert done.returncode == 0, done.stderr
    epochs = re.findall(r"epoch +(\d+)/20 +loss (\S+) +test accuracy +(\S+)% of (\d+)", done.stdout)
    assert [int(number) for number, *_ in epochs] == [*range(1, 21)] * 2
    assert {rows for *_, rows in epochs} == {"360"}  # every test image, once
    assert float(epochs[19][2]) >= 97.5
    difference = float(re.search(r"Largest difference between the two models' weights: (\S+)", done.stdout)[1])
    assert difference < 0.1
    assert re.fullmatch(r"Proved while tracing: 26 of 26 .* all 8 replicas .*", done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--replicas", "3"], "--batch-size is a multiple of the 3 replicas, got 128"),
        (["--epochs", "0"], "--epochs is at least 1, got 0"),
        (["--seed", "-1"], "--seed is at least 0, got -1"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_digits_given_a_wrong_flag_says_so(arguments, says):
    done = _digits(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_digits_help_names_every_flag_and_its_default():
    text = _digits("--help").stdout
    for flag in ("--replicas", "--epochs", "--batch-size", "--seed"):
        assert flag in text
    assert "(default: 128)" in text
