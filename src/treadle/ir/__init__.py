"""The tensor IR: types, the op table, graphs, and what holds for all of them."""
