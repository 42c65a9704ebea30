"""`jdist.profile`: the summary of known workloads, in processes with the real profiler."""

import os
import pathlib

import jax
import pytest

import jdist
from jdist._src.profiling import profile as profile_module

from laws import among, each_row

PARTS = "compute", "exposed_collectives", "input", "compile", "host"
PLACES = {
    "one_device": 1, "mirrored_2": 2, "mirrored_3": 3, "mirrored_8": 8, "sharded_4": 4, "central_2": 2, "virtual": 2, "debug": 1,
    "parameter_server": 1,
}  # fmt: skip  # the least number of devices that compute


@pytest.fixture(scope="module")
def one():
    """Returns one process with eight devices."""
    with jdist.testing.processes(1, devices_per_process=8, timeout=300) as one:
        yield lambda function, *arguments: one.run(f"profiling.profile_worker:{function}", *arguments)[0]


def check_laws(summary):
    """Asserts what holds for every summary of one process."""
    (process,) = summary["processes"]
    for device in summary["devices"]:
        assert sum(device[part] for part in PARTS) == pytest.approx(process["seconds"], abs=1e-6)
        assert min(device[part] for part in PARTS) >= 0
        assert device["exposed_collectives"] <= device["collectives"] + 1e-9
    if summary["devices"]:
        assert sum(summary["parts"].values()) == pytest.approx(1)
    assert process["working"] <= process["seconds"]
    for name in ("input", "dispatch", "compile"):
        assert 0 <= process[name] <= process["seconds"]
    times = [operation["seconds"] for operation in summary["operations"]]
    assert times == sorted(times, reverse=True)
    assert summary["stragglers"] == () and summary["missing"] == ()
    assert "xprof --logdir=" in summary["text"] and "ui.perfetto.dev" in summary["text"]


@pytest.mark.parametrize("strategy", among(PLACES, "one_device", "mirrored_3", "sharded_4", "central_2", "virtual"))
def test_steps_of_every_strategy_have_a_summary(strategy, one, tmp_path):
    summary = one("steps_of_strategy", tmp_path, strategy, "dict")
    check_laws(summary)
    assert len(summary["devices"]) >= PLACES[strategy]
    assert all(device["compute"] > 0 for device in summary["devices"])
    assert summary["parts"]["compile"] > 0
    assert any("laws.py:" in (operation["source"] or "") for operation in summary["operations"])
    parts = len(summary["examples"])
    assert set(summary["examples"].values()) == {4 * 24 / parts}
    assert summary["imbalance"] == 1
    if strategy in ("mirrored_3", "mirrored_8", "central_2"):
        assert sum(device["collectives"] for device in summary["devices"]) > 0
        assert any(operation["is_collective"] for operation in summary["operations"])


@pytest.mark.parametrize("state", among(["optax", "flax_train_state", "jdist_train_state", "nnx", "policy"], "nnx"))
def test_steps_of_every_kind_of_state_have_a_summary(state, one, tmp_path):
    summary = one("steps_of_strategy", tmp_path, "mirrored_2", state)
    check_laws(summary)
    assert summary["parts"]["compile"] > 0 < summary["parts"]["compute"]


def test_several_steps_per_call(one, tmp_path):
    summary = one("several_steps_per_call", tmp_path)
    check_laws(summary)
    assert summary["processes"][0]["compile"] == 0
    assert sum(summary["examples"].values()) == 3 * 24
    collectives = [operation for operation in summary["operations"] if operation["is_collective"]]
    assert max(operation["count"] for operation in collectives) == 3 * 2  # steps and devices


def test_trainer_and_callback(one, tmp_path):
    callback, block = one("trainer", tmp_path)
    for summary in (callback, block):
        check_laws(summary)
        assert summary["parts"]["compute"] > 0
    # Three steps, and the batches that the loop draws for them.
    assert set(callback["examples"].values()) == {6}
    assert sum(block["examples"].values()) == 24


def test_the_slowest_operation_is_the_large_product_with_its_line(one, tmp_path):
    summary, line = one("plain_jax", tmp_path)
    check_laws(summary)
    slowest = summary["operations"][0]
    assert slowest["source"].endswith(line)
    assert (slowest["count"], slowest["program"]) == (5, "jit_products")
    assert slowest["path"].startswith("jit(products)/dot_general")
    assert slowest["share"] == pytest.approx(slowest["seconds"] / summary["seconds"], rel=1e-3)
    assert summary["parts"]["compile"] == 0
    assert summary["parts"]["compute"] == max(summary["parts"].values())
    assert "profile_worker.py" in summary["text"]


def test_a_slow_source_is_the_largest_part(one, tmp_path):
    summary = one("slow_source", tmp_path)
    check_laws(summary)
    assert summary["parts"]["input"] == max(summary["parts"].values())
    assert summary["processes"][0]["input"] > 0.3  # of 24 x 0.02 s


def test_tracing_and_compilation_are_the_largest_part(one, tmp_path):
    summary = one("compilation", tmp_path)
    check_laws(summary)
    assert summary["processes"][0]["compile"] > 0.3  # the function sleeps as long, while it is traced
    assert summary["parts"]["compile"] == max(summary["parts"].values())


