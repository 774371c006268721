"""What a run keeps of its failure in its output folder: a report of a hang, and Ray's logs."""
