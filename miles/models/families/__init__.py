"""The models that ``--train-backend megatron`` can train: one file per layout of Hugging Face checkpoints.

A family states how a ``config.json`` reads in Megatron's words, which of its settings the layers do not compute, which
Hugging Face tensors each parameter of Megatron holds, and how these are cut over ranks.

The files are here, and not in ``training/megatron``, because start-up validation reads them too. It must not import
torch, and ``config`` may not import ``training``. Importing a family needs no torch; only moving tensors does
(base.py).

To add a model, add a file that defines ``CONVERTED`` (miles moves the weights) or ``BRIDGED`` (Megatron-Bridge does),
or an entry in the file whose layout it shares. registry.py finds it.
"""
