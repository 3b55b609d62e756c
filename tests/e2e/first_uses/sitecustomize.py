"""In every child that is given this folder and `FIRST_USES`: libraries, processes and modules of
ours go into that file, a line each, when they are first used."""

import os
import sys

EVENTS = ("ctypes.dlopen", "subprocess.Popen")

if log := os.environ.get("FIRST_USES"):
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: str, args: tuple[object, ...]) -> None:
        ours = event == "import" and str(args[0]).startswith(("metainfer", "triton"))
        if ours or event in EVENTS:
            os.write(out, f"{os.getpid()} {event} {args[0]}\n".encode())

    sys.addaudithook(note)
