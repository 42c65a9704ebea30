"""The files of a release are consistent with the package."""

import pathlib
import re
import tomllib

import jdist

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_citation_has_the_version_and_the_licence_of_the_package():
    fields = dict(re.findall(r"^([\w-]+): \"?(.*?)\"?$", read("CITATION.cff"), re.MULTILINE))
    assert (fields["version"], fields["license"]) == (jdist.__version__, PROJECT["license"])
    assert f"## {jdist.__version__} - {fields['date-released']}" in read("CHANGELOG.md")


def test_stability_page_has_the_supported_versions_of_python_and_jax():
    page = read("docs/stability.md")
    oldest_python, newest_python = re.search(r"\| Python \| (\S+) \| (\S+) \|", page).groups()
    oldest_jax, newest_jax = re.search(r"\| JAX \| (\S+) \| (\S+) \|", page).groups()
    assert PROJECT["requires-python"] == f">={oldest_python}"
    classifiers = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
    assert classifiers == [oldest_python, newest_python]
    assert f"jax>={oldest_jax}" in PROJECT["dependencies"]
    tested = re.findall(r"^jax==(\S+);", read("constraints.txt"), re.MULTILINE)
    assert tested[0] == oldest_jax and tested[1].startswith(f"{newest_jax}.")


def test_dockerfile_copies_and_installs_what_exists():
    text = read("Dockerfile")
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert len(copied) == 6 and all((ROOT / name).exists() for name in copied)
    assert {f"!{name}" for name in copied} <= set(read(".dockerignore").split())
    extras = re.findall(r"EXTRA=(\w+)", text)
    assert extras and set(extras) <= set(PROJECT["optional-dependencies"])


def test_bug_report_asks_for_the_environment():
    assert "Output of `jdist env`" in read(".github/ISSUE_TEMPLATE/bug_report.yml")
