"""Two hundred steps of a GPT on real text: Treadle's losses and PyTorch's, side by side.

    python bench/loss_curves.py --json docs/loss_curves.json    # on a GPU, with PyTorch
    python bench/loss_curves.py --plot docs/images/loss_curves.svg --json docs/loss_curves.json

Both start from the same values and see the same batches: bytes of Python's standard library.
PyTorch runs eagerly under bfloat16 autocast. The plot is drawn from the file alone.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from treadle.train.curves import Plot

WORKLOAD = "gpt_6x384"
STEPS, LETTERS = 200, 1 << 20


def text(letters: int) -> np.ndarray:
    """Modules of the standard library one after the other, as bytes."""
    found, count = list[np.ndarray](), 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found.append(np.frombuffer(path.read_bytes(), np.uint8))
        count += len(found[-1])
        if count >= letters:
            break
    return np.concatenate(found)[:letters].astype(np.int32)


def batches(shape: tuple[int, ...], steps: int) -> list[dict[str, np.ndarray]]:
    """Windows of the text from places drawn at random, and what follows each letter."""
    tokens, rng = text(LETTERS), np.random.default_rng(0)
    rows, length = shape
    starts = rng.integers(0, len(tokens) - length - 1, (steps, rows))
    places = starts[:, :, None] + np.arange(length)
    return [{"x": tokens[p], "y": tokens[p + 1]} for p in places]


def treadle_losses(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    from gpu import first_values
    from peers import BETAS, DECAY, EPSILON, RATE

    import treadle as td
    from models import WORKLOADS, loss
    from treadle import optim

    work = WORKLOADS[WORKLOAD]
    values = first_values(work)
    step = td.compile_step(
        work.make(), loss, optim.adamw(RATE, BETAS, EPSILON, DECAY), work.specs(),
        clip_norm=work.clip, device="cuda", precision="bfloat16",
    )  # fmt: skip
    step.load_params(values)
    results = [step(batch) for batch in batches(work.x, steps)]
    return [r.loss for r in results], values


def torch_losses(steps: int, values: dict[str, np.ndarray]) -> list[float]:
    import torch
    import torch.nn.functional as F
    from peers import BETAS, DECAY, EPSILON, RATE, TORCH

    from models import WORKLOADS

    work = WORKLOADS[WORKLOAD]
    model = TORCH[work.architecture](*work.sizes).cuda()
    model.load_state_dict({n: torch.tensor(v) for n, v in values.items()})
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, fused=True
    )
    losses: list[Any] = []
    for batch in batches(work.x, steps):
        x = torch.tensor(batch["x"], device="cuda")
        y = torch.tensor(batch["y"], device="cuda").long().reshape(-1)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            value = F.cross_entropy(model(x).reshape(-1, work.classes).float(), y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip or float("inf"))
        optimizer.step()
        losses.append(value.detach())
    return [float(v) for v in losses]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.plot is not None:
        curves = json.loads(given.json.read_text())
        Plot({n: (np.arange(len(c)), np.array(c)) for n, c in curves.items()}).save(given.plot)
        return
    ours, values = treadle_losses(STEPS)
    theirs = torch_losses(STEPS, values)
    apart = np.abs(np.array(ours) - theirs)
    print(
        f"last {ours[-1]:.4f} and {theirs[-1]:.4f}, "
        f"apart {apart.mean():.4f}, at most {apart.max():.4f}"
    )
    rounded = {"Treadle": ours, "PyTorch": theirs}
    given.json.write_text(json.dumps({n: [round(v, 4) for v in c] for n, c in rounded.items()}))


if __name__ == "__main__":
    main()
