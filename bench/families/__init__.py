"""The zoo: models of many families, each written once over a side, Treadle's or PyTorch's."""

from families import (
    attention,
    derivatives,
    features,
    graphs,
    images,
    networks,
    operators,
    recurrent,
    sound,
    transformers,
)
from families.entry import Entry

FAMILIES = (
    images, networks, recurrent, sound, graphs, operators, transformers, attention, features,
    derivatives,
)  # fmt: skip
ZOO: dict[str, Entry] = {entry.name: entry for family in FAMILIES for entry in family.ENTRIES}
