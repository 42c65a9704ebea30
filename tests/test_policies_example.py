"""The comparison of policies, run as a user does."""

import math
import re

import pytest

from example_runs import EXAMPLES, assert_invalid_arguments, run

EXAMPLE = EXAMPLES / "policies.py"
POLICIES = [
    "mean",
    "in_dtype(bfloat16)",
    "in_dtype(float16)",
    "hierarchical",
    "exact",
    "skip_nonfinite",
    "int8",
    "int8(stochastic)",
    "top_k(0.1)",
    "power_sgd(16)",
    "every(4)",
    "local_sgd(8)",
    "diloco(16)",
    "diloco(16,int8)",
    "streaming_diloco(16)",
]


def _table(*arguments, xla_flags=None):
    """Returns the printed columns of each policy: loss, loss relative to `mean`, kilobytes, collectives."""
    done = run(EXAMPLE, *arguments, xla_flags=xla_flags)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^│ (\S.*?) +│ +(\S+) │ +(\S*) │ +(\S+) kB │ +(\S+) │ +\S+ │$", done.stdout, re.MULTILINE)
    table = {
        name.replace(" ", ""): (float(loss), to, float(sent), float(count)) for name, loss, to, sent, count in rows
    }
    return table, done.stdout


@pytest.mark.slow
def test_policies_prints_one_row_per_policy_with_the_bytes_of_its_program():
    table, printed = _table("--steps", "4", "--replicas", "2")
    assert list(table) == POLICIES
    assert "on 2 replicas" in printed
    assert all(math.isfinite(loss) for loss, *_ in table.values())
    sent = {name: kilobytes for name, (_, _, kilobytes, _) in table.items()}
    everything = sent["mean"]
    assert everything > 400  # 118,000 numbers of 4 bytes; a ring of 2 sends each once
    for name in ("hierarchical", "exact", "skip_nonfinite"):
        assert sent[name] == pytest.approx(everything, rel=0.01)
    assert everything * 0.25 < sent["int8"] < everything * 0.27  # one scale per 256 numbers
    for name, period in [("every(4)", 4), ("local_sgd(8)", 8), ("diloco(16)", 16), ("streaming_diloco(16)", 16)]:
        assert sent[name] == pytest.approx(everything / period, rel=0.01)
    assert sent["diloco(16,int8)"] < sent["diloco(16)"] / 3
    assert sent["power_sgd(16)"] < everything / 4
    assert [table[name][3] for name in ("mean", "every(4)", "local_sgd(8)")] == [1, 0.25, 0.12]
    assert table["streaming_diloco(16)"][3] == 0.25


@pytest.mark.slow
def test_chosen_policy_reaches_the_loss_of_the_mean_and_the_figure_is_drawn(tmp_path):
    path = tmp_path / "figure.png"
    table, printed = _table("--steps", "256", "--policy", "mean", "int8", "--plot", path, xla_flags="")
    assert list(table) == ["mean", "int8"]
    assert table["mean"][0] < 1.6
    assert table["int8"][0] < 1.02 * table["mean"][0]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^2/2 int8: loss \d\.\d{4}, \d+ s$", printed, re.MULTILINE)  # printed before the table


@pytest.mark.slow
def test_policies_reports_invalid_flags():
    assert_invalid_arguments(
        "policies.py",
        {
            "--replicas 3": "--replicas must be even for `hierarchical`, which has groups of 2, got 3",
            "--batch-size 12": "--batch-size must be a multiple of 8 for `exact`, got 12",
            "--replicas 3 --policy mean": "ValueError: A batch of 32 examples cannot be split over 3 replicas",
            "--policy median": "invalid choice: 'median'",
            "--frobnicate": "unrecognized arguments: --frobnicate",
        },
    )


@pytest.mark.slow
def test_policies_reports_a_missing_matplotlib_before_it_runs(tmp_path):
    blocked = (
        "import runpy, sys; sys.modules['matplotlib'] = None; "
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r}); sys.argv = ['policies.py', '--plot', 'figure.png']; "
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    done = run("-c", blocked)
    assert done.returncode == 1
    assert done.stderr.strip() == 'The figure needs matplotlib: python -m pip install -e ".[plot]"'
    assert done.stdout == ""
