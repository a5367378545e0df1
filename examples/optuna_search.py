"""Optuna chooses a network's width, its rate and its decay; trials that promise little end early.

python examples/optuna_search.py
treadle train examples/optuna_search.py --set trials=50

The pruning callback reports each validation to the trial. Numbers of the optimizer are values of
the compiled step, so that trials of one width share a program.
"""

import optuna

import treadle as td
from treadle import data, losses, metrics, nn, optim

group = metrics.Group({"accuracy": metrics.Accuracy()})


def loss(model, batch):
    scores = model(batch["x"])
    group.capture(scores, batch["y"])
    return losses.cross_entropy(scores, batch["y"])


def compiled(width, batch):
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    return td.compile_step(model, loss, optim.adamw(1e-3), batch)


def train(trials: int = 20, epochs: int = 12, seed: int = 0):
    images, digits = data.load_digits()
    arrays = {"x": images.reshape(len(images), -1), "y": digits}
    rows, held_out = data.split(arrays, (0.8, 0.2), stratify=digits)
    steps = {}  # by width: what has another shape is another program

    def objective(trial):
        width = trial.suggest_categorical("width", [16, 64])
        batches = data.ArrayLoader(rows, 64, shuffle=True, seed=seed)
        if width not in steps:
            steps[width] = compiled(width, {name: array[:64] for name, array in rows.items()})
        step = steps[width]
        step.reset(seed)
        step.learning_rate = trial.suggest_float("lr", 1e-4, 0.3, log=True)
        step.hyperparameters["weight_decay"] = trial.suggest_float("decay", 1e-4, 1.0, log=True)
        pruning = td.interop.optuna.PruningCallback(trial, monitor="val/accuracy")
        trainer = td.Trainer(step, [pruning], metrics=group, progress="off")
        validation = data.ArrayLoader(held_out, 360)
        history = trainer.fit(batches, epochs=epochs, validation=validation)
        return history.best("val/accuracy", "max").value

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2),
    )
    study.optimize(objective, n_trials=trials)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"{trials} trials, {pruned} of them ended early, {len(steps)} programs")
    print(f"best: {study.best_value:.1%} of held-out digits with {study.best_params}")
    return study.best_value


if __name__ == "__main__":
    train()
