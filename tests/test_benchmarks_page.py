"""The page of the benchmarks: rows become tables, losing rows are shown, and the stored page is the one of the stored rows."""

import importlib.util
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
STORED = ROOT / "docs/benchmarks.json"


def _page():
    spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "benchmarks/page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _page()


def _row(peer, low, ratio, high, case="mlp, 4 devices"):
    return {"case": case, "peer": peer, "ratio": ratio, "low": low, "high": high, "rounds": 3, "microseconds": 2500.0}


def _document(*rows, **of_run):
    run = {"script": "devices.py", "title": "Steps", "command": "python benchmarks/devices.py", "seconds": 3}
    machine = {"cpu": "a CPU", "cores": 2, "memory": "8 GiB", "system": "Python 3.12.1"}
    run |= {"date": "2026-01-02", "commit": "abc1234", "load": 7}
    section = {"machine": machine, "versions": {"jax": "0.12.0"}}
    return {"peers": {**section, "runs": [{**run, "rows": list(rows), **of_run}]}}


def _lines(text, start):
    return [line for line in text.splitlines() if line.startswith(f"| {start} |")]


@pytest.mark.parametrize(
    ("peer", "quartiles", "verdict"),
    [
        ("torch", (0.7, 0.8, 0.9), "**slower**"),
        ("torch", (1.1, 1.2, 1.3), "faster"),
        ("torch", (0.8, 0.9, 1.1), ""),
        ("torch", (0.9, 1.1, 1.2), ""),
        ("alone", (0.7, 0.8, 0.9), "limit"),
    ],
)
def test_row_shows_ratio_quartiles_both_times_and_the_verdict(peer, quartiles, verdict):
    low, ratio, high = quartiles
    text = PAGE.render(_document(_row(peer, low, ratio, high)))
    (line,) = _lines(text, "mlp, 4 devices")
    assert line == (
        f"| mlp, 4 devices | {peer} | {ratio:.2f} | {low:.2f} to {high:.2f} | 2.5 ms | {2.5 * ratio:.3g} ms | 3 | {verdict} |"
    )


def test_losing_rows_are_listed_first_the_worst_at_the_top_and_counted():
    rows = [_row("a", 0.8, 0.85, 0.9), _row("b", 0.4, 0.5, 0.6), _row("c", 1.5, 2, 3), _row("alone", 0.1, 0.2, 0.3)]
    text = PAGE.render(_document(*rows))
    assert "4 rows: jdist is faster in 1, slower in 2, 1 are limits" in text
    assert _lines(text, "`devices.py`") == [
        "| `devices.py` | mlp, 4 devices | b | 0.50 |",
        "| `devices.py` | mlp, 4 devices | a | 0.85 |",
    ]


def test_page_shows_machine_versions_date_commit_command_and_what_did_not_run():
    text = PAGE.render(_document({"skipped": "torch is not installed, its row is skipped"}))
    for part in ("a CPU, 2 cores, 8 GiB", "jax 0.12.0", "2026-01-02, abc1234, 7", "python benchmarks/devices.py"):
        assert part in text
    assert "- not run: torch is not installed, its row is skipped" in text
    assert "- **failed**: `ValueError: x`" in PAGE.render(_document(failed="ValueError: x"))
    assert "\n- not run\n" in PAGE.render(_document())


def test_section_without_rows_names_its_command():
    assert "## Peers\n\nNot run yet: `python -m nox -s peers`.\n" in PAGE.render({})


def test_parts_of_a_recovery_and_memory_have_tables_of_their_own():
    parts = {"jdist": {"detect": 0.25, "total": 4.0}, "torchrun": {"total": 5.0}}
    recovery = {**_row("torchrun", 1.1, 1.25, 1.4, "kill"), "seconds": parts}
    memory = {"strategy": "mirrored", "devices": 2, "state": 3e6, "step": 1e6, "init": 2e6, "host": 0}
    text = PAGE.render(_document(recovery, memory))
    assert "| kill | torchrun |  | 5.00 |" in text
    assert "| mirrored | 2 | 3.0 | 1.0 | 2.0 | 0.0 |" in text


def test_rates_of_the_figure_are_those_of_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        _row("TensorFlow", 3, 4, 5),
        _row("TensorFlow", 1, 2, 3, "mlp, 8 devices"),
        _row("x", 1, 2, 3, "fit, mlp, 4 devices"),
    ]
    panels = PAGE.rates(_document(*rows)["peers"])
    assert panels == {("mlp", "devices"): {"jdist": {4: 400.0, 8: 400.0}, "TensorFlow": {4: 100.0, 8: 200.0}}}
    PAGE.draw(panels, tmp_path / "figure.svg")
    assert "mlp, devices" in (tmp_path / "figure.svg").read_text()


def test_page_and_figure_are_those_of_the_stored_rows():
    document = json.loads(STORED.read_text())
    assert (ROOT / "docs/benchmarks.md").read_text() == PAGE.render(document)
    if panels := PAGE.rates(document.get("peers", {"runs": []})):
        assert PAGE.stored_data((ROOT / "docs" / PAGE.FIGURE).read_text()) == PAGE.flat(panels)


def test_policies_are_between_the_marks_of_their_page():
    one = {"loss": 1.5, "sent": 2000.0, "collectives": 0.25}
    stored = {"mean": one, "int8": {**one, "loss": 1.65, "sent": 500.0}}
    text = PAGE.with_policies("before\n<!-- policies -->\nold\n<!-- end of policies -->\nafter\n", stored)
    assert text.startswith("before\n<!-- policies -->\n\n![") and text.endswith("<!-- end of policies -->\nafter\n")
    assert "| `int8` | 1.6500 | +10.0% | 0.5 | 0.25 |" in text and "old" not in text
    assert PAGE.with_policies(text, stored) == text


def test_table_and_figure_of_the_policies_are_those_of_the_stored_results():
    stored = json.loads((ROOT / "docs/policies.json").read_text())
    page, figure = (ROOT / "docs/sync.md").read_text(), (ROOT / "docs" / PAGE.POLICIES_FIGURE).read_text()
    assert PAGE.with_policies(page, stored) == page
    mean = stored["mean"]
    assert f"| `mean` | {mean['loss']:.4f} | +0.0% | {mean['sent'] / 1e3:,.1f} | {mean['collectives']:.2f} |" in page
    assert all(f"| `{name}` | {one['loss']:.4f} |" in page for name, one in stored.items())
    drawn = {name: [round(one["sent"] / 1e3, 1), round(one["loss"], 4)] for name, one in stored.items()}
    assert PAGE.stored_data(figure) == drawn
    assert len(figure) < 80_000
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', figure).groups())
    texts = re.findall(r'<text [^>]*x="(\S+)" y="(\S+)"', figure)
    assert len(texts) > 10 and all(0 < float(x) < width and 0 < float(y) < height for x, y in texts)


def test_every_script_of_a_section_exists_and_prints_rows():
    lines = [*PAGE.own_scripts(), *PAGE.PEERS]
    scripts = {line.split()[0] for line in lines}
    assert len(scripts) == len(lines)
    assert {"step_overhead.py", "devices.py", "checkpoint.py"} <= scripts
    assert "page.py" not in scripts and "sidebyside.py" not in scripts
    for script in scripts:
        assert (
            '"--json"' in (ROOT / "benchmarks" / script).read_text() + (ROOT / "benchmarks/sidebyside.py").read_text()
        )
