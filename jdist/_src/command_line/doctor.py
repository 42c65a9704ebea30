"""`jdist doctor`: checks of the installation, the machine and the cluster, for a bug report."""

import argparse
import json
import os

from jdist._src.command_line.doctor_checks import all_checks, read_environment
from jdist._src.command_line.verb import Verb


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the report of `jdist env`")


def _run(arguments: argparse.Namespace) -> int:
    report = read_environment(os.environ)
    checks = []
    for check in all_checks(os.environ, report):
        checks.append(check)
        if not arguments.json:
            print(f"{check.status:7}  {check.name}: {check.detail}{'. ' if check.advice else ''}{check.advice}")
            for note in check.notes:
                print("         -", note.partition(". ")[0].removesuffix("."), flush=True)
    if arguments.json:
        results = [{"name": c.name, "status": c.status} | c._asdict() for c in checks]
        print(json.dumps({"checks": results, "environment": report}, indent=2))
    return int(any(check.advice for check in checks))


DOCTOR = Verb(
    "check versions, devices, flags, the cluster, ports and collectives", "doctor --json", _add_arguments, _run
)
