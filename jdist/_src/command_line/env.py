"""`jdist env`: versions, devices and settings, for a bug report."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jdist._src.command_line.start_devices import start_devices
from jdist._src.command_line.verb import Verb
from jdist._src.core.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "chex", "orbax-checkpoint")
_OPTIONAL_PACKAGES = ("equinox", "grain", "keras", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VARIABLES = re.compile(r"(JAX|XLA|JDIST)_", re.ASCII)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|(API|ACCESS|PRIVATE|ENCRYPTION)_?KEY|_KEY$")
_SECRET_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)|(?<=\?)\S+=\S+")  # user and password; a signed query


def describe_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the sections of the report with their names. JAX starts for the last section only.

    Values that look like passwords or keys are replaced by `(hidden)`, and the home directory by `~`.

    Args:
        environ: The environment variables.
    """
    versions = {"jdist": __version__, "python": platform.python_version()}
    for package in (*_PACKAGES, *_OPTIONAL_PACKAGES):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in _PACKAGES:
                versions[package] = "not installed"
    yield "versions", versions
    yield "system", {"platform": platform.platform(), "machine": platform.machine(), "cpus": os.cpu_count()}
    flags = {name: list(map(_without_secrets, environ[name].split())) for name in _FLAGS if environ.get(name)}
    yield "flags", flags
    names = sorted(name for name in environ if _VARIABLES.match(name) and name not in _FLAGS)
    hide = lambda name: "(hidden)" if _SECRET_NAME.search(name) else _without_secrets(environ[name])
    yield "variables", {name: hide(name) for name in names}
    try:
        devices = start_devices()
    except RuntimeError as error:  # such as a TPU that another process uses: the reason for the bug report
        yield "devices", {"error": " ".join(_without_secrets(str(error)).split())}
        return
    yield (
        "devices",
        {
            "platform": jax.default_backend(),
            "kinds": dict(Counter(device.device_kind for device in devices)),
            "count": len(devices),
            "local_count": jax.local_device_count(),
            "processes": jax.process_count(),
            "process_index": jax.process_index(),
        },
    )


def _without_secrets(text: str) -> str:
    text = _SECRET_IN_URL.sub("(hidden)", text)
    home = str(pathlib.Path.home())
    return text.replace(home, "~") if len(home) > 1 else text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace) -> int:
    sections = describe_environment(os.environ)
    if arguments.json:
        print(json.dumps(dict(sections), indent=2))
        return 0
    for name, facts in sections:
        print(f"{name}:" if facts else f"{name}: none", flush=True)  # if JAX then hangs, this much is printed
        for key, value in facts.items():
            print(f"  {key}: {_text(value)}", flush=True)
    return 0


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"\n    {flag}" for flag in value)
    return ", ".join(f"{count} x {kind}" for kind, count in value.items()) if isinstance(value, dict) else str(value)


ENV = Verb("print versions, devices, flags and variables for a bug report", "env --json", _add_arguments, _run)
