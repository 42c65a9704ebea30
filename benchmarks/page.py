"""Runs the benchmarks, stores their rows in docs/benchmarks.json, and renders docs/benchmarks.md and its figure.

    python benchmarks/page.py benchmarks [--quick]   # scripts whose peers are hand-written programs
    python benchmarks/page.py peers                  # scripts with peers in TensorFlow, Keras, torch or orbax
    python benchmarks/page.py policies               # bytes and loss of the policies, for docs/sync.md
    python benchmarks/page.py render                 # only the pages and the figure, from the stored rows

`nox -s benchmarks` and `nox -s peers` make the environments and run the first two. Each replaces its section of the page, or
with `--only SCRIPT ...` these scripts in it. Other options are passed to every script; without options they are `--quick`.
"""

import argparse
import ast
import datetime
import html
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parent / "docs"
POLICIES = DOCS / "policies.json"
LIBRARIES = ("jdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-cpu", "keras", "torch")
# Scripts of `peers` with their options. The options of the command line follow.
PEERS = (
    "devices.py --rounds 5",
    "multi_process.py --processes 2 4 --rounds 5",
    "input.py --case arrays --rounds 9",
    "parameter_server.py --rounds 9",
    "first_step.py",
    "recovery.py --case kill --rounds 3",
    "checkpoint.py --rounds 9",
)
SECTIONS = {
    "benchmarks": ("Against hand-written programs", "python -m nox -s benchmarks"),
    "peers": ("Peers", "python -m nox -s peers"),
}
# Peers that do less work than a correct program: their rows are limits, and no losses.
LIMITS = ("alone", "torch alone", "not fed", "TCP", "copy", "no proof", "without weights")
FIGURE, POLICIES_FIGURE = "pictures/benchmarks_scaling.svg", "pictures/policies.svg"
INTRODUCTION = """# Benchmarks

This page is generated from `docs/benchmarks.json` by `benchmarks/page.py`.

A **ratio** is the rate of jdist divided by the rate of the peer: higher is better, 1 is equal. Each round measures all
candidates once, in random order, and gives one ratio. A row has the median over the rounds and the quartiles. It is **slower**
if even the upper quartile is below 1, and faster if the lower quartile is above 1; otherwise the difference is within the
spread. A *limit* is a peer that does less work than a correct program, such as a step without reduction. The times are medians
per step, or per measurement where a case is one. The text of each script in `benchmarks/` describes its cases and peers.
"""


# ---- Rows to Markdown


def verdict(row):
    """Returns how a row compares: `slower`, `faster`, `limit`, or an empty string for a difference within the spread."""
    if row["peer"] in LIMITS:
        return "limit"
    return "**slower**" if row["high"] < 1 else "faster" if row["low"] > 1 else ""


def duration(microseconds):
    """Returns a time with three digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("us", 1)):
        if microseconds >= size or unit == "us":
            return f"{microseconds / size:.3g} {unit}"


def table(headings, rows):
    """Returns a Markdown table; numbers are aligned by the style of the page."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def ratio_table(rows):
    """Returns the table of rows with a ratio."""
    cells = [
        (
            row["case"],
            row["peer"],
            f"{row['ratio']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            duration(row["microseconds"]) if "microseconds" in row else "",
            duration(row["microseconds"] * row["ratio"]) if "microseconds" in row else "",
            row.get("rounds", ""),
            verdict(row),
        )
        for row in rows
    ]
    return table(("case", "peer", "ratio", "quartiles", "jdist", "peer's time", "rounds", ""), cells)


def parts_table(rows):
    """Returns the table of the parts of a recovery, in seconds."""
    names = list(dict.fromkeys(name for row in rows for parts in row["seconds"].values() for name in parts))
    cells = [
        (row["case"], candidate, *(f"{parts[name]:.2f}" if name in parts else "" for name in names))
        for row in {row["case"]: row for row in rows}.values()
        for candidate, parts in row["seconds"].items()
    ]
    return table(("case", "seconds of", *names), cells)


def memory_table(rows):
    """Returns the table of the memory per device."""
    cells = [(row["strategy"], row["devices"], *(f"{row[name] / 1e6:.1f}" for name in MEMORY)) for row in rows]
    return table(("strategy", "devices", *(f"{name}, MB" for name in MEMORY)), cells)


MEMORY = ("state", "step", "init", "host")


def run_text(run):
    """Returns the part of the page for one script."""
    rows = [row for row in run["rows"] if "ratio" in row]
    parts = [f"### {run['title']}", f"```sh\n{run['command']}\n```"]
    if rows:
        parts.append(ratio_table(rows))
    for kind, draw in (("seconds", parts_table), ("strategy", memory_table)):
        if some := [row for row in run["rows"] if kind in row]:
            parts.append(draw(some))
    parts += [f"- not run: {row['skipped']}" for row in run["rows"] if "skipped" in row]
    if "failed" in run:
        parts.append(f"- **failed**: `{run['failed']}`")
    if not run["rows"] and "failed" not in run:
        parts.append("- not run")
    return "\n\n".join(parts)


