"""Full disks, folders that cannot be written to, and damaged files: the errors, and that training can continue."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import optax
import pytest

import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.manifest import to_text, with_fingerprint
from jdist._src.checkpoint.storage import CheckpointError

from laws import STRATEGIES

draw = np.random.default_rng(0).normal
STATE = {"w": draw(size=(64, 64)).astype(np.float32), "n": np.int32(1)}


@pytest.fixture
def one():
    return STRATEGIES["one_device"]()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder, strategy = tmp_path_factory.mktemp("saved"), STRATEGIES["one_device"]()
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, strategy.put({"w": STATE["w"]}), {"batch": step})
    return folder


@pytest.fixture
def run(tmp_path, saved):
    """A folder with checkpoints of steps 1, 2 and 3."""
    return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


def damage(run, step, kind):
    """Damages the arrays of a checkpoint, or its manifest."""
    files = [path for path in (run / f"{step}/arrays").rglob("*") if path.is_file()]
    path = (
        max(files, key=lambda path: path.stat().st_size) if kind == "arrays" else run / f"{step}/manifest/manifest.json"
    )
    path.write_bytes(path.read_bytes()[:100])


def write_later_version(run):
    path = run / "3/manifest/manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 99').replace(jdist.__version__, "9.8.7"))


def change_fingerprint(run):
    """Changes the fingerprint of a leaf, and writes the manifest with the fingerprint of its new content."""
    path = run / "3/manifest/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["leaves"][0].update(fingerprint=123)
    path.write_text(to_text(with_fingerprint(manifest)))


@pytest.mark.parametrize("change, step, message", [
    (lambda run: damage(run, 1, "manifest"), 1, r"step 1 in .* is damaged.*JSONDecodeError.*does not contain an earlier checkpoint\."),
    (write_later_version, 3, r"written by jdist 9\.8\.7 in format 99\. jdist .* reads formats up to 2\. Install jdist 9\.8\.7 or later\."),
    (change_fingerprint, 3, r"ValueError: The bits of state/w are not the saved ones\."),
    (lambda run: (run / "3").rename(run / "8"), 8, "step 8 in .* is damaged.*manifest is of step 3, but the folder is named 8"),
], ids=["first", "later_version", "changed_bits", "renamed"])  # fmt: skip
def test_error_of_a_checkpoint_that_cannot_be_read(change, step, message, run, one):
    change(run)
    with pytest.raises(CheckpointError, match=message):
        Checkpointer(run).restore(one, step=step)


EDITS = {
    "step": ('"step": 3,', '"step": 4,'),
    "position": ('{"batch": 3}', '{"batch": 9}'),
    "extra": ('"value": 0.5', '"value": 0.25'),
    "dtype": ('"dtype": "float32"', '"dtype": "flo!t32"'),
    "other_dtype": ('"dtype": "float32"', '"dtype": "int32"'),
    "aggregation": ('"aggregation": "SUM"', '"aggregation": "MEAN"'),
    "wrapper": ('"SyncOnRead": ', '"SyncOnWrite": '),
    "format": ('"format": 2', '"format": 1'),
    "fingerprint": ('"fingerprint": "sha256:', '"fingerprint": "sha255:'),
    "name_of_the_fingerprint": ('"fingerprint": "sha256:', '"gingerprint": "sha256:'),
}


@pytest.fixture(scope="module")
def summed(tmp_path_factory):
    """A folder with a checkpoint of step 3, with a `SyncOnRead` SUM in the state, and `extra`."""
    folder, strategy = tmp_path_factory.mktemp("summed"), STRATEGIES["mirrored_2"]()
    with Checkpointer(folder) as checkpointer:
        state = {"n": jdist.SyncOnRead(np.float32([1, 2]), "sum")}
        checkpointer.save(3, strategy.put(state), {"batch": 3}, extra={"best": 0.5})
    return folder


@pytest.mark.parametrize("old, new", EDITS.values(), ids=EDITS)
def test_edited_manifest_is_refused(old, new, summed, tmp_path, two):
    shutil.copytree(summed, tmp_path / "run")
    path = tmp_path / "run/3/manifest/manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(
        CheckpointError, match=r"step 3 in .* is damaged.*The manifest was changed after it was written"
    ):
        Checkpointer(tmp_path / "run").restore(two)


@pytest.mark.parametrize("old, new, error", [
    ('"dtype": "float32"', '"dtype": "flo!t32"', "TypeError: data type 'flo!t32' not understood"),
    ('"aggregation": "SUM"', '"aggregation": "SUN"', "ValueError: .*SUN"),
    (None, None, None),
])  # fmt: skip
def test_checkpoint_of_format_1_is_restored_and_one_with_invalid_names_is_a_checkpoint_error(
    old, new, error, summed, tmp_path, two
):
    shutil.copytree(summed, tmp_path / "run")
    path = tmp_path / "run/3/manifest/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["fingerprint"]
    text = to_text({**manifest, "format": 1})
    path.write_text(text if old is None else text.replace(old, new))
    checkpointer = Checkpointer(tmp_path / "run")
    if old is None:
        restored = checkpointer.restore(two)
        assert float(jdist.read_values(restored.state["n"])) == 3 and restored.extra == {"best": 0.5}
        return
    with pytest.raises(CheckpointError, match=rf"step 3 in .* is damaged.*{error}"):
        checkpointer.restore(two)


def test_folder_without_manifest_is_named_in_a_warning_and_its_step_can_be_saved_again(run, one):
    (run / "3/manifest/manifest.json").unlink()
    with Checkpointer(run) as checkpointer:
        message = (
            rf"{run}/3 is damaged: manifest/manifest\.json is missing\. The newest complete .* is that of step 2\."
        )
        with pytest.warns(UserWarning, match=message):
            restored = checkpointer.restore(one)
        assert restored.step == 2
        assert checkpointer.save(3, one.put({"w": -STATE["w"]}), {"batch": 30})
        restored = checkpointer.restore(one)
        assert restored.step == 3 and restored.data_position == {"batch": 30}
        assert (np.asarray(restored.state["w"]) == -STATE["w"]).all()
        assert checkpointer.save(4, one.put({"w": STATE["w"]}))
    assert checkpointer.steps() == (2, 3, 4) and (run / "3.damaged/arrays").is_dir()


def test_checkpoint_whose_manifest_is_lost_is_saved_again_by_the_same_checkpointer(run, one):
    with Checkpointer(run, keep=2) as checkpointer:
        checkpointer.save(4, one.put({"w": STATE["w"]}))
        checkpointer.wait()
        (run / "4/manifest/manifest.json").unlink()
        assert checkpointer.save(4, one.put({"w": STATE["w"]})) and checkpointer.save(5, one.put({"w": STATE["w"]}))
    assert checkpointer.steps() == (4, 5)


def test_folder_without_manifest_is_named_in_the_error_if_there_is_no_complete_checkpoint(run, one):
    for step in (1, 2, 3):
        (run / f"{step}/manifest/manifest.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint in .*/3 does not contain manifest/manifest\.json\."
    ):
        Checkpointer(run).restore(one)


def test_error_of_a_truncated_file_says_what_to_do_and_the_next_save_of_its_step_replaces_it(run, one):
    damage(run, 3, "arrays")
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(one)
        for text in (
            f"checkpoint of step 3 in {run} is damaged",
            "Earlier complete checkpoints: steps 1, 2.",
            "`restore(strategy, step=2)`",
            f"delete {run / '3'}.",
            "The next `save` of this `Checkpointer` renames the damaged folder to 3.damaged",
        ):
            assert text in str(error.value)
        restored = checkpointer.restore(one, step=2)
        assert restored.data_position == {"batch": 2}
        assert checkpointer.save(3, restored.state) and checkpointer.restore(one).step == 3
        assert not checkpointer.save(3, restored.state)
    assert checkpointer.steps() == (1, 2, 3) and (run / "3.damaged").is_dir()


FLIPPED = """
import pathlib, random, sys
import jdist
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.storage import CheckpointError
draw, tries = random.Random(int(sys.argv[2])), int(sys.argv[3])
strategy, checkpointer = jdist.OneDeviceStrategy("cpu:0"), Checkpointer(sys.argv[1])
saved = checkpointer.restore(strategy).state["w"].tobytes()
files = sorted(path for path in pathlib.Path(sys.argv[1], "3", "arrays").rglob("*") if path.is_file())
refused = 0
for _ in range(tries):
    path = draw.choice([path for path in files if path.stat().st_size])
    content = path.read_bytes()
    number = draw.randrange(len(content))
    path.write_bytes(content[:number] + bytes([content[number] ^ 1 << draw.randrange(8)]) + content[number + 1 :])
    try:
        restored = checkpointer.restore(strategy).state
        assert restored["w"].tobytes() == saved
    except CheckpointError:
        refused += 1
    path.write_bytes(content)
