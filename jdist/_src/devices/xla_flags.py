"""The compiler flags that a platform's maintainers recommend so that communication overlaps with computation.

Nothing here acts unless it is asked to: a flag can change what a program needs of memory, and how long it compiles.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

from jdist._src.core import html, jax_compat


@dataclass(frozen=True)
class XlaFlag:
    """One flag of the compiler.

    Attributes:
        name: Its name, without dashes.
        value: What it is recommended to be, and is not by default.
        reason: What it does for data-parallel training.
        link: The page that recommends it.
    """

    name: str
    value: bool
    reason: str
    link: str

    def __str__(self) -> str:
        return f"--{self.name}={str(self.value).lower()}"


@dataclass(frozen=True, repr=False)
class XlaFlags:
    """The flags for a platform. `str` of it is the text for the environment; rich and notebooks show a table with reasons.

    Attributes:
        platform: What they are for.
        variable: The environment variable that holds such flags. TPU flags belong to libtpu, which reads a variable of its
            own: in `XLA_FLAGS` they are unknown, and JAX ends the process over an unknown flag.
        flags: The flags.

    Example:
        >>> [flag.name for flag in xla_flags("gpu").flags]
        ['xla_gpu_enable_latency_hiding_scheduler', 'xla_gpu_enable_while_loop_double_buffering']
    """

    platform: str
    variable: str
    flags: tuple[XlaFlag, ...] = ()

    @property
    def compiler_options(self) -> dict[str, bool]:
        """The same for one program: `jax.jit(step, compiler_options=...)`, or that argument of `lowered.compile`."""
        return {flag.name: flag.value for flag in self.flags}

    def apply(self) -> None:
        """Adds the flags to the environment of this process, before JAX reads it. A flag that is there already stays.

        Raises:
            RuntimeError: It is too late: the compiler has started.
            ValueError: `XLA_FLAGS` names a file of flags instead of holding them.

        Warns:
            UserWarning: A flag is there with another value than the one recommended.
        """
        if not self.flags:
            return
        if jax_compat.flags_are_read(self.variable):
            raise RuntimeError(
                f"`{self.variable}` is read once, when JAX starts its backends, and they have started. Call `apply()` before "
                "the first array, `jax.devices()` or strategy, or hand `compiler_options` of these flags to `jax.jit`."
            )
        there = os.environ.get(self.variable, "").strip()
        if self.variable == "XLA_FLAGS" and there and not there.startswith("-"):
            raise ValueError(
                f"`XLA_FLAGS` is {there!r}, a file that XLA reads its flags from. Add to that file: {self}"
            )
        held = _values(there)
        for flag in self.flags:
            if held.get(flag.name, flag.value) != flag.value:
                warnings.warn(
                    f"`{self.variable}` sets `{flag.name}` to {held[flag.name]!r}, and that stays. Recommended for "
                    f"{self.platform} is `{flag}`: {flag.reason}",
                    stacklevel=2,
                )
        missing = [str(flag) for flag in self.flags if flag.name not in held]
        os.environ[self.variable] = " ".join([there, *missing]).strip()

    def __str__(self) -> str:
        return " ".join(map(str, self.flags))

    def __repr__(self) -> str:
        count = "1 flag" if len(self.flags) == 1 else f"{len(self.flags)} flags"
        return f"XlaFlags({self.platform}, {count} for {self.variable})"

    def __rich__(self) -> Any:
        from rich.table import Column, Table  # not needed until something is printed

        if not self.flags:
            return self._no_flags
        columns = [Column(head, overflow="fold") for head in _HEAD]  # nothing is cut off
        table = Table(*columns, title=self._title)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _repr_html_(self) -> str:
        if not self.flags:
            return html.block(html.paragraph(self._no_flags))
        return html.block(html.heading(self._title), html.table(self._rows, _HEAD))

    @property
    def _title(self) -> str:
        return f"{self.variable} for {self.platform}"

    @property
    def _no_flags(self) -> str:
        return f"No flags are recommended for {self.platform}."

    @property
    def _rows(self) -> list[html.Row]:
        return [(str(flag), flag.reason, flag.link) for flag in self.flags]


_HEAD = ("flag", "reason", "recommended by")

_TOOLBOX = "https://docs.nvidia.com/jax-toolbox/"
_GUIDANCE = "https://openxla.org/xla/flags_guidance"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/05d3525e83/benchmarks/xla_flags_library.py"

# Not here is what such pages name too, but is on by default by now (asynchronous collectives, their priority, pipelined
# reduce-scatter); sizes that depend on the model (when to combine collectives); and `xla_gpu_enable_pipelined_all_reduce`
# and `..._all_gather`, which move collectives of a loop only, and which newer versions do not know as compiler options.
_GPU = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts an all-reduce as early as it can and waits for it as late, with computation between",
        _TOOLBOX + "environment-variables",
    ),
    XlaFlag(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "unrolls loops, such as scanned layers, by two, so that collectives of one turn overlap with the next",
        _TOOLBOX + "performance-profiling/gpu-performance",
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
        "the same in loops for gradients of unlike sizes; may take more memory",
        _MAXTEXT,
    ),
)
# `xla_tpu_enable_async_collective_fusion`, which these build on, is on by default.
_TPU_V5E = (
    XlaFlag(
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        True,
        "runs parts of an all-reduce within the computations beside it; other generations refuse it",
        _GUIDANCE,
    ),
    XlaFlag(
        "xla_enable_async_all_reduce",
        True,
        "makes all-reduces asynchronous, without which the flag above changes nothing",
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
    """The flags that the maintainers of a platform's compiler recommend for data-parallel training.

    They are only looked up. Measure a step without them and with them: what they gain depends on the model.

    Args:
        platform: "gpu" or "cuda", "tpu" (what every generation takes), "tpu v5e" (and what only this one does), "cpu"
            (nothing is recommended).

    Returns:
        The flags, with reasons; to be applied to the process, or handed to one program.

    Raises:
        ValueError: There is no such platform.

    Example:
        >>> print(xla_flags("tpu"))
        --xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true
    """
    name = platform.lower() if isinstance(platform, str) else platform
    if not isinstance(name, str) or name not in _RECOMMENDED:
        raise ValueError(
            f"No flags are known for the platform {platform!r}; take one of {', '.join(map(repr, _RECOMMENDED))}, where "
            "'tpu' is right for every generation."
        )
    return XlaFlags(name, *_RECOMMENDED[name])


def _values(text: str) -> dict[str, bool | str]:
    """The flags in a text, by name; true and false as such. The last of a name counts, as it does for the compiler."""
    found: dict[str, bool | str] = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        found[name] = {"": True, "true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
        if word.lstrip("-").startswith("no"):  # how libtpu takes a negation
            found[name.removeprefix("no")] = False
    return found
