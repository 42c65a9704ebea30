"""pytest plugin of jdist: `jdist_devices = 8` in the configuration of pytest gives JAX eight CPU devices in the tests.

Without that line the plugin is inactive; pytest loads it in every session. The page "Testing" of the documentation describes
it.
"""

import os
import re
import sys
import types
from collections.abc import Generator
from typing import Any

import pytest

_DEVICES = pytest.StashKey[int]()
_IS_CHECKED = pytest.StashKey[bool]()
_XLA_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
# Reasons such as "needs 8 devices" and "not enough devices", and not "needs a GPU device".
_FEW_DEVICES = re.compile(
    r"(?=.*\bdevices?\b)(?!.*\b(gpus?|tpus?|cuda|rocm|accelerators?)\b).*(\d|enough|insufficient|multiple|several)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares `jdist_devices`."""
    parser.addini("jdist_devices", "number of CPU devices that JAX has in the tests (jdist)")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Sets the number of CPU devices before any conftest.py or test is imported."""
    if not (value := str(early_config.getini("jdist_devices") or "")):
        return
    if not re.fullmatch(r"[1-9]\d*", value):
        raise pytest.UsageError(f"`jdist_devices` must be an integer >= 1, got {value!r}.")
    count = early_config.stash[_DEVICES] = int(value)
    os.environ["JAX_NUM_CPU_DEVICES"] = value
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules:  # it has read the environment variables already
        _update_jax(early_config, count)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Returns the line of the header: the number of devices, and the setting that is not used."""
    if (count := config.stash.get(_DEVICES, None)) is None:
        return None
    return f"jdist: {count} CPU devices (jdist_devices){_unused_flag(count)}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Repeats the line of the header with `-q`, which hides the header, if a setting is not used."""
    if config.get_verbosity() < 0 and (line := pytest_report_header(config)) and "XLA_FLAGS" in line:
        terminalreporter.write_line(line)


def _unused_flag(count: int) -> str:
    flag = _XLA_FLAG.search(os.environ.get("XLA_FLAGS", ""))
    return f"; `{flag[0]}` in XLA_FLAGS is not used" if flag and int(flag[1]) != count else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fails if JAX has started with another number of devices."""
    _check_devices(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fails if the test has started JAX with another number of devices."""
    result = yield
    _check_devices(item.config)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Reports a test that is skipped for lack of devices as failed."""
    report = yield
    return _without_skip(item.config, report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Reports a module that is skipped for lack of devices as failed."""
    report = yield
    return _without_skip(collector.config, report)


def _without_skip(config: pytest.Config, report: Any) -> Any:
    count = config.stash.get(_DEVICES, None)
    if (
        count is None
        or report.outcome != "skipped"
        or hasattr(report, "wasxfail")
        or not isinstance(report.longrepr, tuple)
    ):
        return report
    path, line, reason = report.longrepr
    if _FEW_DEVICES.match(reason.lower()):
        report.outcome = "failed"
        report.longrepr = (
            f"{path}:{line}: {reason}\nThe test was skipped for lack of devices, which is an error with "
            f"`jdist_devices = {count}`. Increase `jdist_devices`, or deselect the test."
        )
    return report


def _update_jax(config: pytest.Config, count: int) -> None:
    import jax

    from jdist._src.core.jax_compat import has_backend

    if not has_backend():
        jax.config.update("jax_num_cpu_devices", count)
        if not jax.config.values["jax_platforms"]:
            jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    elif problem := _wrong_devices(count):
        raise pytest.UsageError(
            f"`jdist_devices = {count}` is too late: {problem} before pytest read its configuration. JAX was imported by "
            f"{_importer_of_jax(config)}. Load it later, or remove the call that starts JAX there."
        )


def _check_devices(config: pytest.Config) -> None:
    count = config.stash.get(_DEVICES, None)
    if count is None or "jax" not in sys.modules or config.stash.get(_IS_CHECKED, False):
        return
    from jdist._src.core.jax_compat import has_backend

    if not has_backend():
        return
    if problem := _wrong_devices(count):
        pytest.fail(
            f"`jdist_devices = {count}`, but {problem}. Remove the calls of `jdist.use_cpu_devices` and "
            '`jax.config.update("jax_num_cpu_devices", ...)`, and other settings of `JAX_PLATFORMS`, from conftest.py and the '
            "tests.",
            pytrace=False,
        )
    config.stash[_IS_CHECKED] = True


def _wrong_devices(count: int) -> str:
    """Returns how JAX has started, if it does not have `count` CPU devices, or at least as many accelerators; else ""."""
    import jax

    platform, actual = jax.default_backend(), jax.local_device_count()
    if actual == count or (platform != "cpu" and actual > count):
        return ""
    return f"JAX has started with {actual} {platform.upper()} device{'s' * (actual != 1)}"


def _importer_of_jax(config: pytest.Config) -> str:
    """Returns the plugin that has imported JAX: `sys.modules` is in the order in which imports ended."""
    plugins = {plugin.__name__ for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, types.ModuleType)}
    later = list(sys.modules)[list(sys.modules).index("jax") :]
    name = next((name for name in later if name in plugins), None)
    return f"the plugin `{name}`" if name and "pytest" not in later else "the program that started pytest"
