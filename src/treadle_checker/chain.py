"""That every program comes from what was traced, by stages that a program of its kind must have.

A program that writes parameters is a training step: it comes from a traced loss by gradients, then
by updates. Stages are known by what they relate, never by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from treadle_checker.kernel_checks import Claim
from treadle_checker.reading import Rejected
from treadle_checker.relations import has_updates
from treadle_checker.types import Graph

TOLD = "it comes from what was traced, by stages that are all here"


def check_chain(manifest: Mapping[str, Any], graph_of: Callable[[str], Graph]) -> Iterator[Claim]:
    """A claim for each program; Rejected if stages are missing that cannot be."""
    passages, traced = manifest["passages"], set(manifest["traced"])
    if not passages:
        raise Rejected("it says nothing of how a graph was made")
    came = {p.after: p for p in reversed(passages) if p.before != p.after}
    if any(name in came for name in traced):
        raise Rejected("what was traced is what a stage has made")
    if not manifest["programs"]:
        yield Claim(TOLD, "programs", reason="the file has no program")
    _check_updates(manifest, graph_of)
    for program in manifest["programs"]:
        yield _followed(program, came, traced, graph_of)


def _followed(
    program: Any, came: Mapping[str, Any], traced: set[str], graph_of: Callable[[str], Graph]
) -> Claim:
    """The stages of one program, backwards."""
    name, graph, relations = program["name"], program["graph"], list[str]()
    for _ in range(len(came) + 1):
        if graph in traced or graph not in came:
            break
        relations.append(came[graph].relation)
        graph = came[graph].before
    else:
        raise Rejected("stages go around in a circle")
    if graph not in traced:
        told = "another graph stands between: parameters of the optimizer are put into it"
        return Claim(TOLD, name, reason=told)
    steps = [r for r in reversed(relations) if r in ("gradients", "updates")]
    first = graph_of(graph)
    parameters = {n for n, at in first.leaves.items() if first.nodes[at].op == "parameter"}
    written = {n for kind, n, _ in graph_of(program["graph"]).outputs if kind == "update"}
    if written & parameters and steps != ["gradients", "updates"]:
        raise Rejected(
            f"the program {name!r} writes parameters, by {', '.join(steps) or 'nothing'}"
        )
    return Claim(TOLD, name, f"{len(relations)} stages")


def _check_updates(manifest: Mapping[str, Any], graph_of: Callable[[str], Graph]) -> None:
    """Where updates were appended, and where programs compute parts of them, one makes all."""
    passages = manifest["passages"]
    updating = [p for p in passages if has_updates(graph_of(p.before))]
    parts = [p for p in updating if p.relation == "part" and has_updates(graph_of(p.after))]
    programs = {program["graph"] for program in manifest["programs"]}
    made = {p.before for p in parts if p.after in programs}
    if {p.before for p in updating if p.relation == "part"} - made or (updating and not made):
        raise Rejected("a graph has updates, and no program makes them")
