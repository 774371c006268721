"""What every room may use: text, errors, flags, secrets, user code, processes, storage, this host."""

from miles.base.host import avoid_unusable_amx

avoid_unusable_amx()  # every process that computes with PyTorch imports a module of this room first