print(refused)
"""


def in_another_process(code, *args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed


@pytest.mark.parametrize("seed, tries", [(0, 10), pytest.param(1, 60, marks=pytest.mark.slow)])
def test_flipped_bit_of_any_file_is_refused_or_has_no_effect(seed, tries, run):
    # In another process, because orbax and tensorstore print about damaged files.
    assert int(in_another_process(FLIPPED, run, seed, tries).stdout) > 3


@pytest.fixture
def mounted(tmp_path):
    """Mounts a small file system in memory, if that is permitted, and unmounts it afterwards."""
    mount_points = []

    def mount(name, options):
        (tmp_path / name).mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path / name)]
        try:
            failed = subprocess.run(command, capture_output=True).returncode
        except FileNotFoundError:
            failed = True
        if failed:
            pytest.skip("This process is not permitted to mount a file system, so none can be full or read-only.")
        mount_points.append(tmp_path / name)
        return tmp_path / name

    yield mount
    for folder in mount_points:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_is_an_error_and_training_continues(mounted, one):
    folder = mounted("small", "size=3m")
    train = one.step(lambda state: ({**state, "n": state["n"] + 1}, None))
    small, large = one.put(STATE), one.put({"w": draw(size=(2000, 1000)).astype(np.float32), "n": np.int32(1)})
    with Checkpointer(folder, keep=None) as checkpointer:
        checkpointer.save(1, small)
        checkpointer.save(2, large)
        large, _ = train(large)
        message = r"checkpoint of step 2 could not .*No space left.*Complete checkpoints: step 1\. The training state"
        with pytest.raises(CheckpointError, match=message):
            checkpointer.save(3, large)
        large, _ = train(large)
        assert int(large["n"]) == 3
        assert checkpointer.save(3, small) and checkpointer.save(4, small)
        checkpointer.wait()
        assert checkpointer.steps() == (1, 3, 4) and checkpointer.restore(one).state["n"] == 1
        assert sorted(child.name for child in folder.iterdir()) == ["1", "3", "4", "jdist.json"]


def test_folder_that_cannot_be_written_to_is_an_error_and_can_be_read(mounted, one):
    folder = mounted("locked", "size=3m")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, one.put(STATE))
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*new: Read-only file system\. Pass a folder"):
        Checkpointer(folder / "new")
    with Checkpointer(folder) as checkpointer:
        state = checkpointer.restore(one).state
        with pytest.raises(CheckpointError, match="checkpoint of step 2 could not be .*Read-only file system"):
            checkpointer.save(2, state)
        assert state["n"] == 1 and checkpointer.steps() == (1,)


def test_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/run: Not a directory\. Pass a folder"):
        Checkpointer(tmp_path / "file" / "run")


MANY_ARRAYS = """
import pathlib, sys
import numpy as np, jdist
from jdist._src.checkpoint.checkpointer import Checkpointer
strategy, checkpointer = jdist.OneDeviceStrategy("cpu:0"), Checkpointer(sys.argv[1])
draw = np.random.default_rng(0).normal
checkpointer.save(1, strategy.put({f"w{i}": draw(size=(64, 64)).astype(np.float32) for i in range(30)}))
checkpointer.close()
files = [path for path in pathlib.Path(sys.argv[1], "1", "arrays", "ocdbt.process_0", "d").iterdir()]
refused = 0
for path in files * 2:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    try:
        checkpointer.restore(strategy)
    except jdist.CheckpointError:
        refused += 1
    path.write_bytes(content)
