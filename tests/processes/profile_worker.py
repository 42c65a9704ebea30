"""Profiles of several processes."""

import pathlib
import time
import warnings

import jax
import numpy as np

import jdist
from jdist._src.profiling import profile as profile_module


def _steps(strategy, slow=None, seconds=0.0):
    step = strategy.step(lambda w, x: (w + jdist.all_reduce("mean", (x @ x.T).mean()), None))
    state, batch = strategy.put(0.0), strategy.split(np.ones((12, 8), np.float32))
    state, _ = step(state, batch)

    def run():
        nonlocal state
        for _ in range(5):
            time.sleep(seconds if jax.process_index() == slow else 0)
            state, _ = step(state, batch)

    return run


def straggler(folder, slow):
    """Returns the summary of steps before which process `slow` sleeps, as each process has it, and as it reads it."""
    run = _steps(jdist.MultiWorkerMirroredStrategy(), slow, 0.1)
    with jdist.profile(folder) as profile:
        run()
    jax.block_until_ready(jdist.MultiWorkerMirroredStrategy().run(lambda: jdist.all_reduce("sum", 1.0)))
    read = jdist.ProfileSummary.read(folder)
    files = sorted(str(file.parent.relative_to(folder)) for file in pathlib.Path(folder).rglob("*.xplane.pb"))
    if jax.process_index() == 0:
        (pathlib.Path(folder) / "summary.json").unlink()
        assert jdist.ProfileSummary.read(folder) == read
    return profile.summary.as_dict(), read == profile.summary, str(read), [file.split("/")[0] for file in files]


def examples(folder):
    """Returns the true examples of the replicas in the summary."""
    data = jdist.MultiWorkerMirroredStrategy().distribute_dataset(np.arange(10), batch_size=8, remainder="pad")
    with jdist.profile(folder) as profile:
        for _, weights in data:
            jax.block_until_ready(weights.tree)
    counts = profile.summary.examples
    return [counts[replica] for replica in sorted(counts)], profile.summary.imbalance


def error_in_block(folder):
    """Returns the missing processes where process 1 raises an error in the block, and of the next profile."""
    missing = []
    try:
        with jdist.profile(folder) as profile:
            if jax.process_index() == 1:
                raise OSError("The disk is full.")
        missing.append([*profile.summary.missing, len(profile.summary.processes)])
    except OSError as error:
        missing.append(str(error))
    with jdist.profile(folder) as profile:
        pass
    return [*missing, list(profile.summary.missing)]


def only_process_0(folder):
    """Returns the summary of process 0, which alone opens a profile, and its warning."""
    result = None
    if jax.process_index() == 0:
        profile_module._OTHERS_SECONDS = 2.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with jdist.profile(folder) as profile:
                time.sleep(0.01)
        result = (
            [str(warning.message) for warning in caught],
            [each.filename for each in caught],
            profile.summary.missing,
        )
        profile_module._OTHERS_SECONDS = 60.0
    return result


def process_that_is_killed(folder):
    """Returns the missing processes of the summary of process 0; the test kills process 1 in the block."""
    profile_module._OTHERS_SECONDS = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with jdist.profile(folder) as profile:
            if jax.process_index() == 1:
                (pathlib.Path(folder) / "in_block").touch()
                time.sleep(600)
    return list(profile.summary.missing)
