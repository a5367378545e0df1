"""The zoo: models of many families, each written once over a side, Treadle's or PyTorch's."""

from families import graphs, images, operators, recurrent, transformers
from families.entry import Entry

ZOO: dict[str, Entry] = {
    entry.name: entry
    for family in (images, recurrent, graphs, operators, transformers)
    for entry in family.ENTRIES
}