def when(run):
    """Returns the date, the commit and the load average of a run."""
    return f"{run['date']}, {run['commit']}, {run['load']}"


def section_text(name, section):
    """Returns a section of the page."""
    title, command = SECTIONS[name]
    if not section["runs"]:
        return f"## {title}\n\nNot run yet: `{command}`."
    rows = [(run, row) for run in section["runs"] for row in run["rows"] if "ratio" in row]
    slower = sorted((row["ratio"], run["script"], row) for run, row in rows if "slower" in verdict(row))
    faster = sum(verdict(row) == "faster" for _, row in rows)
    limits = sum(verdict(row) == "limit" for _, row in rows)
    machine = section["machine"]
    facts = [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}"),
        ("versions", ", ".join(f"{library} {version}" for library, version in section["versions"].items())),
        ("date, commit, load before", "; ".join(dict.fromkeys(map(when, section["runs"])))),
        ("command", f"`{command}`, {sum(one['seconds'] for one in section['runs']) / 60:.0f} minutes"),
    ]
    parts = [
        f"## {title}",
        table(("", ""), facts),
        f"{len(rows)} rows: jdist is faster in {faster}, slower in {len(slower)}, {limits} are limits, and in the others the "
        "difference is within the spread.",
    ]
    if slower:
        lost = [(f"`{script}`", row["case"], row["peer"], f"{ratio:.2f}") for ratio, script, row in slower]
        parts += ["Rows in which jdist is slower:", table(("script", "case", "peer", "ratio"), lost)]
    if name == "peers" and rates(section):
        parts.append(
            f"![Steps per second against the number of devices and of processes.]({FIGURE})\n\n"
            "Steps per second of the rows below. The batch of all devices is constant, and all devices share the cores of one "
            "machine, so a flat line is the best possible result. `large` is a transformer of 10.7 million parameters."
        )
    return "\n\n".join([*parts, *map(run_text, section["runs"])])


def render(document):
    """Returns the page for the stored rows of all sections."""
    sections = [section_text(name, document.get(name, {"runs": []})) for name in SECTIONS]
    return "\n\n".join([INTRODUCTION.strip(), *sections]) + "\n"


def policies_table(results):
    """Returns the table of docs/sync.md for the results of examples/policies.py."""
    cells = [
        (
            f"`{name}`",
            f"{one['loss']:.4f}",
            f"{one['loss'] / results['mean']['loss'] - 1:+.1%}",
            f"{one['sent'] / 1e3:,.1f}",
            f"{one['collectives']:.2f}",
        )
        for name, one in results.items()
    ]
    return table(("policy", "loss", "to `mean`", "kB sent", "collectives"), cells)


def with_policies(text, results):
    """Returns the text of docs/sync.md with the figure and the table of the results."""
    start, end = "<!-- policies -->\n", "<!-- end of policies -->"
    before, after = text.partition(start)[0], text.partition(end)[2]
    return f"{before}{start}\n{OF_POLICIES}\n{policies_table(results)}\n\n{end}{after}"


OF_POLICIES = """![The held-out loss of each policy against the bytes that a replica sends per step.](pictures/policies.svg)

The figure and the table (`python benchmarks/page.py policies`) are of 512 steps on 4 CPU devices, with the same data and
seed for all policies. The loss is the mean over the held-out windows, in nats per character, and then its difference to
`mean`. Bytes and collectives are per step and replica. XLA's CPU compiler reduces bfloat16 in float32, and sends float32: on
GPUs and TPUs `in_dtype(bfloat16)` sends half the bytes. The learning rate is the same for all except DiLoCo, and is not tuned
per policy. One model and one seed do not rank the policies in general.
"""


# ---- The figure


def rates(section):
    """Returns steps per second, by panel `(model, unit)`, candidate, and number of devices or processes."""
    panels = {}
    for run in section["runs"]:
        for row in run["rows"]:
            matched = re.fullmatch(r"(mlp|cnn|transformer|large), (\d+) (devices|processes)", row.get("case", ""))
            if matched and "microseconds" in row:
                model, count, unit = matched.groups()
                panel = panels.setdefault((model, unit), {})
                panel.setdefault("jdist", {})[int(count)] = 1e6 / row["microseconds"]
                panel.setdefault(row["peer"], {})[int(count)] = 1e6 / row["microseconds"] / row["ratio"]
    return panels


