"""The weights of a DCP checkpoint as a PyTorch file and as safetensors, in a single process."""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

folder = sorted(Path("runs/pytorch_checkpoint/snapshots").glob("step-*/.metadata"))[-1].parent
entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
weights = {
    name: torch.empty(entry.size, dtype=entry.properties.dtype)
    for name, entry in entries.items()
    if name.startswith("model.")
}
dcp.load(weights, checkpoint_id=folder, no_dist=True)  # these names alone, each tensor whole
weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
torch.save(weights, "model.pt")
dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter("safetensors"), no_dist=True)
