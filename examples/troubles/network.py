"""Start and network: a port in use, a name that is unknown, a wrong network card, a safe path.

torchrun --nproc_per_node=2 examples/troubles/network.py
"""

import os
import socket
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from shared import show


def port_in_use(remedy):
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with socket.create_server(("", 0)) as other:
        port = 0 if remedy else other.getsockname()[1]
        dist.TCPStore("127.0.0.1", port, 1, is_master=True)


def join_store(host, port=None):
    options = {"world_size": 2, "wait_for_workers": False, "timeout": timedelta(seconds=1)}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, **options)
    dist.TCPStore(host, port or store.port, is_master=False, **options)


def unknown_host(remedy):
    join_store("127.0.0.1" if remedy else "no-such-host.invalid")


def nobody_listens(remedy):
    join_store("127.0.0.1", None if remedy else 9)


def wrong_card(remedy):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if remedy else "eth9"
    dist.new_group()


def safe_path(remedy):
    """Python does not look for modules beside the script, except in PYTHONPATH."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "common.py").touch()
        Path(folder, "script.py").write_text("import common")
        os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": folder if remedy else ""}
        command = [sys.executable, f"{folder}/script.py"]
        ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    show(port_in_use, unknown_host, nobody_listens, wrong_card, safe_path)