def draw(panels, path):
    """Draws the rates against the number of devices and of processes, for light and dark pages."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "jdist", "font.size": 9})
    from matplotlib import pyplot

    units = [unit for unit in ("devices", "processes") if any(key[1] == unit for key in panels)]
    models = {unit: [model for model, other in panels if other == unit] for unit in units}
    columns = max(map(len, models.values()))
    figure, axes = pyplot.subplots(
        len(units), columns, figsize=(3 * columns, 2.5 * len(units)), squeeze=False, layout="constrained"
    )
    colors = {"jdist": "#d1632a"}
    for row, unit in zip(axes, units, strict=True):
        for axis in row[len(models[unit]) :]:
            axis.set_axis_off()
        for axis, model in zip(row, models[unit], strict=False):
            axis.set_title(f"{model}, {unit}", loc="left", fontsize=10)
            for candidate, points in panels[model, unit].items():
                color = colors.setdefault(candidate, f"C{len(colors) - 1 if len(colors) < 2 else len(colors)}")
                width = 2.4 if candidate == "jdist" else 1.2
                axis.plot(
                    *zip(*sorted(points.items()), strict=True), "o-", ms=3, lw=width, color=color, label=candidate
                )
            axis.set_xscale("log", base=2)
            axis.set_xticks(sorted({n for one in panels[model, unit].values() for n in one}))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axis.set_ylim(bottom=0)
            axis.grid(True, color="#e5e9f0")
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("steps per second")
    handles = {}
    for axis in axes.flat:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 5), frameon=False
    )
    figure.savefig(path, metadata={"Date": None, "Description": json.dumps(flat(panels))})


def stored_data(figure):
    """Returns the panels that the text of a figure stores."""
    description = re.search(r"<dc:description>(.*?)</dc:description>", figure, re.DOTALL)[1]
    return json.loads(html.unescape(description))


def flat(panels):
    """Returns the panels with strings as keys and four digits per rate, as the figure stores them in its description."""
    return {
        ", ".join(panel): {
            candidate: {str(count): float(f"{rate:.4g}") for count, rate in sorted(points.items())}
            for candidate, points in candidates.items()
        }
        for panel, candidates in panels.items()
    }


# ---- Running


def machine():
    """Returns the processor, the number of cores that this process may use, the memory and the system."""
    cpu = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*: (.*)", info.read_text())):
        cpu = found[1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "memory": f"{memory:.0f} GiB", "system": f"Python {platform.python_version()}"}


def versions():
    """Returns the versions of the installed libraries."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit():
    """Returns the commit, and whether files differ from it."""
    git = lambda *words: subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", "jdist", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def own_scripts():
    """Returns the other scripts of this folder that print rows, with options, except the script for accelerators."""
    others = {pathlib.Path(__file__).name, "accelerator.py", *(line.split()[0] for line in PEERS)}
    texts = {path.name: path.read_text() for path in sorted(HERE.glob("*.py")) if path.name not in others}
    return [
        f"{name} --rounds 9" if "sidebyside.parser" in text else name
        for name, text in texts.items()
        if "parse_args()" in text
    ]


def run(line, options):
    """Runs a script; returns its title, command, rows and time, and the last line of its error."""
    script, *words = line.split()
    words += options
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # or each process compiles all modules again
    start, load = time.monotonic(), round(os.getloadavg()[0])
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words, "--json"],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env=environment,
    )
    title = ast.get_docstring(ast.parse((HERE / script).read_text())).splitlines()[0]
    rows = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    found = {
        "script": script,
        "title": f"`{script}`: {title}",
        "command": " ".join(["python", f"benchmarks/{script}", *words]),
        "rows": [row for row in rows if "versions" not in row],
        "seconds": round(time.monotonic() - start),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "load": load,
    }
    if done.returncode:
        sys.stderr.write(done.stderr)
        found["failed"] = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return found


def measure(name, options, only, stored):
    """Runs the scripts of a section, or only some of them; returns the section with these and the stored ones."""
    runs = {one["script"]: one for one in stored["runs"]} if only else {}
    lines = {line.split()[0]: line for line in (PEERS if name == "peers" else own_scripts())}
    for script in only or lines:
        print(f"{lines[script]} ...", end=" ", flush=True)
        runs[script] = run(lines[script], options)
        print("failed" if "failed" in runs[script] else f"{runs[script]['seconds']} s", flush=True)
    ordered = [runs[script] for script in lines if script in runs]
    return {"machine": machine(), "versions": versions(), "runs": ordered}


def rounded(value):
    """Returns the value with floats of four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def as_json(document):
    """Returns the text of a JSON file with one line per row."""
    text = json.dumps(document, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), text) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=[*SECTIONS, "policies", "render"])
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", help="run only these scripts of the section")
    args, options = parser.parse_known_args()
    stored = DOCS / "benchmarks.json"
    document = json.loads(stored.read_text()) if stored.exists() else {}
    if args.section == "policies":
        files = ["--json", str(POLICIES), "--plot", str(DOCS / POLICIES_FIGURE)]
        subprocess.run([sys.executable, str(HERE.parent / "examples/policies.py"), *files, *options], check=True)
    elif args.section != "render":
        document[args.section] = rounded(
            measure(args.section, options or ["--quick"], args.only, document.get(args.section, {"runs": []}))
        )
        stored.write_text(as_json(document))
    if POLICIES.exists():
        sync = DOCS / "sync.md"
        sync.write_text(with_policies(sync.read_text(), json.loads(POLICIES.read_text())))
    (DOCS / "benchmarks.md").write_text(render(document))
    if panels := rates(document.get("peers", {"runs": []})):
        draw(panels, DOCS / FIGURE)
    sys.exit(any("failed" in run for run in document.get(args.section, {"runs": []})["runs"]))


if __name__ == "__main__":
    main()
