"""How new weights travel from trainer to engines: named chunks in, named chunks out; it knows no model."""
