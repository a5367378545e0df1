"""A CSV file of your own, from its rows to a trained model that predicts.

python examples/csv_table.py
treadle train examples/csv_table.py --set file=mine.csv --set target=late --set folder=late
treadle train examples/csv_table.py --set file=new.csv --set folder=late --set predict=true

Columns of numbers are standardised, columns of text one-hot encoded, and the target's values are
the classes. Without a file it makes one up.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import treadle as td
from treadle import callbacks, data, losses, metrics, nn, optim


class Net(nn.Module):
    def __init__(self, columns: int, classes: int, hidden: int = 32):
        self.fc1 = nn.Linear(columns, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc2(td.relu(self.fc1(x)))


group = metrics.Group({"accuracy": metrics.Accuracy()})


def loss(model, batch):
    scores = model(batch["x"])
    group.capture(scores, batch["y"])
    return losses.cross_entropy(scores, batch["y"])


def fitted(table, target):
    """An encoder for each column, by name; the target's is of labels."""
    found = {"target": target, "numbers": {}, "texts": {}}
    for name, column in table.items():
        if name == target:
            found["labels"] = data.LabelEncoder.fit(column).to_dict()
        elif column.dtype.kind == "U":
            found["texts"][name] = data.OneHotEncoder.fit(column).to_dict()
        else:
            found["numbers"][name] = data.Standardiser.fit(column[:, None]).to_dict()
    return found


def inputs(table, encoders):
    """What the network sees of a table: (rows, columns)."""
    parts = [
        data.Standardiser.from_dict(state).transform(data.columns_matrix(table, [name]))
        for name, state in encoders["numbers"].items()
    ]
    parts += [
        data.OneHotEncoder.from_dict(state).transform(table[name])
        for name, state in encoders["texts"].items()
    ]
    return np.concatenate(parts, axis=1)


def made_up(path):
    """Parcels, and whether they came late."""
    rng = np.random.default_rng(0)
    lines = ["weight,distance,service,late"]
    for _ in range(1200):
        weight, distance = rng.gamma(2, 2), rng.uniform(5, 900)
        service = rng.choice(["economy", "express", "standard"])
        slow = {"economy": 1.0, "standard": 0.0, "express": -1.5}[service]
        is_late = distance / 300 + 0.15 * weight + slow + rng.normal(scale=0.4) > 2
        lines.append(f"{weight:.2f},{distance:.0f},{service},{'yes' if is_late else 'no'}")
    path.write_text("\n".join(lines) + "\n")


def train(
    file: str = "",
    target: str = "late",
    folder: str = "table",
    predict: bool = False,
    epochs: int = 40,
    hidden: int = 32,
    lr: float = 5e-3,
):
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if not file:
        made_up(place / "parcels.csv")
    table = data.read_csv(file or place / "parcels.csv")
    if predict:
        return show_predictions(table, place)
    if target not in table:
        raise SystemExit(f"no column {target!r}: --set target= one of {', '.join(table)}")

    rows, held_out = data.split(table, (0.8, 0.2), stratify=table[target])
    encoders = fitted(rows, target)
    labels = data.LabelEncoder.from_dict(encoders["labels"])
    arrays, test = (
        {"x": inputs(part, encoders), "y": labels.transform(part[target])}
        for part in (rows, held_out)
    )
    batches = data.ArrayLoader(arrays, min(32, len(arrays["y"])), shuffle=True)
    model = Net(arrays["x"].shape[1], len(labels), hidden)
    step = td.compile_step(model, loss, optim.adamw(lr), next(iter(batches)))
    stop = callbacks.EarlyStopping("val/loss", patience=5, restore_best=True)
    trainer = td.Trainer(step, [stop], metrics=group)
    trainer.fit(batches, epochs=epochs, validation=data.ArrayLoader(test, 256))

    save_file(step.params, place / "net.safetensors")
    (place / "encoders.json").write_text(json.dumps(encoders, indent=1))
    accuracy = trainer.evaluate(data.ArrayLoader(test, 256))["accuracy"]
    usual = np.bincount(test["y"]).max() / len(test["y"])
    print(f"{accuracy:.1%} of held-out rows are right; always the same answer: {usual:.1%}")
    print(f"{place}: the model and its encoders")
    show_predictions({name: column[:5] for name, column in held_out.items()}, place)
    return accuracy


def show_predictions(table, place):
    """What a saved model says of rows, without a step and without an optimizer."""
    encoders = json.loads((place / "encoders.json").read_text())
    labels = data.LabelEncoder.from_dict(encoders["labels"])
    x, params = inputs(table, encoders), load_file(place / "net.safetensors")
    model = Net(x.shape[1], len(labels), len(params["fc1.bias"]))
    chances_of = td.compile_forward(model, lambda model, x: td.softmax(model(x)), x)
    chances_of.load_params(params)
    chances = chances_of(x)
    for number, row in enumerate(chances, 1):
        print(f"row {number}: {labels.classes[row.argmax()]}, with a chance of {row.max():.0%}")
    return labels.inverse_transform(chances.argmax(-1))


if __name__ == "__main__":
    train()
