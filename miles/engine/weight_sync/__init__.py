"""Send new weights from the trainer to engines: named chunks go in, and no model or engine is known here."""
