"""Refuses snapshots that would run code: unpickling can call any function that a pickle names."""

import enum
import pickle
from pathlib import Path


class UntrustedSnapshot(Exception):
    """A snapshot that asks for code to be run while it is read."""


class PlainUnpickler(pickle.Unpickler):
    """Reads the list of contents of a sharded snapshot. It is a pickle, which could ask for any
    function to be called (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

    allowed = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},  # as Python 3.13 calls it
        "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int64"},
    }

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return self.member_of
        if name not in self.allowed.get(module, ()):
            raise UntrustedSnapshot(f"it asks for {module}.{name}, which a list of tensors has not")
        return super().find_class(module, name)

    @staticmethod
    def member_of(kind: type, name: str) -> enum.Enum:
        """In the place of getattr, by which Python 3.11.0 to 3.11.3 write the member of an enum."""
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            raise UntrustedSnapshot(f"it asks for {name} of {kind}, which is no enum")
        return kind[name]


def check_sharded(folder: Path) -> None:
    """Make sure that ``torch.distributed.checkpoint`` will read tensors only: it unpickles the list
    of contents, and all that is not a tensor, without asking.

    Raises:
        UntrustedSnapshot: if it would do more.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if list(folder.glob("__*.metadata")):  # which would be read where the list itself cannot be
        raise UntrustedSnapshot("it has a second list of contents")
    try:
        with open(folder / ".metadata", "rb") as file:
            contents = PlainUnpickler(file).load().state_dict_metadata
    except (OSError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise UntrustedSnapshot(f"its list of contents cannot be read ({error})") from error
    for name, kind in contents.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise UntrustedSnapshot(f"{name} in it is not a tensor")
