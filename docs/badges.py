"""Draws the badges of the README from the project's own files; no service is asked.

python docs/badges.py
"""

import pathlib
import re
import tomllib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
HEIGHT, PADDING, PER_CHARACTER = 20, 7, 6.4  # pixels, at 11 pixels of font size


def badges() -> dict[str, str]:
    """Returns the SVG of each badge by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    tested = sorted(re.findall(r"^jax==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = (ROOT / "tests/parity/rows.txt").read_text(encoding="utf-8").splitlines()
    return {
        "python": _badge("Python", ", ".join(versions), "#0b7285"),
        "jax": _badge("JAX", " to ".join(tested), "#5f3dc4"),
        "licence": _badge("licence", project["license"], "#495057"),
        "conformance": _badge("tf.distribute", f"{len(rows)} behaviours compared", "#2b8a3e"),
    }


def _badge(label: str, value: str, color: str) -> str:
    left, right = (round(len(text) * PER_CHARACTER + 2 * PADDING) for text in (label, value))
    texts = "".join(
        f'<text x="{x + PADDING}" y="14" textLength="{width - 2 * PADDING}">{text}</text>'
        for x, width, text in ((0, left, label), (left, right, value))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{HEIGHT}" role="img" '
        f'aria-label="{label}: {value}">\n'
        f'<clipPath id="round"><rect width="{left + right}" height="{HEIGHT}" rx="3"/></clipPath>\n'
        f'<g clip-path="url(#round)"><rect width="{left}" height="{HEIGHT}" fill="#343a40"/>'
        f'<rect x="{left}" width="{right}" height="{HEIGHT}" fill="{color}"/></g>\n'
        f'<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">{texts}</g>\n</svg>\n'
    )


if __name__ == "__main__":
    (HERE / "pictures/badges").mkdir(exist_ok=True)
    for name, svg in badges().items():
        (HERE / f"pictures/badges/{name}.svg").write_text(svg)
