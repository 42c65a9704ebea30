"""Records which line of the user's code starts JAX, for errors about calls that come too late."""

from jdist._src.core.jax_compat import has_backend, on_backend_start
from jdist._src.core.source_lines import Frame, caller_frame

_frames: list[Frame | None] = []


def backend_start_line() -> str:
    """Returns ` at FILE:LINE`, the line that started JAX; an empty string if it is unknown, or JAX has not started."""
    return f" at {_frames[0]}" if has_backend() and _frames and _frames[0] else ""


if not has_backend():
    on_backend_start(lambda: _frames.append(caller_frame()))
