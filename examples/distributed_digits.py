"""Handwritten digits on any number of ranks, with the same bits on each number.

python examples/distributed_digits.py
treadle launch -n 2 examples/distributed_digits.py
treadle launch -n 2 train examples/distributed_digits.py --set folder=run --set epochs=5
treadle launch -n 4 train examples/distributed_digits.py --set folder=run --set epochs=9 --resume
"""

import hashlib

import treadle as td
from treadle import data, losses, nn, optim

BATCH, SHARDS = 64, 8


def loss(model, batch):
    logits = model(batch["x"])
    td.metric("accuracy", (logits.argmax(-1) == batch["y"]).astype(td.float32).mean())
    return losses.cross_entropy(logits, batch["y"])


def train(epochs: int = 3, folder: str = "", resume: str | None = None):
    images, labels = data.load_digits()
    arrays = {"x": images.reshape(-1, 64), "y": labels}
    rows = len(labels) - 256
    training = {name: array[:rows] for name, array in arrays.items()}
    held_out = {name: array[rows:] for name, array in arrays.items()}

    step = td.compile_step(
        nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 10)),
        loss,
        optim.adamw(2e-3),
        {"x": td.Spec((BATCH, 64)), "y": td.Spec((BATCH,), td.int32)},  # the whole batch
        device="cpu",
        clip_norm=1.0,
        parallel=td.DataParallel(shards=SHARDS, local=True),
    )
    trainer = td.Trainer(step)
    history = trainer.fit(
        data.ArrayLoader(training, BATCH, shuffle=True, seed=1, local=True),  # this rank's rows
        epochs=epochs,
        validation=data.ArrayLoader(held_out, BATCH, local=True),
        checkpoint=folder or None,
        resume=resume,
    )
    params = step.params
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params)))
    if td.distributed.rank() == 0:
        accuracy = history.last("val/accuracy").value
        print(f"{td.distributed.size()} ranks: {accuracy:.1%}, bits {digest.hexdigest()[:12]}")
    return accuracy if td.distributed.rank() == 0 else None


if __name__ == "__main__":
    train()
