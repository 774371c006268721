"""One file per trainer. Each holds one ``Launcher``; to add a trainer, add a file: nothing else names it."""
