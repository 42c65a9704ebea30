"""`import jdist` starts no backend and imports no optional package."""

import subprocess
import sys

CHECK = """
import sys
import jdist
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a backend has started"
heavy = "orbax grain rich flax sklearn matplotlib ray tensorflow torch".split()
assert not [name for name in heavy if name in sys.modules], [name for name in heavy if name in sys.modules]
print("imported", jdist.__version__)
"""


def test_import_in_fresh_process_starts_no_backend_and_imports_nothing_optional():
    done = subprocess.run([sys.executable, "-W", "error", "-c", CHECK], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("imported"), done.stderr
