"""Which buffers of a step's program live at its peak, for a GPU and without one.

usage: python tools/memory.py [entry ...] [--rows 12] [--kept]

Entries are those of bench/zoo.py at their sizes for a GPU, in bfloat16 with AdamW, and workloads of
bench/models.py. The graph is scheduled as for a GPU with cuBLASLt and cuDNN, and its buffers are
given their places. --kept lets everything wait for the backward pass, to compare.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools")]


def entry_graph(name: str) -> Any:
    """The step of an entry of the zoo."""
    import numpy as np
    from families import ZOO
    from zoo_peers import specs

    import treadle as td
    from treadle import optim
    from treadle.nn.tracing import Inputs
    from treadle.optim.append import Mode
    from treadle.pipeline import CompileReport, StepRecipe, build_step

    side, entry = importlib.import_module("families.with_treadle"), ZOO[name]
    batch = entry.batch(np.random.default_rng(0), **entry.sizes("cuda"))
    recipe = StepRecipe(
        entry.make(side, **entry.sizes("cuda")), lambda m, b: m(b), optim.adamw(1e-3), "step0:",
        1, None, td.bfloat16, td.CompileOptions(),
    )  # fmt: skip
    report = CompileReport("cuda", "bfloat16")
    return build_step(recipe, recipe.plan(), Inputs.of(specs(batch)), report)[Mode.UPDATE]


def main() -> None:
    from families import ZOO

    from checked_kernels import step_graph
    from models import WORKLOADS
    from treadle.kernel import cost
    from treadle.kernel.target import GPU
    from treadle.memory.peak import memory_view
    from treadle.memory.plan import plan_buffers
    from treadle.schedule.schedule import schedule

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("entries", nargs="*", help=f"of {', '.join(ZOO)}; all if none")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--kept", action="store_true")
    given = parser.parse_args()
    target = replace(GPU, has_attention=True, has_conv=True)
    if given.kept:
        kept = replace(target.materialization, waiting_bytes=1 << 60)
        target = replace(target, materialization=kept)
    for name in given.entries or ZOO:
        graph = step_graph(name, "cuda") if name in WORKLOADS else entry_graph(name)
        program = schedule(graph, True, in_place=True, target=target)
        view = memory_view(program, plan_buffers(program, target))
        values = sum(t.nbytes for _, t in program.leaves)
        moved = sum(cost.traffic(c.kernel) * times for c, times in program.counted_calls())
        print(f"{name}: values {values / 1e6:,.1f} MB, kernels move {moved / 1e6:,.1f} MB")
        print(*str(view).splitlines()[: given.rows + 2], "", sep="\n")


if __name__ == "__main__":
    main()
