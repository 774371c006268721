"""The parts around the loop of a run: folders and locks, attempts after failures, actors, metrics."""
