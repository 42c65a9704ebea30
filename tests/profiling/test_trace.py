"""Traces of accelerators, synthesized in the form that XLA writes; there is no accelerator for the tests."""

import jax
import jax.numpy as jnp
import pytest

from jdist._src.profiling.hlo_metadata import read_modules
from jdist._src.profiling.summary import ProfileSummary
from jdist._src.profiling.trace import read_trace

US = 1_000_000  # picoseconds
MS = 1e-3


def _line(name, events, metadata):
    """Returns a line of events `(name, start, end)` in milliseconds, with statistics as further items."""
    text = f'lines {{ name: "{name}" timestamp_ns: 0 '
    for event, start, end, *stats in events:
        number = metadata.setdefault(event, len(metadata) + 1)
        values = "".join(f"stats {{ metadata_id: {key} {value} }} " for key, value in stats)
        text += f"events {{ metadata_id: {number} offset_ps: {int(start * 1000 * US)} "
        text += f"duration_ps: {int((end - start) * 1000 * US)} {values}}} "
    return text + "} "


def _plane(name, lines, stat_names=(), event_stats=None):
    """Returns a plane, given its lines by name; `event_stats` are texts of statistics by the name of the event."""
    metadata = {}
    text = "".join(_line(line, events, metadata) for line, events in lines.items())
    for event in event_stats or {}:
        metadata.setdefault(event, len(metadata) + 1)
    for event, number in metadata.items():
        stats = (event_stats or {}).get(event, "")
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" {stats} }} }} '
    for number, stat in enumerate(stat_names, 1):
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{stat}" }} }} '
    return f'planes {{ name: "{name}" {text}}} '


HOST = _plane(
    "/host:CPU",
    {
        "python": [
            ("jdist.profile", 0, 100, (1, "int64_value: 0"), (2, "int64_value: 1")),
            ("jdist.input", 0, 30),
            ("jdist.compile", 20, 20, (3, 'str_value: "0.012"')),
            ("jdist.batch", 30, 30, (4, 'str_value: "0:8 1:4"')),
            ("jdist.batch", 60, 60, (4, 'str_value: "0:8 1:8"')),
        ]
    },
    ["process", "num_processes", "seconds", "examples"],
)


def _serialized(text):
    return jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)


def _read(tmp_path, *planes):
    file = tmp_path / "plugins/profile/run/host.xplane.pb"
    file.parent.mkdir(parents=True)
    file.write_bytes(_serialized("".join(planes)))
    return ProfileSummary.read(tmp_path)


def _times(device):
    names = "compute", "collectives", "exposed_collectives", "input", "compile", "host"
    return {name: pytest.approx(getattr(device, name) / MS, abs=1e-6) for name in names}


def test_tpu(tmp_path):
    lines = {
        "Steps": [("0", 0, 100)],
        "XLA Modules": [("jit_step(7)", 30, 90)],
        "XLA Ops": [
            ("%while.3 = (s32[], f32[8]) while(%tuple.1), condition=%c, body=%b", 30, 60),
            ("%fusion.1 = f32[8]{0:T(8,128)} fusion(%p0), kind=kLoop, calls=%fused", 30, 50),
            ("%all-gather-start = (f32[4], f32[8]) all-gather-start(%p1)", 50, 51),
            ("%fusion.2 = f32[8] fusion(%p0), kind=kOutput, calls=%fused.2", 51, 55),
            ("%all-gather-done = f32[8] all-gather-done(%all-gather-start)", 55, 60),
            ("%all-reduce.1 = f32[8] all-reduce(%fusion.2), to_apply=%add", 60, 70),
            ("%copy-done = f32[8] copy-done(%copy-start)", 70, 71),
        ],
        "Async XLA Ops": [("%all-gather-start = (f32[4], f32[8]) all-gather-start(%p1)", 50, 60), ("%copy-start = f32[8] copy-start(%p0)", 30, 99)],
        "TC Overlay": [("overlay", 0, 100)],
    }  # fmt: skip
    planes = [_plane("/device:TPU:0", lines), _plane("/device:TPU:0 SparseCore 0", {"XLA Ops": lines["XLA Ops"]})]
    summary = _read(tmp_path, HOST, *planes, _plane("/device:CUSTOM:Megascale Trace", lines))
    (device,) = summary.devices
    assert device.device == "tpu:0"
    # 30-50, 51-55, 70-71; collectives 50-70; compilation 8-20; input 0-8 and 20-30; the host the rest, 71-100.
    assert _times(device) == {
        "compute": 25, "collectives": 20, "exposed_collectives": 16, "input": 18, "compile": 12, "host": 29
    }  # fmt: skip
    assert [operation.name for operation in summary.operations][:3] == ["fusion.1", "all-gather-start", "all-reduce.1"]
    assert not any(operation.name.startswith(("while", "copy-start")) for operation in summary.operations)
    assert {operation.name for operation in summary.operations if operation.is_collective} == {
        "all-gather-start", "all-gather-done", "all-reduce.1"
    }  # fmt: skip
    assert (summary.examples, summary.imbalance) == ({0: 16, 1: 12}, 16 / 14)


