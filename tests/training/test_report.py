"""The page about a training run: whole, by itself, of the run it is about, and never the victim of a name in it."""

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
from jdist._src.execution.replicate import Proof
from jdist._src.training.history import History
from jdist._src.training.report.page import write_report

few = hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
VOID = {"meta", "br", "link", "img", "input", "hr"}


def run(rows=(), losses=None, **other):
    fields = {"steps": 40, "stop": "All 2 epochs are done.", "description": None, "proof": None}
    return types.SimpleNamespace(history=History(rows, losses or {}), **fields | other)


def full(**other):
    rows = [
        {
            "epoch": 0,
            "step": 20,
            "seconds": 2.0,
            "examples_per_second": 500.0,
            "stalled_fraction": 0.25,
            "loss": 2.5,
            "accuracy": 0.25,
        },
        {
            "epoch": 1,
            "step": 40,
            "seconds": 75.0,
            "examples_per_second": 1500.0,
            "stalled_fraction": 0.0,
            "loss": 1.25,
            "accuracy": 0.75,
        },
    ]
    rows = [row | {"val_loss": row["loss"] + 0.125, "<script>alert(1)</script>": 0.5} for row in rows]
    return run(rows, {step: 3.0 - step / 40 for step in range(1, 41)}, **other)


class Page(html.parser.HTMLParser):
    """What is in a page, if every element in it is closed in its turn."""

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


def check_alone(page):
    """Nothing is loaded and nothing runs."""
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
    about = two.describe(two.put({"kernel": np.zeros((4, 8), np.float32)}))
    proof = Proof(replicated=("state['w']", "state['<i>']"), per_replica=("output[3]",))
    return Page(
        write_report(
            full(description=about, proof=proof), tmp_path_factory.mktemp("page") / "run.html", title="Digits & <b>"
        )
    )


def test_page_is_whole_and_needs_nothing_else(page):
    check_alone(page)
    assert page.text.startswith("<!DOCTYPE html>") and "default-src 'none'" in page.text


@pytest.mark.parametrize(
    "words",
    [
        ["Digits & <b>", "All 2 epochs are done."],
        ["loss", "1.375", "validation · training 1.25"],
        ["accuracy", "0.75", "training"],
        ["steps", "40", "2 epochs"],
        ["time", "1 min 15 s"],
        ["examples per second", "1,000", "median of the epochs"],
        ["waited for input", "12.5%"],
        ["1", "40", "75", "1,500", "0", "1.25", "0.75", "1.375", "0.5"],
        ["Strategy", "MirroredStrategy"],
        ["kernel", "float32[4,8]", "mirrored"],
        ["Proof", "2 of 3 results are replicated; one value per replica: output[3]"],
        ["The same on every replica (2)", "state['w']", "state['<i>']", "One value a replica (1)", "output[3]"],
        ["jax", jax.__version__],
        ["processes", "1"],
    ],
    ids=lambda words: words[0],
)
def test_page_says_what_there_is_to_say(page, words):
    assert any(page.words[i : i + len(words)] == words for i in range(len(page.words)))


def test_page_has_a_picture_for_each_panel_that_says_what_it_is(page):
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("figure", "aria-label")]
    assert labels == ["Loss", "Metrics", "Examples per second"] and page.tags.count("svg") == 3


def test_page_has_colours_for_light_and_dark_and_those_of_the_pictures_are_among_them(page):
    style = re.search(r"<style>(.*?)</style>", page.text, re.DOTALL)[1]
    light, dark = (set(re.findall(r"--([\w-]+):", part)) for part in re.findall(r":root \{(.*?)\}", style))
    used = set(re.findall(r"var\(--([\w-]+)\)", page.text))
    assert used <= light == dark and "prefers-color-scheme: dark" in style and "@media print" in style


def test_name_that_is_markup_is_shown_and_is_none(page):
    assert "<script>alert(1)</script>" in page.words and "<script" not in page.text


@pytest.mark.parametrize(
    "fit", [run(), run(losses={1: math.nan}), run([{"loss": math.inf}])], ids=["none", "step", "row"]
)
def test_page_of_a_run_that_came_to_little_is_whole(tmp_path, fit):
    page = Page(write_report(fit, tmp_path / "run.html"))
    check_alone(page)
    assert ("Nothing was recorded." in page.words) == (not fit.history.rows and not fit.history.losses)


def test_proof_of_very_many_results_is_cut_and_says_so(tmp_path):
    proof = Proof((), tuple(f"output[{i}]" for i in range(5_000)))
    page = Page(write_report(run(proof=proof), tmp_path / "run.html"))
    assert "… 3,000 more" in page.words and max(map(len, page.words)) <= 400


def test_page_replaces_an_older_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "run.html"
    path.write_text("old")
    assert write_report(run(), str(path)) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") and list(tmp_path.iterdir()) == [path]


def test_link_to_a_page_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "run.html").symlink_to(tmp_path / "there" / "page.html")
    write_report(run(), tmp_path / "run.html")
    assert (tmp_path / "run.html").is_symlink() and (tmp_path / "there" / "page.html").is_file()


@pytest.mark.parametrize(
    "path, error, says",
    [
        (
            "missing/run.html",
            FileNotFoundError,
            "The folder .*missing does not exist. Create it before writing run.html to it",
        ),
        ("folder", FileExistsError, "folder exists and is not a file or folder of the kind"),
        (
            "file/run.html",
            FileNotFoundError,
            "The folder .*file does not exist. Create it before writing run.html to it",
        ),
        ("x" * 300, OSError, "xxx"),
    ],
    ids=["missing", "folder", "file", "long"],
)
def test_path_that_cannot_be_written_is_an_error_that_names_it_and_nothing_is_left(tmp_path, path, error, says):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(error, match=says):
        write_report(run(), tmp_path / path)
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"] and (tmp_path / "file").read_text() == "kept"
    )


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert write_report(run(), tmp_path / "run.html") == tmp_path / "run.html" and not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_names_what_to_install_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'python -m pip install "jdist\[plot\]"'):
        write_report(full(), tmp_path / "run.html")
    assert not list(tmp_path.iterdir())


@few
@hypothesis.given(
    st.lists(st.dictionaries(st.text(max_size=20), st.floats(), max_size=4), max_size=3),
    st.text(),
    st.text(max_size=50),
)
def test_page_of_any_history_is_whole(tmp_path, rows, stop, title):
    page = Page(write_report(run(rows, {1: 1.0}, stop=stop), tmp_path / "run.html", title=title))
    check_alone(page)


@pytest.mark.parametrize(
    "name", ["\ud800", "a\x00b", "]]>", "--><b>", "</style>", "{x}", "\\1", "$\\frac", "損失 🙂", "\x1b[0m"]
)
def test_name_of_any_letters_leaves_the_page_whole(tmp_path, name):
    page = Page(write_report(run([{name: 0.5, "other": 0.25}], stop=name), tmp_path / "run.html", title=name))
    check_alone(page)
    assert "b" not in page.tags
