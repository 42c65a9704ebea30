"""Wording of docstrings, comments, messages and pages: the words that readers of JAX search for, without metaphors."""

import ast
import io
import pathlib
import re
import tokenize

ROOT = pathlib.Path(__file__).parent.parent
FILES = [
    ROOT / "README.md",
    *sorted(path for folder in ("jdist", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_THINGS = r"(replicas?|devices?|process(es)?|programs?|hosts?|steps?|policy|policies|strategy|strategies|arrays?|values?|lea(f|ves))"
_UNITS = r"(replica|device|process|step|batch|epoch|leaf|shard|host|example|file|dtype|group|round|line|second)"
PATTERNS = {
    "replicas compute, hold, send and receive; they do not speak": rf"\b{_THINGS} (say|tell|ask|hear|know|speak|talk|agree to)s?\b",
    "a report, a request or an argument, not speech": r"\b(is|are|was|were|be|been) (told|said|heard|spoken|asked)\b",
    "name the thing with a noun": r"\bwhat (is|are|was|were|it|they|each|every|all|there|has|have|differs?|becomes?|comes?|goes)\b",
    "is placed on, is stored in, is sharded over": r"\b(lie|lies|lay|lying) (on|in|along|over|at|there|where|beside|below|above)\b",
    "per replica, per step": rf"\b(one|once|twice|rows?|bytes|values?|messages?|examples?|keys?|cop(y|ies)|parts?|numbers?) an? {_UNITS}\b",
    "the current strategy, the fix, the API": r"\b(at home|in force|ways? out|word of|words of|the house|a room of|on the floor)\b",
    "is not a": r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b)[a-z]+",
    "except for, bit for bit, silently, sequentially": r"\b(but for|to the bit|in silence|in turn|beforehand|thereof|therein)\b",
    "the number of; a caller; no process": r"\b(so many|whoever|whatever it|whom|nobody|somebody)\b",
    "passes, returns, receives": r"\bhand(s|ed|ing)? (in|over|out|back|to)\b",
    "continues, resumes": r"\b(go|goes|going|went|gone) on\b",
    "topology devices": r"\b(described devices|devices that are not there)\b",
}
RULES = {advice: re.compile(pattern) for advice, pattern in PATTERNS.items()}


def without_code(text: str) -> str:
    """Returns `text` without doctests, and with a placeholder for code spans, links and quotations."""
    text = re.sub(r"^\s*(>>>|\.\.\.) .*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"``.*?``|`[^`]*`|https?://\S+|\"[^\"\n]*\"", "CODE", text)


def python_texts(source: str):
    """Yields the line and the text of each comment, docstring and other string of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def markdown_texts(source: str):
    """Yields the line and the text of each paragraph outside code blocks."""
    source = re.sub(
        r"^( *```).*?^\1", lambda block: "\n" * block[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL
    )
    line = 1
    for paragraph in source.split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def test_wording_is_plain():
    found = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for line, text in python_texts(source) if path.suffix == ".py" else markdown_texts(source):
            prose = " ".join(without_code(text).split())
            for advice, rule in RULES.items():
                found += [f"{path}:{line}: {match[0]!r}: {advice}" for match in rule.finditer(prose)]
    assert not found, "\n".join(found)