def test_gpu(tmp_path):
    def stats(op):
        return (1, f'str_value: "{op}"'), (2, 'str_value: "jit_step"'), (3, "int64_value: 7")

    lines = {
        "Stream #20(Compute)": [
            ("loop_add_fusion", 30, 50, *stats("loop_add_fusion")),
            ("nvjet_hsh_128x256", 50, 60),  # of a command buffer: without its operation
            ("loop_add_fusion_1", 70, 80, *stats("loop_add_fusion.1")),
        ],
        "Stream #22(Comm)": [("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 55, 72, *stats("all-reduce-start"))],
        "Stream #14(MemcpyH2D)": [("MemcpyH2D", 0, 30)],
        "XLA Modules": [("jit_step(7)", 0, 100)],
    }
    names = "hlo_op", "hlo_module", "program_id"
    summary = _read(tmp_path, HOST, _plane("/device:GPU:0", lines, names), _plane("/device:GPU:1", lines, names))
    assert [device.device for device in summary.devices] == ["gpu:0", "gpu:1"]
    for device in summary.devices:
        assert _times(device) == {
            "compute": 40, "collectives": 17, "exposed_collectives": 10, "input": 18, "compile": 12, "host": 20
        }  # fmt: skip
    slowest = summary.operations[0]
    assert (slowest.name, slowest.program, slowest.count) == ("loop_add_fusion", "jit_step", 2)
    assert slowest.seconds == pytest.approx(40 * MS)
    assert slowest.share == pytest.approx(0.2)
    (collective,) = (operation for operation in summary.operations if operation.is_collective)
    assert collective.name == "all-reduce-start"


def _field(number, data):
    """Returns a field with a length of a protocol buffer."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def _metadata(modules):
    """Returns the plane with the HLO modules, given by the names of their programs."""
    escape = lambda data: "".join(f"\\{byte:03o}" for byte in data)
    stats = {
        name: f'stats {{ metadata_id: 1 bytes_value: "{escape(_field(1, hlo))}" }}' for name, hlo in modules.items()
    }
    return _plane("/host:metadata", {}, ["Hlo Proto"], stats)


def _compiled(fn, x):
    (module,) = jax.jit(fn).lower(x).compile().runtime_executable().hlo_modules()
    return module.as_serialized_hlo_module_proto()


def test_an_operation_of_a_tpu_has_the_line_of_its_program(tmp_path):
    x = jnp.ones((4, 4))
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        first = _compiled(lambda x: jnp.tanh(x @ x), x)
        second = _compiled(lambda x: jnp.tanh(x @ x), x)
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
    programs = {"jit_f(3)": first, "jit_g(5)": second}
    module = read_modules(_serialized(_metadata(programs)))["jit_f(3)"]
    name = next(name for name in module._instructions if module.facts(name).opcode == "tanh")
    event = f"%{name} = f32[4,4] tanh(%p)"
    stats = {event: "stats { metadata_id: 1 uint64_value: 5 }"}
    device = _plane("/device:TPU:0", {"XLA Ops": [(event, 40, 50)]}, ["program_id"], stats)
    (operation,) = _read(tmp_path, HOST, device, _metadata(programs)).operations
    assert (operation.program, operation.path.endswith("/tanh")) == ("jit_g", True)
    line = test_an_operation_of_a_tpu_has_the_line_of_its_program.__code__.co_firstlineno + 5
    assert operation.source.endswith(f"test_trace.py:{line}")


def test_an_executable_of_the_cache_has_the_module_with_its_operations(tmp_path):
    """Its events have the number of the process that compiled it, which another program of this name may have here."""
    x = jnp.ones((4, 4))
    other, executed = _compiled(lambda x: x + 1, x), _compiled(lambda x: jnp.tanh(x @ x), x)
    modules = {"jit_f(3)": other, "jit_f(5)": executed}
    names = [name for name in read_modules(_serialized(_metadata(modules)))["jit_f(5)"]._instructions]
    stats = (2, 'str_value: "jit_f"'), (3, "int64_value: 3"), (4, "int64_value: 1")
    events = [(name, 40 + i, 41 + i, (1, f'str_value: "{name}"'), *stats) for i, name in enumerate(names)]
    host = _plane("/host:CPU", {"thread": events}, ["hlo_op", "hlo_module", "program_id", "device_ordinal"])
    summary = _read(tmp_path, host, _metadata(modules))
    assert [device.device for device in summary.devices] == ["cpu:1"]
    assert any(operation.path.endswith("/dot_general") for operation in summary.operations)


def test_a_missing_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        read_trace(tmp_path / "missing.xplane.pb")
