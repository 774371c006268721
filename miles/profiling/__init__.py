"""Record where the seconds of an iteration go (``--profile``): spans in every process, and one trace of all of them."""
