"""XLA flags that each platform's maintainers recommend to overlap communication with computation, and a limit for collectives.

No flag is set unless `XlaFlags.apply` is called: a flag can change memory use and compile time.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

from jdist._src.core import jax_compat
from jdist._src.core.rendering import html_of
from jdist._src.core.tree import one_line

_WIDTH = 300  # of a table in a notebook, in characters: no link is folded


@dataclass(frozen=True)
class XlaFlag:
    """An XLA flag.

    Attributes:
        name: The name without dashes.
        value: The recommended value, which differs from the default.
        reason: The effect on data-parallel training.
        link: The page that recommends it.
    """

    name: str
    value: bool | int
    reason: str
    link: str

    def __str__(self) -> str:
        return f"--{self.name}={str(self.value).lower()}"


@dataclass(frozen=True, repr=False)
class XlaFlags:
    """The recommended flags for a platform. `str` returns them as the value of `variable`; rich and notebooks show a table.

    Attributes:
        platform: The platform.
        variable: The environment variable for the flags. TPU flags are read by libtpu from `LIBTPU_INIT_ARGS`; in `XLA_FLAGS`
            they are unknown, and JAX terminates the process on an unknown flag.
        flags: The flags.

    Example:
        >>> [flag.name for flag in xla_flags("tpu").flags]
        ['xla_tpu_enable_data_parallel_all_reduce_opt',
         'xla_tpu_data_parallel_opt_different_sized_ops']
    """

    platform: str
    variable: str
    flags: tuple[XlaFlag, ...] = ()

    @property
    def compiler_options(self) -> dict[str, bool | int]:
        """The flags as options for one program: the argument `compiler_options` of `jax.jit` and of `lowered.compile`."""
        return {flag.name: flag.value for flag in self.flags}

    def apply(self) -> None:
        """Adds the flags to the environment variable, before JAX reads it. Flags that are set already keep their value.

        Raises:
            RuntimeError: JAX's backends have started, so the variable has been read.
            ValueError: `XLA_FLAGS` is the path of a file of flags.

        Warns:
            UserWarning: A flag is set already, to another value than the recommended one.
        """
        if not self.flags:
            return
        if jax_compat.flags_are_read(self.variable):
            raise RuntimeError(
                f"`{self.variable}` is read once, when JAX starts its backends, and they have started. Call `apply()` before "
                "the first array, `jax.devices()` or strategy, or pass `compiler_options` of these flags to `jax.jit`."
            )
        current = os.environ.get(self.variable, "").strip()
        if self.variable == "XLA_FLAGS" and current and not current.startswith("-"):
            raise ValueError(
                f"`XLA_FLAGS` is {current!r}, a file that XLA reads its flags from. Add to that file: {self}"
            )
        values = _parse_flags(current)
        for flag in self.flags:
            if str(values.get(flag.name, flag.value)) != str(flag.value):
                warnings.warn(
                    f"`{self.variable}` sets `{flag.name}` to {values[flag.name]!r}, which is not changed. Recommended for "
                    f"{self.platform} is `{flag}`: {flag.reason}",
                    stacklevel=2,
                )
        missing = [str(flag) for flag in self.flags if flag.name not in values]
        os.environ[self.variable] = " ".join([current, *missing]).strip()

    def __str__(self) -> str:
        return " ".join(map(str, self.flags))

    def __repr__(self) -> str:
        count = "1 flag" if len(self.flags) == 1 else f"{len(self.flags)} flags"
        return f"XlaFlags({self.platform}, {count} for {self.variable})"

    def __rich__(self) -> Any:
        from rich.table import Column, Table  # imported only to print

        if not self.flags:
            return f"No flags are recommended for {self.platform}."
        heads = "flag", "reason", "recommended by"
        columns = [Column(head, overflow="fold") for head in heads]  # long cells are folded, not truncated
        table = Table(*columns, title=f"{self.variable} for {self.platform}")
        for flag in self.flags:
            table.add_row(str(flag), flag.reason, flag.link)
        return table

    def _repr_html_(self) -> str:
        return html_of(self, _WIDTH)


_TOOLBOX = "https://docs.nvidia.com/jax-toolbox/"
_XLA_PROTO = "https://github.com/openxla/xla/blob/main/xla/xla.proto"
_GUIDANCE = "https://openxla.org/xla/flags_guidance"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/05d3525e83/benchmarks/xla_flags_library.py"

# Not included, although the pages name them: flags that are on by default now (asynchronous collectives, their priority,
# pipelined reduce-scatter); sizes that depend on the model (when to combine collectives); and
# `xla_gpu_enable_pipelined_all_reduce` and `..._all_gather`, which only move collectives of a loop and are not compiler options
# in newer versions.
_GPU = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts an all-reduce as early as possible and waits for it as late as possible, with computation in between",
        _TOOLBOX + "environment-variables",
    ),
    XlaFlag(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "unrolls loops, such as scanned layers, by two, so that collectives of one iteration overlap with the next",
        _TOOLBOX + "performance-profiling/gpu-performance",
    ),
    XlaFlag(
        "xla_gpu_nccl_termination_timeout_seconds",
        1200,
        "ends the process if a collective of NCCL takes longer (seconds; twice the time limit of jdist); by default never",
        _XLA_PROTO,
    ),
)
_TPU = (
    XlaFlag(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        True,
        "overlaps the all-reduces of data parallelism over the network between slices",
        _MAXTEXT,
    ),
    XlaFlag(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        True,
        "the same in loops for gradients of different sizes; may use more memory",
        _MAXTEXT,
    ),
)
# These require `xla_tpu_enable_async_collective_fusion`, which is on by default.
_TPU_V5E = (
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        "runs parts of an all-reduce inside concurrent computations; other generations reject the flag",
        _GUIDANCE,
    ),
    XlaFlag(
        "xla_enable_async_all_reduce",
        True,
        "makes all-reduces asynchronous; without it the flag above has no effect",
        _MAXTEXT,
    ),
)
_RECOMMENDED = {
    "cpu": ("XLA_FLAGS", ()),
    "cuda": ("XLA_FLAGS", _GPU),
    "gpu": ("XLA_FLAGS", _GPU),
    "tpu": ("LIBTPU_INIT_ARGS", _TPU),
    "tpu v5e": ("LIBTPU_INIT_ARGS", _TPU + _TPU_V5E),
}


def xla_flags(platform: str) -> XlaFlags:
    """Returns the flags that the maintainers of a platform's compiler recommend for data-parallel training.

    For GPUs one of them limits the time of NCCL's collectives.

    The flags are not applied. Measure a step with and without them: the gain depends on the model.

    Args:
        platform: "gpu" or "cuda", "tpu" (flags for every generation), "tpu v5e" (also flags for this generation only), "cpu"
            (no flags are recommended).

    Returns:
        The flags with reasons. Call `apply()` on them, or pass their `compiler_options` to one program.

    Raises:
        ValueError: The platform is unknown.

    Example:
        >>> print(xla_flags("tpu"))
        --xla_tpu_enable_data_parallel_all_reduce_opt=true
        --xla_tpu_data_parallel_opt_different_sized_ops=true
    """
    name = platform.lower() if isinstance(platform, str) else platform
    if not isinstance(name, str) or name not in _RECOMMENDED:
        raise ValueError(
            f"No flags are known for the platform {one_line(platform)}; use one of {', '.join(map(repr, _RECOMMENDED))}, where "
            "'tpu' is valid for every generation."
        )
    return XlaFlags(name, *_RECOMMENDED[name])


def _parse_flags(text: str) -> dict[str, bool | str]:
    """Returns the values of the flags in `text` by name, with bools for true and false. The last value of a name counts."""
    values: dict[str, bool | str] = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        values[name] = {"": True, "true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
        if word.lstrip("-").startswith("no"):  # libtpu's syntax for a negation
            values[name.removeprefix("no")] = False
    return values
