"""Record the work of an iteration (``--profile``): spans in every process, and one trace of all of them."""
