"""A small GPT whose attention and feed-forward networks can be computed in parts, for jobs of tests."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftd import Training

PLAN = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.query_norm": "replicated_with_grad_allreduce",
    "*.attention_out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "4.linear": "colwise_gather_output",
}
WORDS = 32


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.ids = torch.randint(0, WORDS, (64, length + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index, :-1], self.ids[index, 1:]


class Block(nn.Module):
    """Pre-norm attention and feed-forward network, which derive the sizes of what is split from the tensors."""

    def __init__(
        self, width: int, heads: int, dropout: float, inner_dropout: float, shape: tuple[int, int] | None
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.shape = (-1, self.size) if shape is None else shape
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(self.size)
        self.attention_out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout, self.inner_dropout = nn.Dropout(dropout), nn.Dropout(inner_dropout)

    def forward(self, x: Tensor) -> Tensor:
        taken = self.norm_1(x)
        rows, length, _ = x.shape
        query, key, value = (
            part(taken).view(rows, length, *self.shape) for part in (self.query, self.key, self.value)
        )
        if query.shape[-1] == self.size:
            query = self.query_norm(query)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.dropout(self.attention_out(mixed.transpose(1, 2).flatten(2)))
        out: Tensor = x + self.down(self.inner_dropout(functional.gelu(self.up(self.norm_2(x)))))
        return out


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.norm(x))
        return out


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build(
    *,
    width: int = 16,
    heads: int = 4,
    length: int = 6,
    dropout: float = 0.0,
    inner_dropout: float = 0.0,
    plan: dict[str, str] | None = None,
    tied: bool = False,
    frozen: bool = False,
    held_out: bool = False,
    shape: tuple[int, int] | None = None,
) -> Training:
    """Return the training.

    :param tied: two blocks share a weight that the plan splits.
    :param frozen: layer norms and the embedding are not trained; the plan splits none of them.
    :param shape: number and size of the heads as attention reads them; by default the number follows from
        the tensor.
    """
    blocks = [Block(width, heads, dropout, inner_dropout, shape) for _ in range(3)]
    if tied:
        blocks[1].up.weight = blocks[0].up.weight

    embedding = nn.Embedding(WORDS, width)
    if frozen:
        for module in (embedding, *(norm for block in blocks for norm in (block.norm_1, block.norm_2))):
            module.requires_grad_(False)

    def optimizer(named: list[tuple[str, nn.Parameter]]) -> Any:
        return torch.optim.AdamW([p for _, p in named], lr=1e-2)

    return Training(
        layers=[
            embedding,
            *blocks,
            Head(width),
        ],
        loss=loss,
        optimizer=optimizer,
        dataset=Tokens(length),
        evaluation=Tokens(length) if held_out else None,
        tensor_plan=PLAN if plan is None else plan,
    )
