"""Rules for flags that concern several sections of ``--help``: the loss, and modes of a whole run."""