def test_collectives_in_loops_and_branches_are_not_computation(one, tmp_path):
    summary = one("loop_with_collectives", tmp_path)
    check_laws(summary)
    collectives = [operation for operation in summary["operations"] if operation["is_collective"]]
    assert sorted(operation["count"] for operation in collectives) == [2, 2, 8]
    assert all("profile_worker.py:" in operation["source"] for operation in collectives)
    assert not any(operation["path"].endswith(("/while", "/cond")) for operation in summary["operations"])


def test_a_block_without_operations_has_a_summary(one, tmp_path):
    summary = one("nothing", tmp_path)
    check_laws(summary)
    assert summary["devices"] == summary["operations"] == ()
    assert summary["seconds"] >= 0.01
    assert "no operations ran in" in summary["text"]


PADDED = {
    "rest": ("mirrored_2", 10, 4, {}),
    "every batch": ("mirrored_3", 20, 10, {}),
    "empty replicas": ("mirrored_8", 3, 8, {}),
    "one replica of four devices": ("sharded_4", 10, 8, {}),
    "cached": ("mirrored_2", 10, 4, {"cache": "device"}),
    "full": ("mirrored_2", 8, 4, {}),
}


@pytest.mark.parametrize("case", PADDED.values(), ids=PADDED)
def test_examples_without_padding_are_counted_per_replica(case, one, tmp_path):
    examples, counts, imbalance = one("examples_of", tmp_path, *case)
    assert examples == {str(replica): count for replica, count in enumerate(counts)}
    assert imbalance == pytest.approx(max(counts) * len(counts) / sum(counts))
    assert sum(counts) == case[1]


def test_wrong_uses_raise_and_leave_no_trace_open(one, tmp_path):
    messages = one("errors", tmp_path)
    assert messages["nested"].startswith("RuntimeError: A profile is open already, since ")
    assert "profile_worker.py:" in messages["nested"] and "End it before the next one starts." in messages["nested"]
    assert "RuntimeError: The profile cannot start (" in messages["beside_jax"]
    assert "end the other trace of `jax.profiler` first" in messages["beside_jax"]
    assert messages["in_block"] == "OSError: The disk is full."
    assert any(name.endswith(".xplane.pb") for name in messages["files"]) and "summary.json" not in messages["files"]
    assert messages["summary"].endswith("has no summary: no block of it has ended without an error.")
    assert messages["not_ended"].endswith("has no summary: its block has not ended.")
    assert "ValueError: The directory" in messages["file_in_the_way"] and "ran" not in messages


def test_a_second_profile_in_a_directory_replaces_the_summary(one, tmp_path):
    summary = one("rerun", tmp_path)
    check_laws(summary)


def test_a_trace_of_jax_has_a_summary_and_a_damaged_one_an_error(one, tmp_path):
    path, summary = one("trace_of_jax", tmp_path)
    assert summary["parts"]["compute"] > 0
    assert any("profile_worker.py:" in (operation["source"] or "") for operation in summary["operations"])
    file = pathlib.Path(path)
    data = file.read_bytes()
    metadata = data.index(b"Hlo Proto")
    damages = {
        "empty": (b"", "has no events"),
        "text": (b"<html>not found</html>", "is damaged"),
        "half": (data[: len(data) // 2], "is damaged"),
        "last byte": (data[:-1], "is damaged"),
        "metadata": (data[: metadata + 400] + b"\xff" * 200 + data[metadata + 600 :], "is damaged"),
    }
    for damaged, message in damages.values():
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message) as error:
            jdist.ProfileSummary.read(tmp_path)
        assert str(file) in str(error.value)


def test_directories_without_a_summary_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains neither summary.json nor a trace"):
        jdist.ProfileSummary.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="contains neither summary.json nor a trace"):
        jdist.ProfileSummary.read(tmp_path / "missing")
    for text in ("", "{", "[]", '{"logdir": ""}', '{"logdir": "", "devices": [{"unknown": 1}]}'):
        (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=r"summary\.json is not the summary of a profile: .*Remove it"):
            jdist.ProfileSummary.read(tmp_path)


WRONG_DIRECTORIES = [
    (3, TypeError, "`logdir` must be a path, got int"),
    ("", ValueError, "`logdir` must not be empty"),
    ("gs://bucket/logs", ValueError, "`logdir` must be a path of a local file system, got the URL 'gs://bucket/logs'"),
]


@each_row("logdir, error, message", WRONG_DIRECTORIES)
def test_wrong_directories_raise(logdir, error, message):
    with pytest.raises(error, match=message):
        jdist.profile(logdir)


def test_a_directory_that_is_not_writable_raises_before_the_block(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    ran = False
    with pytest.raises(ValueError, match="is not writable"), jdist.profile(tmp_path):
        ran = True
    assert not ran and profile_module._open_at is None


def test_a_profiler_that_writes_no_trace_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    with pytest.raises(FileNotFoundError, match="has not written a trace to"), jdist.profile(tmp_path):
        pass
    assert profile_module._open_at is None


def test_a_profile_that_was_not_entered_has_no_summary():
    with pytest.raises(RuntimeError, match="The profile in logs has no summary: no block of it has ended"):
        jdist.profile("logs").summary  # noqa: B018
