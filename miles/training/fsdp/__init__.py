"""Fully sharded data parallel (FSDP2, ``torch.distributed.fsdp.fully_shard``), on gloo and NCCL alike."""
