"""Time of `import jdist` against `import jax, optax`, each in a fresh process.

python benchmarks/import_time.py [--quick] [--json]
"""

import subprocess
import sys

import sidebyside

IMPORTS = {"jdist": "import jdist", "import jax, optax": "import jax, optax"}


def main():
    args = sidebyside.parser("The time of an import, in a fresh process.").parse_args()
    sidebyside.versions(args.json)

    def fresh(line):
        return lambda: sidebyside.seconds(lambda: subprocess.run([sys.executable, "-c", line], check=True))

    candidates = {name: fresh(line) for name, line in IMPORTS.items()}
    taken = sidebyside.rounds(candidates, args.rounds or (2 if args.quick else 21))
    sidebyside.report("import", taken, args.json)


if __name__ == "__main__":
    main()
