"""Host lists of Slurm: `"n[01-03,7],gpu[1-2]-ib"` names six hosts."""

import itertools
import re

_MAX_HOSTS = 65536


def expand_hostlist(text: str) -> list[str]:
    """Returns the hosts of a Slurm host list, in its order.

    A host may have several brackets and a suffix. Numbers keep their leading zeros. The right bracket varies fastest.

    Args:
        text: For example the value of SLURM_STEP_NODELIST.

    Raises:
        ValueError: The list is malformed, or has more than 65536 hosts.
    """
    hosts: list[str] = []
    for position, part in _split(text):
        pieces = [_piece(piece, text, position) for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)]
        count = 1
        for piece in pieces:
            count *= len(piece)
        if len(hosts) + count > _MAX_HOSTS:
            raise _error(text, position, f"it has more than {_MAX_HOSTS} hosts")
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def _split(text: str) -> list[tuple[int, str]]:
    """Returns the parts between the commas outside brackets, with their positions. Empty parts are omitted."""
    parts, start, opened = [], 0, None
    for position, character in enumerate(text + ","):
        if character == "[":
            if opened is not None:
                raise _error(text, position, "a bracket inside a bracket")
            opened = position
        elif character == "]":
            if opened is None:
                raise _error(text, position, "a closing bracket without an opening bracket")
            opened = None
        elif character == "," and (opened is None or position == len(text)):
            if opened is not None:
                raise _error(text, opened, "an opening bracket without a closing bracket")
            part = text[start:position].strip()
            if len(part.split()) > 1:
                raise _error(text, start, f"the host {part!r} contains a space")
            if part:
                parts.append((start, part))
            start = position + 1
    return parts


def _piece(piece: str, text: str, position: int) -> list[str]:
    """Returns the texts that a piece of a host stands for: itself, or the numbers of a bracket."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for item in piece[1:-1].split(","):
        match = re.fullmatch("([0-9]+)(?:-([0-9]+))?", item.strip(), re.ASCII)
        if not match:
            raise _error(text, position, f"{item.strip()!r} in a bracket is not a number or a range such as 1-3")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _error(text, position, f"the range {item.strip()} is empty")
        if int(last) - int(first) >= _MAX_HOSTS:
            raise _error(text, position, f"it has more than {_MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _error(text: str, position: int, problem: str) -> ValueError:
    return ValueError(
        f"Invalid Slurm host list {text!r}: {problem} (character {position}). The format is that of `scontrol show "
        "hostnames`, such as 'n[1-3,7],login1'."
    )
