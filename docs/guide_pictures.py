"""Figures of guides: the parts of a training, the formats of an export, and processes and devices in torch and in jdist."""

from drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, Drawing

LEFT, FULL = 14, 628


def trainer() -> str:
    """Returns an SVG: the arguments of a `Trainer`, the step that it builds, and the result of `fit`."""
    d = Drawing()
    d.frame(LEFT, 14, FULL, 86, "Trainer: the configuration")
    parts = ("model", "optimizer", "loss per example", "metrics", "strategy")
    widths = (92, 110, 152, 96, 110)
    x = LEFT + 12
    for name, width in zip(parts, widths, strict=True):
        d.box(x, 46, width, 40, name, GREY)
        x += width + 11
    d.arrow(LEFT + FULL / 2, 101, LEFT + FULL / 2, 124)
    d.frame(LEFT, 126, FULL, 176, "fit: the loop")
    d.box(LEFT + 12, 158, 128, 58, "data", BLUE, detail="shuffled, padded")
    d.arrow(LEFT + 141, 187, LEFT + 166, 187)
    d.box(LEFT + 168, 158, 292, 58, "step on each replica", GREEN, detail="loss, gradients, all-reduce, update")
    d.arrow(LEFT + 461, 187, LEFT + 486, 187)
    d.box(LEFT + 488, 158, 128, 58, "state", GREEN, detail="new in each step")
    d.arrow(LEFT + 314, 217, LEFT + 314, 242)
    d.box(LEFT + 168, 244, 292, 44, "events: step, validation, epoch", PURPLE)
    d.arrow(LEFT + 167, 266, LEFT + 142, 266, both=True)
    d.box(LEFT + 12, 244, 128, 44, "callbacks", PURPLE)
    d.arrow(LEFT + 487, 266, LEFT + 462, 266)
    d.box(LEFT + 488, 244, 128, 44, "validation", BLUE)
    d.arrow(LEFT + FULL / 2, 303, LEFT + FULL / 2, 326)
    d.frame(LEFT, 328, FULL, 86, "Fit: the result")
    x = LEFT + 12
    for name in ("state", "history", "stop_reason", "proof"):
        d.box(x, 360, 143, 40, name, ORANGE)
        x += 154
    return d.svg()


def export_formats() -> str:
    """Returns an SVG: an export, and the programs that use it."""
    d = Drawing()
    d.box(LEFT, 70, 128, 44, "function", BLUE)
    d.box(LEFT, 122, 128, 44, "trained state", GREEN)
    d.arrow(LEFT + 129, 118, LEFT + 156, 118)
    d.frame(LEFT + 158, 56, 170, 124, "jdist.export")
    for place, (name, fill) in enumerate(
        (("function.bin", BLUE), ("weights.safetensors", GREEN), ("manifest.json", GREY))
    ):
        d.box(LEFT + 168, 84 + 31 * place, 150, 27, name, fill)
    rows = (
        ("jdist.load", "JAX on CPU, GPU and TPU"),
        ("StableHLO", "another compiler or runtime"),
        ("SavedModel", "TensorFlow Serving"),
        ("safetensors", "torch and other frameworks"),
    )
    for place, (name, use) in enumerate(rows):
        y = 14 + 54 * place
        d.arrow(LEFT + 329, 118, LEFT + 384, y + 22)
        d.box(LEFT + 386, y, 242, 44, name, ORANGE, detail=use)
    d.arrow(LEFT + 64, 167, LEFT + 64, 252)
    d.box(LEFT, 254, 128, 44, "jax2onnx", GREY)
    d.arrow(LEFT + 129, 276, LEFT + 384, 276)
    d.box(LEFT + 386, 254, 242, 44, "ONNX", ORANGE, detail="ONNX Runtime")
    return d.svg()


def ddp_and_jdist() -> str:
    """Returns an SVG: the processes of `torchrun` and of jdist on a machine with four devices."""
    d = Drawing()
    d.text(LEFT, 28, "torchrun --nproc-per-node 4: one process per device", bold=True)
    for number in range(4):
        x = LEFT + number * 160
        d.frame(x, 40, 148, 144, f"process {number}")
        d.box(x + 10, 70, 128, 32, "batch of 16", BLUE)
        d.box(x + 10, 106, 128, 32, "model in DDP", GREEN)
        d.box(x + 10, 142, 128, 32, f"device {number}", GREY)
    d.box(LEFT, 190, FULL, 32, "all-reduce, in a hook of backward", ORANGE)
    d.text(LEFT, 262, "python train.py: one process for all devices", bold=True)
    d.frame(LEFT, 274, FULL, 186, "process 0")
    d.box(LEFT + 10, 304, FULL - 20, 32, "global batch of 64, split over the replicas", BLUE)
    for number in range(4):
        x = LEFT + 10 + number * 154
        d.arrow(x + 73, 337, x + 73, 352)
        d.box(x, 354, 146, 58, f"replica {number}", GREEN, detail=f"device {number}")
    d.box(LEFT + 10, 418, FULL - 20, 32, "all-reduce, in the step or in the optimizer", ORANGE)
    return d.svg()
