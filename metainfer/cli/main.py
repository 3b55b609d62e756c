"""``metainfer``: the verbs, and the one place where errors become lines and exit codes.

Exit 0: done. 1: the answer is no. 2: bad usage. A user's error is one line with cause and remedy;
with ``--json`` it is the document.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import metainfer
from metainfer.cli import bench, chat, convert, doctor, examine, generate, kernels, output, serve
from metainfer.cli.output import Output, Result
from metainfer.core import env
from metainfer.core.errors import MetaInferError, UsageError, UserError

_LEVELS = ("error", "warning", "info", "debug")


def build() -> App:
    """The application with all verbs."""
    app = App(
        name="metainfer",
        help="An inference engine for machines whose GPUs are linked by PCIe alone.",
        version=metainfer.__version__,
        help_format="plaintext",
        default_parameter=None,
        result_action="return_value",
    )
    app.command(serve.serve, name="serve")
    app.command(chat.chat, name="chat")
    app.command(generate.generate, name="generate")
    app.command(doctor.doctor, name="doctor")
    app.command(examine.app())
    app.command(kernels.app())
    app.command(bench.app())
    app.command(convert.convert, name="convert")
    app.command(examine.version, name="version")
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    words = list(arguments)
    out = output.current = Output("--json" in words)
    with out.guard():
        try:
            env.check()
            _set_up_logging()
            result = build()(words, exit_on_error=False, print_error=False, help_on_error=False)
            return out.finish(result if isinstance(result, Result) else Result())
        except CycloptsError as error:
            return _fail(out, _usage_error(error))
        except MetaInferError as error:
            if not isinstance(error, UserError):
                logging.getLogger("metainfer").debug("", exc_info=True)
            return _fail(out, error)
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the reader of our output has left: `metainfer ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1


def _fail(out: Output, error: MetaInferError) -> int:
    if out.as_json:
        out.document(error.to_json())
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return error.exit_code


def _usage_error(error: CycloptsError) -> UsageError:
    text = " ".join(str(error).split())
    head, mark, tail = text.partition(" Did you mean")
    words = [word for word in (error.command_chain or ()) if word]
    command = " ".join(["metainfer", *words])
    remedy = f"Did you mean{tail}" if mark else f"See {command} --help."
    head = head.replace(". must", ": it must")
    return UsageError(head if head.endswith((".", "?")) else f"{head}.", remedy)


def _set_up_logging() -> None:
    level = env.get("METAINFER_LOG") or "info"
    if level not in _LEVELS:
        raise UsageError(
            f"METAINFER_LOG is {level!r}.", f"Use one of {', '.join(_LEVELS)}.", code="bad_env"
        )
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
