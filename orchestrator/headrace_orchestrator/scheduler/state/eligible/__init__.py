"""The eligible groups of a run, indexed so that a batch is selected without reading all of them."""
