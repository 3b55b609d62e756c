"""``metainfer`` over the engine with faults on order: ``serve_faulty.py FOLDER serve MODEL ``."""

from __future__ import annotations

import sys
from pathlib import Path

from metainfer.cli import clients
from metainfer.cli.main import run

if __name__ == "__main__":
    engine = Path(__file__).with_name("faulty_engine.py")
    clients.command = (sys.executable, str(engine), sys.argv[1])
    sys.exit(run(sys.argv[2:]))
