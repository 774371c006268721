"""The curves of several runs as a picture, and the versions, data and machine that a run started with."""
