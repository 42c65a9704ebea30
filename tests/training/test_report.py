"""The report page: valid HTML, self-contained, with the results of the run, and with escaped names."""

import html.parser
import math
import pathlib
import re
import sys
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jdist
from jdist._src.execution.traced import Proof
from jdist._src.training.history import History
from jdist._src.training.report.page import write_report

from laws import each_row

few = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
VOID = {"meta", "br", "link", "img", "input", "hr"}


def make_fit(rows=(), losses=None, **other):
    fields = {"steps": 40, "stop_reason": "All 2 epochs are done.", "description": None, "proof": None}
    return types.SimpleNamespace(history=History(rows, losses or {}), **fields | other)


def make_full_fit(**other):
    columns = ["epoch", "step", "seconds", "examples_per_second", "stalled_fraction", "loss", "accuracy"]
    rows = [
        dict(zip(columns, values, strict=True))
        for values in ((0, 20, 2.0, 500.0, 0.25, 2.5, 0.25), (1, 40, 75.0, 1500.0, 0.0, 1.25, 0.75))
    ]
    rows = [row | {"val_loss": row["loss"] + 0.125, "<script>alert(1)</script>": 0.5} for row in rows]
    return make_fit(rows, {step: 3.0 - step / 40 for step in range(1, 41)}, **other)


class Page(html.parser.HTMLParser):
    """The contents of a page. Every element must be closed in order."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.text = pathlib.Path(path).read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert not self.open and not self.rawdata

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and data.strip():
            self.words.append(data.strip())


def assert_self_contained(page):
    """Asserts that the page loads nothing and runs no script."""
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    loads = [value for _, name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(value.startswith("#") for value in loads)
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*[\"']?([^)]*)", page.text))
    assert "@import" not in page.text and not [name for _, name, _ in page.attributes if name.startswith("on")]
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids) and {value[1:] for value in loads} <= set(ids)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    two = jdist.MirroredStrategy(["cpu:0", "cpu:1"])
    description = two.describe(two.put({"kernel": np.zeros((4, 8), np.float32)}))
    proof = Proof(replicated=("state['w']", "state['<i>']"), per_replica=("output[3]",))
    full = make_full_fit(description=description, proof=proof)
    return Page(write_report(full, tmp_path_factory.mktemp("page") / "run.html", title="Digits & <b>"))


def test_page_is_valid_and_self_contained(page):
    assert_self_contained(page)
    assert page.text.startswith("<!DOCTYPE html>") and "default-src 'none'" in page.text


RESULTS = [
    "Digits & <b> All 2 epochs are done.",
    "loss 1.25",
    "val_loss 1.375",
    "steps 40 in 2 epochs",
    "time 1 min 15 s, compilation included",
    "examples per second 1,000, median of the epochs",
    "waited for input 12.5% of the steps",
    "1 40 75 1,500 0 1.25 0.75 1.375 0.5",
    "Strategy MirroredStrategy",
    "kernel float32[4,8] replicated",
    "Proof 2 of 3 results are replicated; one value per replica: output[3]",
    "Replicated (2) state['w'] state['<i>'] One value per replica (1) output[3]",
    f"jax {jax.__version__}",
    "processes 1",
]


@each_row("words", RESULTS)
def test_page_contains_the_results(page, words):
    assert words in " ".join(" ".join(page.words).split())


def test_page_has_a_labelled_figure_of_the_charts(page):
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("figure", "aria-label")]
    assert labels == ["Loss, Metrics, Examples per second, Steps that waited for input"] and page.tags.count("svg") == 1


def test_page_defines_all_colors_for_light_and_dark(page):
    style = re.search(r"<style>(.*?)</style>", page.text, re.DOTALL)[1]
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in re.findall(r":root \{(.*?)\}", style))
    used = set(re.findall(r"var\(--([\w-]+)\)", page.text))
    assert used <= light == dark and "prefers-color-scheme: dark" in style and "@media print" in style


def test_name_with_markup_is_escaped(page):
    assert "<script>alert(1)</script>" in " ".join(page.words) and "<script" not in page.text


@each_row("rows, losses", [([], {}), ([], {1: math.nan}), ([{"loss": math.inf}], {})], ["empty", "step", "row"])
def test_page_of_a_short_run_is_valid(tmp_path, rows, losses):
    page = Page(write_report(make_fit(rows, losses), tmp_path / "run.html"))
    assert_self_contained(page)
    assert ("Nothing was recorded." in page.words) == (not rows and not losses)


def test_long_proof_is_shortened(tmp_path):
    proof = Proof((), tuple(f"output[{i}]" for i in range(5_000)))
    page = Page(write_report(make_fit(proof=proof), tmp_path / "run.html"))
    assert "… 3,000 more" in page.words and max(map(len, page.words)) <= 400


def test_page_replaces_an_existing_file_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "run.html"
    path.write_text("old")
    assert write_report(make_fit(), str(path)) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and list(tmp_path.iterdir()) == [path]


def test_symbolic_link_to_a_page_is_kept(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "run.html").symlink_to(tmp_path / "target" / "page.html")
    write_report(make_fit(), tmp_path / "run.html")
    assert (tmp_path / "run.html").is_symlink() and (tmp_path / "target" / "page.html").is_file()


NO_FOLDER = "does not exist. Create it before writing run.html to it"
UNWRITABLE = [
    ("missing/run.html", FileNotFoundError, f"The folder .*missing {NO_FOLDER}"),
    ("folder", FileExistsError, "folder exists and is not a file or folder of the kind"),
    ("file/run.html", FileNotFoundError, f"The folder .*file {NO_FOLDER}"),
    ("x" * 300, OSError, "xxx"),
]


@each_row("path, error, message", UNWRITABLE)
def test_path_that_cannot_be_written_raises_and_leaves_no_file(tmp_path, path, error, message):
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(error, match=message):
        write_report(make_fit(), tmp_path / path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert write_report(make_fit(), tmp_path / "run.html") == tmp_path / "run.html" and not list(tmp_path.iterdir())


def test_missing_matplotlib_raises_with_the_install_command_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'python -m pip install "jdist\[plot\]"'):
        write_report(make_full_fit(), tmp_path / "run.html")
    assert not list(tmp_path.iterdir())


@few
@hypothesis.given(
    st.lists(st.dictionaries(st.text(max_size=20), st.floats(), max_size=4), max_size=3),
    st.text(),
    st.text(max_size=50),
)
def test_page_of_any_history_is_valid(tmp_path, rows, stop_reason, title):
    page = Page(write_report(make_fit(rows, {1: 1.0}, stop_reason=stop_reason), tmp_path / "run.html", title=title))
    assert_self_contained(page)


@pytest.mark.parametrize(
    "name", ["\ud800", "a\x00b", "]]>", "--><b>", "</style>", "{x}", "\\1", "$\\frac", "損失 🙂", "\x1b[0m"]
)
def test_page_with_unusual_names_is_valid(tmp_path, name):
    named = make_fit([{name: 0.5, "other": 0.25}], stop_reason=name)
    page = Page(write_report(named, tmp_path / "run.html", title=name))
    assert_self_contained(page)
    assert "b" not in page.tags
