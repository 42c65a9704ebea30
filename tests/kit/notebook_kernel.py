"""A Jupyter kernel, whose cells a test runs and interrupts."""

import dataclasses
import os

from jupyter_client.manager import start_new_kernel


@dataclasses.dataclass(frozen=True)
class CellOutput:
    """The output of a cell.

    Attributes:
        text: The printed text, and the text of the result of the cell.
        error: The class of the exception that ended it, or "".
        message: The message of the exception.
    """

    text: str
    error: str
    message: str


class Kernel:
    """A running kernel with four CPU devices. `close` ends it."""

    def __init__(self):
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        self._manager, self._client = start_new_kernel(kernel_name="python3", env=environment, startup_timeout=120)

    def run(self, code, interrupt_after=None):
        """Runs a cell. Interrupts it, as the stop button does, once it has printed the text `interrupt_after`."""
        request = self._client.execute(code)
        text = ""
        while True:
            message = self._client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    text += content["text"]
                    if interrupt_after and interrupt_after in text:
                        interrupt_after = None
                        self._manager.interrupt_kernel()
                case "execute_result":
                    text += content["data"]["text/plain"]
                case "status" if content["execution_state"] == "idle":
                    break
        # Not from the message "error": IPython sends none if it fails to format the traceback, which happens on Python 3.11
        # where an interrupt hits an instruction without a line.
        while True:
            reply = self._client.get_shell_msg(timeout=120)
            if reply["parent_header"].get("msg_id") == request:
                content = reply["content"]
                return CellOutput(text, content.get("ename", ""), content.get("evalue", ""))

    def close(self):
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
