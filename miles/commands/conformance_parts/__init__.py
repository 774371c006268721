"""The parts of ``miles conformance``: the batch, our loss, the papers' formulas, and the losses of other trainers."""
