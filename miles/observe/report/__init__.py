"""The page of a run while it goes on: its server and its sink; the ledger of tokens; several runs compared."""
