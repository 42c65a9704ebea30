"""Scalars for TensorBoard, read back from the files."""

import glob
import math
import struct
import sys

import numpy as np
import pytest

from jdist import callbacks

from small_loop import idle, place, train

ONE = place("one_device")


def _events(directory):
    """Yields the events of all files, in order. A record is: length, checksum, event, checksum."""
    from tensorboardX.proto import event_pb2

    for name in sorted(glob.glob(f"{directory}/*tfevents*")):
        with open(name, "rb") as file:
            while head := file.read(12):
                yield event_pb2.Event.FromString(file.read(struct.unpack("<Q", head[:8])[0]))
                file.read(4)


def _scalars(directory):
    return [
        (event.step, value.tag, value.simple_value) for event in _events(directory) for value in event.summary.value
    ]


def _run(directory, board_options=(), **options):
    pytest.importorskip("tensorboardX", reason="The extra `tensorboard` is not installed.")
    board = callbacks.TensorBoard(directory, **dict(board_options))
    return train(ONE, [board], state=0, call=idle, **{"logs": lambda step: {"loss": float(step)}, **options})


def test_log_contains_the_metrics_by_step(tmp_path):
    _run(tmp_path / "board", validation=lambda epoch: {"loss": 0.5})
    assert _scalars(tmp_path / "board") == [(3, "loss", 3), (3, "val_loss", 0.5), (6, "loss", 6), (6, "val_loss", 0.5)]


def test_log_contains_each_value_of_a_step_once(tmp_path):
    rate = lambda event: {"rate": 0.25}
    _run(tmp_path, board_options=dict(every=2, also=[rate]), epochs=1, steps=4, validation=lambda epoch: {"loss": 0.5})
    both = lambda step: [(step, "loss", step), (step, "rate", 0.25)]
    assert _scalars(tmp_path) == [*both(2), *both(4), (4, "val_loss", 0.5)]


def test_resumed_run_hides_later_steps_of_the_interrupted_run(tmp_path):
    _run(tmp_path, board_options=dict(every=1), epochs=1)
    _run(tmp_path, board_options=dict(every=1), epochs=1, start=1)
    starts = [event.step for event in _events(tmp_path) if event.session_log.status == 1]
    assert starts == [2]
    assert [step for step, *_ in _scalars(tmp_path)] == [1, 2, 3, 2, 3]


def test_log_contains_non_finite_values_and_only_scalars(tmp_path):
    _run(tmp_path, epochs=1, logs=lambda step: {"loss": math.nan, "table": np.zeros((2, 2)), "one": np.array(1.5)})
    ((_, name, value), one) = _scalars(tmp_path)
    assert (name, math.isnan(value), one) == ("loss", True, (3, "one", 1.5))


def test_log_is_complete_if_a_callback_raises(tmp_path):
    pytest.importorskip("tensorboardX", reason="The extra `tensorboard` is not installed.")

    def fails(event):
        if event.step == 2:
            raise OSError("The disk is full.")

    with pytest.raises(OSError, match="The disk is full"):
        train(ONE, [callbacks.TensorBoard(tmp_path, every=1), fails], state=0, call=idle)
    assert [step for step, *_ in _scalars(tmp_path)] == [1, 2]


def test_directory_that_cannot_be_made_raises_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"The directory '.*board' cannot be made: .*Pass another path"):
        _run(tmp_path / "file" / "board")


def test_missing_tensorboardx_raises_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ModuleNotFoundError, match=r'tensorboardX, .*: `python -m pip install "jdist\[tensorboard\]"`'):
        callbacks.TensorBoard("board")