print(refused)
"""


@pytest.mark.slow
def test_damaged_file_of_many_arrays_prints_nothing_on_stderr(tmp_path):
    completed = in_another_process(MANY_ARRAYS, tmp_path)
    assert int(completed.stdout) >= 3 and completed.stderr == ""


LIMITED = """
import resource, signal, sys
import numpy as np, jdist
from jdist._src.checkpoint.checkpointer import Checkpointer
from jdist._src.checkpoint.storage import CheckpointError
strategy = jdist.OneDeviceStrategy("cpu:0")
draw = np.random.default_rng(0).normal
state = strategy.put({f"{name}": draw(size=(1000, 1000)).astype(np.float32) for name in "abcdew"})
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, state)
checkpointer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
checkpointer.save(2, state)
try:
    checkpointer.wait()
except CheckpointError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpointer.save(3, state)
checkpointer.close()
print(checkpointer.steps(), float(state["w"].sum()) == float(checkpointer.restore(strategy).state["w"].sum()))
"""


@pytest.mark.slow
def test_file_that_may_not_grow_is_an_error_and_the_next_save_succeeds(tmp_path):
    completed = in_another_process(LIMITED, tmp_path)
    error, last = completed.stdout.splitlines()
    assert "checkpoint of step 2 could not be written" in error and "File too large" in error
    assert last == "(1, 3) True"
    assert completed.stderr == ""
    assert not pathlib.Path(tmp_path / "2").exists()


@pytest.mark.parametrize("kind", ["arrays", "manifest"])
def test_fallback_restores_the_newest_checkpoint_that_can_be_read_and_says_so(kind, run, one, caplog):
    damage(run, 3, kind)
    with Checkpointer(run, fallback=True) as checkpointer:
        restored = checkpointer.restore(one)
        assert (restored.step, restored.data_position, checkpointer.latest) == (2, {"batch": 2}, 2)
        (record,) = caplog.records
        text = record.getMessage()
        assert text.startswith(f"The checkpoint of step 3 in {run} is damaged or cannot be read: "), text
        assert text.endswith(". Falling back to the checkpoint of step 2."), text
        assert sorted(path.name for path in run.iterdir()) == ["1", "2", "3", "jdist.json"]
        with pytest.raises(CheckpointError, match="of step 3 in"):
            checkpointer.restore(one, step=3)  # a step that the program names
        checkpointer.save(3, restored.state)
    assert sorted(path.name for path in run.iterdir()) == ["1", "2", "3", "3.damaged", "jdist.json"]
    with Checkpointer(run) as checkpointer:
        assert checkpointer.restore(one).step == 3


def test_fallback_does_not_hide_other_errors(run, one, caplog):
    with Checkpointer(run, fallback=True) as checkpointer:
        with pytest.raises(ValueError, match="does not match `like`"):
            checkpointer.restore(one, like={"v": STATE["w"]})
        for step in (1, 2, 3):
            damage(run, step, "arrays")
        with pytest.raises(CheckpointError, match="of step 1 in .* does not contain an earlier checkpoint"):
            checkpointer.restore(one)
    assert [record.getMessage().rpartition(". ")[2] for record in caplog.records] == [
        "Falling back to the checkpoint of step 2.",
        "Falling back to the checkpoint of step 1.",
    ]


def test_fit_resumes_from_an_older_checkpoint_with_fallback(tmp_path, one):
    trainer = jdist.Trainer(
        (lambda key, x: np.zeros(3, np.float32), lambda w, x: x @ w), optax.sgd(0.1), optax.squared_error, strategy=one
    )
    data = (np.ones((8, 3), np.float32), np.ones(8, np.float32))

    def fit(steps, **options):
        with Checkpointer(tmp_path, every=1, **options) as checkpointer:
            callbacks = [jdist.callbacks.Checkpoint(checkpointer)]
            return trainer.fit(
                data, batch_size=2, steps=steps, epochs=None, callbacks=callbacks, resume=checkpointer, progress="off"
            )

    fit(4)
    damage(tmp_path, 4, "arrays")
    with pytest.raises(CheckpointError, match=r"pass `resume=Checkpointer\(path, fallback=True\)`, or delete"):
        fit(6)
    resumed = fit(6, fallback=True)
    whole = trainer.fit(data, batch_size=2, steps=6, epochs=None, progress="off")
    assert (resumed.state.params == whole.state.params).all() and int(resumed.state.step) == 6
    assert (tmp_path / "4.damaged").exists()
