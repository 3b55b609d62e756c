"""The command line over the fake engine: ``run_fake.py [ENGINE FLAG ...] -- VERB ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from metainfer.cli import clients
from metainfer.cli.main import run
from metainfer.engine import model_text

FAKE = Path(__file__).parents[1] / "server" / "fake_engine.py"

if __name__ == "__main__":
    split = sys.argv.index("--")
    clients.command = (sys.executable, str(FAKE), *sys.argv[1:split])
    text = model_text.byte_deepseek if "--script" in sys.argv[:split] else model_text.byte_text
    model_text.load_text = lambda reference, vocab_size: text(vocab_size)
    sys.exit(run(sys.argv[split + 1 :]))
