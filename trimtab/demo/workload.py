"""A byte-level GPT that trains on CPU in seconds, and the causes that make it spike.

Everything is a pure function of (seed, index): any step can be replayed, any batch left out.  Text
comes with every Python: the documentation topics to learn, the codec tables as foreign data.
"""

import encodings
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

WIDTH, BLOCKS, HEADS, CONTEXT = 80, 6, 4, 64
ROWS = 16
"""Rows of a batch over all ranks."""
LR = 1e-3

FOREIGN_AT = 250
"""Index of the first foreign batch, of causes B and E."""
JUMP_AT, JUMP = 200, 10.0
"""Step and size of the LR jump, of cause D."""

CAUSES = {
    "B": "a pocket of eight foreign batches",
    "D": "an LR jump",
    "E": "one foreign batch",
    "H": "nothing",
}

VALIDATION_BATCHES = 32
_VALIDATION_SEED = 7_777_777


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training text and foreign text, each a 1-d tensor of bytes as int64."""

    text: Tensor
    foreign: Tensor


def corpus() -> Corpus:
    """Return the two texts of this Python."""
    folder = Path(encodings.__file__).parent
    foreign = b"".join(path.read_bytes() for path in sorted(folder.glob("cp*.py")))
    text = "\n".join(topics.topics.values()).encode()
    return Corpus(torch.tensor(list(text)), torch.tensor(list(foreign)))


def batch(source: Tensor, seed: int, index: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each (ROWS, CONTEXT): a pure function of (seed, index)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    starts = torch.randint(0, len(source) - CONTEXT - 1, (ROWS,), generator=generator)
    rows = torch.stack([source[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def training_batch(data: Corpus, cause: str, seed: int, index: int) -> tuple[Tensor, Tensor]:
    """Return the batch of an index under a cause."""
    source = data.foreign if index in foreign_batches(cause) else data.text
    return batch(source, seed, index)


def foreign_batches(cause: str) -> range:
    """Return the indices of a cause's foreign batches."""
    return range(FOREIGN_AT, FOREIGN_AT + {"B": 8, "E": 1}.get(cause, 0))


def lr_multiple(cause: str, step: int) -> float:
    """Return what the schedule of a cause multiplies LR with."""
    return JUMP if cause == "D" and step >= JUMP_AT else 1.0


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, time, WIDTH) after attention and MLP."""
        rows, time, width = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, time, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, time, width))
        mlp: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mlp


class ByteGPT(nn.Module):
    """513,536 parameters; matrices start as GPT-2's N(0, 0.02)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (rows, time, 256) of bytes (rows, time)."""
        hidden = self.blocks(self.embed(x) + self.position.weight[: x.shape[1]])
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def validation_batch(data: Corpus, index: int) -> tuple[Tensor, Tensor]:
    """Return a batch that no seed trains on; but rows may repeat: 2-3 % were seen."""
    return batch(data.text, _VALIDATION_SEED, index)


def validation_loss(model: nn.Module, data: Corpus) -> float:
    """Return the mean loss over the validation batches, in nats a byte."""
    with torch.no_grad():
        losses = [
            loss_of(model, *validation_batch(data, index)) for index in range(VALIDATION_BATCHES)
        ]
    return float(torch.stack(losses).mean())
