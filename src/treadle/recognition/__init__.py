"""Recognition: what is written out by hand becomes the composite that it is."""
