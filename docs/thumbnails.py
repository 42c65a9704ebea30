"""Makes the thumbnails of the gallery from the output of the examples.

python docs/thumbnails.py               # all; the scripts run, which takes a few minutes
python docs/thumbnails.py policies 05   # those of the examples whose names contain one of these words

The thumbnail of a notebook is its first plot, or else the text that it prints: notebooks contain their outputs. A script runs,
and its thumbnail is the plot that it writes, a curve of the numbers that it prints, or its last lines.
"""

import base64
import html
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs/gallery"
EXAMPLES = [*sorted(ROOT.glob("examples/*.py")), *sorted(ROOT.glob("examples/*/test_*.py"))]
NOTEBOOKS = sorted(ROOT.glob("examples/notebooks/*.ipynb"))
# Options of scripts, which make some of them shorter.
_POLICIES = ["mean", "in_dtype(bfloat16)", "int8", "top_k(0.1)", "power_sgd(16)", "local_sgd(8)", "diloco(16)"]
OPTIONS = {
    "policies": ["--policy", *_POLICIES, "--steps", "128", "--plot", "plot.png"],
    "recommender": ["--users", "10000", "--epochs", "6"],
}
# The title of a curve, the pattern of a number in the output, and the text after the last number.
CURVES = {
    "cartpole": ("Mean length of the episodes, every 10 updates", r"that ended +([\d.]+)", "Proved"),
    "digits": ("Test accuracy in %, per epoch, 8 replicas", r"test accuracy ([\d.]+)%", "The same seed"),
    "digits_fit": ("Validation accuracy per epoch", r"(?m)^epoch .* val_accuracy ([\d.]+)", "Test accuracy"),
    "text_lm": (
        "Mean loss of the epoch so far, in bits per character",
        r"(?m)^step .*? loss ([\d.]+)",
        "All requested",
    ),
}
WIDTH, LINES, COLUMNS = 480, 11, 58


def run(path: pathlib.Path) -> tuple[str, bytes | None]:
    """Returns the output of a script and the picture that it writes."""
    command = (
        [sys.executable, "-m", "pytest", "-q", "-rA", path] if path.name.startswith("test_") else [sys.executable, path]
    )
    columns = COLUMNS + 60 * path.name.startswith("test_")  # pytest prints a path before the name of each test
    variables = {"COLUMNS": str(columns), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS.get(path.stem, [])
        done = subprocess.run(
            [*command, *options], cwd=folder, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
        )
        plot = pathlib.Path(folder, "plot.png")
        text = re.sub(r"(?m)^PASSED \S*?::", "passed ", re.sub(r"(?m)^(\d+ passed) .*", r"\1", done.stdout))
        return text, plot.read_bytes() if plot.exists() else None


def notebook_output(path: pathlib.Path) -> tuple[str, bytes | None]:
    """Returns the longest printed text of a notebook, or all if each is short, and its first picture."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    texts = ["".join(output["text"]) for output in outputs if output["output_type"] == "stream"]
    longest = max(texts, key=len)
    text = longest if longest.count("\n") >= LINES // 2 else "\n".join(texts)
    return "\n".join(text.splitlines()[:LINES]), base64.b64decode("".join(pictures[0])) if pictures else None


def text_picture(text: str) -> str:
    """Returns an SVG of the last lines of `text`."""
    rows = [line.rstrip() for line in text.splitlines() if line.strip()][-LINES:]
    rows = [(row if len(row) <= COLUMNS else re.sub(r"(?<=\S) {3,}", "  ", row))[:COLUMNS] for row in rows]
    height = 20 * LINES + 14
    spans = "\n".join(
        f'<text x="10" y="{24 + 20 * i}" xml:space="preserve">{html.escape(row)}</text>' for i, row in enumerate(rows)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="13" '
        f'fill="#dfe3e8">\n<rect width="{WIDTH}" height="{height}" fill="#23272e"/>\n{spans}\n</svg>\n'
    )


def curve(title: str, numbers: list[float]) -> str:
    """Returns an SVG of a curve through `numbers`."""
    height, left, top, bottom = 244, 46, 34, 26
    low, high = min(numbers), max(numbers)
    x = [left + i * (WIDTH - left - 16) / (len(numbers) - 1) for i in range(len(numbers))]
    y = [height - bottom - (n - low) / (high - low) * (height - top - bottom) for n in numbers]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fcfcfb"/>\n'
        f'<text x="{left}" y="20" font-weight="bold">{html.escape(title)}</text>\n'
        f'<path d="M{left} {top} V{height - bottom} H{WIDTH - 16}" fill="none" stroke="#888"/>\n'
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high:.3g}</text>\n'
        f'<text x="{left - 6}" y="{height - bottom}" text-anchor="end">{low:.3g}</text>\n'
        f'<polyline points="{points}" fill="none" stroke="#1f6f8b" stroke-width="2.5"/>\n</svg>\n'
    )


def small_picture(content: bytes) -> bytes:
    """Returns a PNG of the width of a thumbnail, with a palette."""
    from PIL import Image

    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    result = io.BytesIO()
    picture.quantize(128, Image.Quantize.MAXCOVERAGE).save(result, "PNG", optimize=True)
    return result.getvalue()


def thumbnail(name: str, text: str, picture: bytes | None) -> tuple[str, bytes]:
    """Returns the suffix and the content of the thumbnail of an example with this output."""
    if picture:
        return ".png", small_picture(picture)
    if name in CURVES:
        title, pattern, end = CURVES[name]
        numbers = [float(number) for number in re.findall(pattern, text.partition(end)[0])]
        return ".svg", curve(title, numbers).encode()
    return ".svg", text_picture(text).encode()


def main(words: list[str]) -> None:
    """Writes the thumbnails of the examples whose names contain one of `words`, or all."""
    FOLDER.mkdir(exist_ok=True)
    for path in [*NOTEBOOKS, *EXAMPLES]:
        if not words or any(word in path.stem for word in words):
            output = notebook_output(path) if path in NOTEBOOKS else run(path)
            suffix, content = thumbnail(path.stem, *output)
            target = FOLDER / f"{path.stem}{suffix}"
            target.write_bytes(content)
            print(target.relative_to(ROOT), f"{len(content) / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
