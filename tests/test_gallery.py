"""Every example has a card and a thumbnail in the gallery."""

import pathlib
import re
import runpy

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs/thumbnails.py"))
PAGE = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
CARDS = re.findall(r":::\{grid-item-card\} .+\n:img-top: (\S+)\n:img-alt: .+\n:link: (\S+)\n", PAGE)


def test_every_example_has_a_card_with_its_thumbnail_and_a_link():
    source = "https://github.com/jdist/jdist/blob/main/"
    links = {path.stem: source + path.relative_to(ROOT).as_posix() for path in SCRIPT["EXAMPLES"]}
    links |= {path.stem: f"notebooks/{path.stem}" for path in SCRIPT["NOTEBOOKS"]}
    assert len(links) == len(CARDS) >= 16
    assert {pathlib.Path(thumbnail).stem: link for thumbnail, link in CARDS} == links


def test_thumbnails_are_small_and_none_is_left_over():
    files = {f"gallery/{path.name}": path.stat().st_size for path in (ROOT / "docs/gallery").iterdir()}
    assert set(files) == {thumbnail for thumbnail, _ in CARDS}
    assert all(0 < size < 60_000 for size in files.values())


def test_thumbnails_of_notebooks_show_their_outputs():
    checked = 0
    for path in SCRIPT["NOTEBOOKS"]:
        text, picture = SCRIPT["notebook_output"](path)
        if picture is None:
            assert (ROOT / f"docs/gallery/{path.stem}.svg").read_text() == SCRIPT["text_picture"](text), path
            checked += 1
    assert checked >= 4
