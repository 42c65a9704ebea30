"""The models of `benchmarks/models.py` in torch, as peers: the same shapes, optimizers and batches."""

import math

import models
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Transformer(nn.Module):
    def __init__(self, blocks: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "attention": nn.MultiheadAttention(width, 4, batch_first=True),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width),
                        nn.Linear(width, 4 * width),
                        nn.GELU(approximate="tanh"),
                        nn.Linear(4 * width, width),
                    ),
                }
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            y = block["norm"](x)
            x = x + block["attention"](y, y, y, need_weights=False)[0]
            x = x + block["mlp"](x)
        return self.head(x.mean(dim=1))


def torch_model(model, shape):
    """Returns the torch model with the shapes of a flax model, for inputs of shape `shape`."""
    if isinstance(model, models.Transformer):
        return Transformer(model.blocks, model.width)
    if isinstance(model, models.CNN):
        _, height, width, channels = shape
        features = 64 * (height // 2) * (width // 2)
        return nn.Sequential(
            *(nn.Conv2d(channels, 32, 3, padding="same"), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
    widths = [math.prod(shape[1:]), *model.widths]
    hidden = [layer for pair in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 10))


class DDPLoop:
    """Trains with `DistributedDataParallel` and AdamW; every call of `losses` continues the training."""

    def __init__(self, model, batch, fused, reduces=True):
        x, y = (torch.from_numpy(part) for part in batch)
        self.x, self.y = x.permute(0, 3, 1, 2).contiguous() if x.ndim == 4 else x, y.long()
        if not self.x.is_floating_point():
            self.x = self.x.long()
        self.model = torch_model(model, batch[0].shape)
        if reduces:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=1e-4, fused=fused)

    def losses(self, steps):
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def all_reduce(size):
    """Returns a function that sums `size` floats over the processes."""
    buffer = torch.zeros(size)
    return lambda: torch.distributed.all_reduce(buffer)


def join(folder, process, count):
    """Joins the processes over gloo; they meet in a file of `folder`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=process, world_size=count)
