"""One rank of the trainer: the backend protocol, what backends share, and one folder a framework."""
