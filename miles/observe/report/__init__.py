"""The live view of a run: read its folder as it grows, judge its health, show its samples, compare runs."""
