"""The training examples, run as a user does."""

import re
import runpy

import jax
import pytest
from flax import nnx

from example_runs import EXAMPLES, assert_invalid_arguments, run


def _printed(example, *arguments, folder=None):
    done = run(EXAMPLES / example, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _column(printed, name):
    """Returns a column of the printed history."""
    lines = [line.split() for line in printed.splitlines()]
    head = next(number for number, line in enumerate(lines) if line[:2] == ["epoch", "step"])
    rows = [line for line in lines[head + 1 :] if len(line) == len(lines[head]) and line[0].isdigit()]
    return [float(row[lines[head].index(name)].replace(",", "")) for row in rows]


@pytest.mark.slow
def test_digits_fit_reaches_its_accuracy_and_writes_its_page(tmp_path):
    pytest.importorskip("matplotlib")
    printed = _printed("digits_fit.py", folder=tmp_path)
    assert float(re.search(r"Test accuracy (\S+)% of 360", printed)[1]) >= 97.5
    assert "Report: digits_fit.html" in printed
    page = (tmp_path / "digits_fit.html").read_text(encoding="utf-8")
    assert "<h1>Digits</h1>" in page
    assert "val_accuracy" in page and "learning_rate" in page


@pytest.mark.slow
def test_digits_fit_without_matplotlib_trains_on_every_image_once_and_prints_the_install_command(tmp_path):
    example = EXAMPLES / "digits_fit.py"
    blocked = (
        "import runpy, sys; sys.modules['matplotlib'] = None; "
        "sys.argv = ['digits_fit.py', '--epochs', '2', '--replicas', '2']; "
        f"runpy.run_path({str(example)!r}, run_name='__main__')"
    )
    done = run("-c", blocked, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert _column(printed, "step") == [10, 20]
    assert _column(printed, "val_loss")[1] < _column(printed, "val_loss")[0]
    assert _column(printed, "learning_rate")[0] > _column(printed, "learning_rate")[1]
    assert "of 360 digits, on 2 replicas" in printed
    assert re.search(r"First ten labels: \[(\d, ){9}\d\]\n +predictions: \[(\d, ){9}\d\]", printed)
    assert 'python -m pip install "jdist[plot]"' in printed.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_text_lm_learns_to_predict_characters_and_writes_the_requested_number():
    printed = _printed("text_lm.py", "--steps", "60", "--length", "50")
    assert _column(printed, "step") == [60]
    (bits,) = re.findall(r"Held out: (\S+) bits per character, \d+ windows", printed)
    assert float(bits) < 4.2  # the frequencies of the characters alone give 4.7
    _, written = printed.split("generated text:\n\n")
    assert len(written) == 64 + 50 + 1  # the prompt, and the end of the line


@pytest.mark.slow
def test_text_lm_as_a_pipeline_learns_as_on_one_device_per_replica():
    bits = [
        float(re.search(r"Held out: (\S+) bits", _printed("text_lm.py", "--steps", "20", "--length", "1", *flags))[1])
        for flags in (["--replicas", "1", "--pipeline", "2"], ["--replicas", "2"])
    ]
    assert bits[0] == pytest.approx(bits[1], abs=0.01)


@pytest.mark.slow
def test_resume_after_kills_at_random_steps_is_bitwise_equal():
    kills, steps = 2, 30
    # 7 replicas do not divide the batch size.
    printed = _printed("resume.py", "--kills", kills, "--epochs", "2", "--seed", "1", "--replicas", "7")
    rows = re.findall(r"│ (\d) +│ (\d+) +│ (\d+) +│", printed)
    assert [int(number) for number, *_ in rows] == [*range(1, kills + 1)]
    starts, killed = [[int(row[i]) for row in rows] for i in (1, 2)]
    assert f"Process 1 trained from step 0 and was killed after step {killed[0]}" in printed.split("│")[0]
    assert starts[0] == 0
    (last,) = re.findall(rf"│ this +│ (\d+) +│ none: complete after {steps} +│", printed)
    for after, before in zip([*starts[1:], int(last)], killed, strict=True):
        assert after <= before and after % 7 == 0  # only the checkpoint that was being written may be lost
    differences = re.findall(r"(\w+) +(\d+) of (\S+) numbers differ in a bit", printed)
    assert [(part, different) for part, different, _ in differences] == [("params", "0"), ("opt_state", "0")]
    assert all(int(numbers.replace(",", "")) > 10_000 for *_, numbers in differences)


WRONG = {
    "digits_fit.py": {
        "--epochs 0": "ValueError: The cosine_decay_schedule requires positive decay_steps",
        "--frobnicate": "unrecognized arguments: --frobnicate",
    },
    "cartpole.py": {
        "--environments 3": "3 environments cannot be split over 4 replicas.",
        "--updates many": "argument --updates: invalid int value: 'many'",
    },
    "text_lm.py": {
        "--temperature cold": "argument --temperature: invalid float value: 'cold'",
    },
    "resume.py": {
        "--kills -1": "--kills must be less than the 90 training steps, got -1",
        "--kills 90": "--kills must be less than the 90 training steps, got 90",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("example", WRONG)
def test_example_reports_invalid_flags(example):
    assert_invalid_arguments(example, WRONG[example])


@pytest.mark.slow
@pytest.mark.parametrize("example", ["digits_fit.py", "text_lm.py", "resume.py", "cartpole.py"])
def test_example_help_lists_defaults(example):
    printed = _printed(example, "--help")
    assert "--replicas" in printed
    assert "(default: 0)" in printed  # of `--seed`


@pytest.mark.slow
def test_text_lm_with_temperature_0_takes_the_most_likely_characters():
    example = runpy.run_path(str(EXAMPLES / "text_lm.py"))
    graphdef, params = nnx.split(example["Transformer"](10, layers=1, width=8, rngs=nnx.Rngs(0)))
    window = jax.numpy.arange(8)
    generate = lambda temperature, seed: example["generate"](
        graphdef, params, window, 20, temperature, jax.random.key(seed)
    )
    assert generate(0.0, 0).tolist() == generate(0.0, 1).tolist() != generate(1.0, 0).tolist()
    assert generate(0.0, 0)[0] == nnx.merge(graphdef, params)(window[None])[0, -1].argmax()


@pytest.mark.slow
def test_text_lm_reports_batches_larger_than_the_text():
    done = run(EXAMPLES / "text_lm.py", "--batch-size", "4000")
    assert done.returncode == 1
    assert "ValueError: The source is empty" in done.stderr


@pytest.mark.slow
def test_cartpole_learns_to_balance_with_environments_of_each_replica():
    printed = _printed("cartpole.py", "--replicas", "2")
    lengths = [float(length) for length in re.findall(r"^update +\d+ .* (\S+)$", printed, re.MULTILINE)]
    assert len(lengths) == 4 and lengths[0] < 60
    assert "per replica: ('state.poles',)" in printed
    assert float(re.search(r"balances for (\S+) of 200 steps, trained on 2 replicas", printed)[1]) > 120
