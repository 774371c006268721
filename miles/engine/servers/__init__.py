"""Generation servers: what an engine of them does, whatever program they run."""
