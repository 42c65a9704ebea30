"""Checks a release: `check_release.py SDIST WHEEL OTHER_WHEEL`, with one wheel from the sdist and one from the tree."""

import email
import pathlib
import sys
import tarfile
import zipfile

sdist, wheel, other_wheel = map(pathlib.Path, sys.argv[1:])
ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("jdist", "jdist_tools")


def contents(path: pathlib.Path) -> dict[str, bytes]:
    """Returns the files of a wheel."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


files = contents(wheel)
assert files == contents(other_wheel), "the wheel from the sdist differs from the wheel from the tree"

sources = {
    str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()
}
sources = {name for name in sources if "__pycache__" not in name}
in_wheel = {name for name in files if ".dist-info/" not in name}
assert in_wheel == sources, f"the wheel and the packages differ in {sorted(in_wheel ^ sources)}"
metadata = email.message_from_bytes(next(value for name, value in files.items() if name.endswith("dist-info/METADATA")))
assert (metadata["Name"], metadata["Version"]) == tuple(wheel.name.split("-")[:2]), metadata["Version"]
assert metadata["License-Expression"] == "Apache-2.0" and any(name.endswith("/licenses/LICENSE") for name in files)

with tarfile.open(sdist) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
    base = archive.getnames()[0].partition("/")[0]
assert base == f"jdist-{metadata['Version']}", base
others = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "pyproject.toml",
}
others.add(".gitignore")  # hatchling adds it
assert names == sources | others, f"the sdist has other files than expected: {sorted(names ^ (sources | others))}"
print(f"{wheel.name}: {len(files)} files; {sdist.name}: {len(names)} files")
