"""Real file servers for tests, on loopback: S3 by moto, sftp by OpenSSH.

Run as a program, this is moto's S3 server with one addition: a file in a folder tells it which
requests to refuse.

    python tests/file_servers.py PORT FOLDER
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


class Server:
    """A process that listens on a port; ``env`` is what a client needs in its environment."""

    def __init__(self, command, port, log, env, process_env):
        self.command, self.port, self.log, self.env = command, port, log, env
        self.process_env = process_env
        self.start()

    def start(self):
        with open(self.log, "ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(
                self.command, **streams, env=self.process_env, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.05)

    def processes(self):
        """With its connections."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def kill(self):
        for process in self.processes() if self.process.poll() is None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(server):
    try:
        yield server
    finally:
        server.kill()


def s3(folder, port, process_env):
    """moto; ``folder`` is where it is told what to do."""
    env = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    env |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, __file__, str(port), str(folder)]
    return Server(command, port, folder / "log", env | {"no_proxy": "127.0.0.1"}, process_env)


def sftp(folder, port, process_env):
    """OpenSSH, for the user who runs the tests; ``folder`` is their home, with the key in it."""
    (folder / ".ssh").mkdir()
    for name in ("host", ".ssh/id_ed25519"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True)
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # without which it does not start
    command = f"{SSHD} -D -e -f /dev/null -p {port} -h {folder}/host -o ListenAddress=127.0.0.1"
    command += f" -o AuthorizedKeysFile={folder}/.ssh/id_ed25519.pub -o StrictModes=no"
    command = [*command.split(), "-o", "PidFile=none", "-o", "Subsystem=sftp internal-sftp"]
    env = {"HOME": str(folder), "SSH_AUTH_SOCK": ""}
    server = Server(command, port, folder / "log", env, process_env)
    server.url = f"sftp://{getpass.getuser()}@127.0.0.1:{port}"
    return server


# ---------------------------------------------------------------------- moto, and what it refuses
def main(port, folder):
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    moto = DomainDispatcherApplication(create_backend_app)

    def app(environ, start_response):
        refuse = folder / "refuse"
        if environ["REQUEST_METHOD"] == "PUT" and refuse.exists():
            if refuse.read_text() in environ["PATH_INFO"]:
                start_response("403 Forbidden", [("Content-Length", "0")])
                return [b""]
        return moto(environ, start_response)

    run_simple("127.0.0.1", port, app, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
