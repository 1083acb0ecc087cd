"""Refuses snapshots that would run code: unpickling can call any function that a pickle names."""

import enum
import pickle
from pathlib import Path


class UntrustedSnapshot(Exception):
    """A snapshot that would run code while it is loaded."""


class PlainUnpickler(pickle.Unpickler):
    """Reads the metadata of a sharded snapshot. It is a pickle, which could call any
    function (https://docs.python.org/3/library/pickle.html#restricting-globals)."""

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
        "pathlib._local": {"PosixPath", "WindowsPath"},  # its name in Python 3.13
        "torch": {"Size", "bfloat16", "float16", "float32", "float64", "int64"},
    }

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return self.member_of
        if name not in self.allowed.get(module, ()):
            raise UntrustedSnapshot(f"it refers to {module}.{name}, which is no tensor metadata")
        return super().find_class(module, name)

    @staticmethod
    def member_of(kind: type, name: str) -> enum.Enum:
        """Replaces getattr, which Python 3.11.0 to 3.11.3 use for members of an enum."""
        if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
            raise UntrustedSnapshot(f"it asks for {name} of {kind}, which is no enum")
        return kind[name]


def check_sharded(folder: Path) -> None:
    """Check that ``torch.distributed.checkpoint`` will load only tensors: it unpickles the metadata
    and all other objects without any check.

    Raises:
        UntrustedSnapshot: if there is anything else.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if list(folder.glob("__*.metadata")):  # read if the metadata itself cannot be
        raise UntrustedSnapshot("it has a second metadata file")
    try:
        with open(folder / ".metadata", "rb") as file:
            contents = PlainUnpickler(file).load().state_dict_metadata
    except (OSError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise UntrustedSnapshot(f"its metadata cannot be read ({error})") from error
    for name, kind in contents.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise UntrustedSnapshot(f"{name} in it is not a tensor")
