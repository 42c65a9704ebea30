"""The program `jdist`.

`jdist run` only starts processes, so it runs without the modules that `import jdist` imports.
"""

import importlib.util
import sys


def main() -> int:
    """Runs the command of `sys.argv`, and returns its exit status."""
    if sys.argv[1:2] != ["run"] or "jdist" in sys.modules:
        from jdist._src.command_line.main import main

        return main()
    spec = importlib.util.find_spec("jdist")
    assert spec is not None
    sys.modules["jdist"] = importlib.util.module_from_spec(spec)  # not executed
    from jdist._src.command_line.run import RUN
    from jdist._src.command_line.verb import run_verb

    return run_verb("run", RUN, sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
