"""A training script in the style of nanoGPT, before the port:  python examples/nanogpt/train_plain.py"""

import math
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
from model import GPT, GPTConfig

# evaluation and logging
eval_interval = 50
eval_iters = 16
log_interval = 10
# data
batch_size = 4  # of a micro-batch
gradient_accumulation_steps = 8
block_size = 64
# model
n_layer = 4
n_head = 4
n_embd = 96
dropout = 0.0
# optimizer
learning_rate = 3e-3
max_iters = 200
weight_decay = 0.1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
warmup_iters = 20
lr_decay_iters = 200
min_lr = 3e-4
# system
device = "cpu"
dtype = torch.float32
seed = 1337

torch.manual_seed(seed)

# the bytes of the standard library, the last tenth held out
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = np.frombuffer(b"".join(path.read_bytes() for path in sources), dtype=np.uint8)
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def get_batch(split):
    data = train_data if split == "train" else val_data
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


model = GPT(GPTConfig(block_size=block_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd, dropout=dropout))
model.to(device=device, dtype=dtype)

# matrices decay, biases and norms do not
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(eval_iters)]
    model.train()
    return sum(losses) / eval_iters


history = []
t0 = time.time()
for iter_num in range(max_iters):
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num > 0 and iter_num % eval_interval == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
    lossf = 0.0
    for micro_step in range(gradient_accumulation_steps):  # noqa: B007
        X, Y = get_batch("train")
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
        lossf += loss.item()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    history.append(lossf)
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {lossf:.4f}, time {time.time() - t0:.1f} s")
