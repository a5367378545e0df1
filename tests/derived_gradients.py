"""Gradients of a graph, compared with those that the certificate's checker derives."""

from __future__ import annotations

from treadle.autodiff.backward import Differentiated, differentiate
from treadle.ir.graph import Graph, OutputKind
from treadle.kernel.evidence import Passage, Relation
from treadle.verify.certificate.replay import WHOLE, replayed


def compare_gradients(loss: Graph, found: Differentiated | Graph) -> None:
    """A GraphError if they are wrong; an assertion if they are not known to be right."""
    graph = found if isinstance(found, Graph) else found.graph
    hints = (
        {} if isinstance(found, Graph) else {"pairs": found.kept, "cotangents": found.cotangents}
    )
    passage = Passage("differentiate", Relation.GRADIENTS, loss, graph, **hints)
    (known,) = replayed([passage], WHOLE)
    assert not known.reason, known.reason


def compare(loss: Graph) -> None:
    """The compiler's gradients at all leaves that are floats."""
    floats = [n for n, i in loss.leaves.items() if loss.nodes[i].types[0].is_float]
    found = differentiate(loss, floats)
    assert any(o.kind is OutputKind.GRADIENT for o in found.graph.outputs)
    compare_gradients(loss, found)
