"""Ranks ask each other where they are, over sockets, as collectives have failed by then.

A thread per rank answers, also while the main thread computes or waits. It listens on loopback if
all ranks share a machine, else on the interface that leads to MASTER_ADDR. A question must begin
with a random key, which only the ranks of the run know; nothing is encrypted.
"""

import ipaddress
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable

import psutil

ANSWER = 10  # seconds that a rank has to answer: PyTorch may have to import much for stack traces


def serve(one_machine: bool, answers: dict[str, Callable]) -> tuple:
    """Start the thread. Returns the address for :func:`ask`. ``one_machine``: all ranks share it;
    ``answers``: functions by question, which return plain data."""
    own = host = "127.0.0.1"
    if not one_machine:
        master = os.environ["MASTER_ADDR"]
        with socket.create_connection((master, os.environ["MASTER_PORT"]), ANSWER) as link:
            own = host = link.getsockname()[0]
        if ipaddress.ip_address(own).is_loopback:  # of the master, which others know by its name
            own = ""  # all interfaces
            host = master
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = socket.create_server((own, 0), family=family, backlog=1024)
    key = secrets.token_hex()

    def answer() -> None:
        while True:
            link, _ = listener.accept()
            try:
                with link:
                    link.settimeout(1)  # of strangers, who send no question
                    asked, question = link.recv(200).decode().split()
                    if secrets.compare_digest(asked, key):
                        link.sendall(json.dumps(answers[question]()).encode())
            except Exception:  # the rank that asks reports that there is no answer
                continue

    threading.Thread(target=answer, daemon=True).start()
    return host, listener.getsockname()[1], key, socket.gethostname(), os.getpid()


def ask(question: str, address: tuple | str):
    """A rank's answer, or a string: why there is none, or no address. A process that a signal has
    stopped is continued, so that it answers; the run has failed in any case."""
    if isinstance(address, str):
        return address
    host, port, key, machine, process = address
    try:
        here = machine == socket.gethostname()
        status = psutil.Process(process).status() if here else psutil.STATUS_RUNNING
        if status == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(process)
        if status == psutil.STATUS_STOPPED:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.1)  # until its main thread has noticed
        with socket.create_connection((host, port), ANSWER) as link, link.makefile() as answer:
            link.sendall(f"{key} {question}".encode())
            return None if question == "end" else json.load(answer)  # it may end before it answers
    except (ConnectionRefusedError, psutil.NoSuchProcess):  # a zombie, too
        return "its process has ended"
    except (OSError, ValueError, psutil.Error):
        return "it does not answer"
