"""``metainfer``: the verbs, and the one place where errors become lines and exit codes.

Exit 0: done. 1: the answer is no. 2: bad usage. A user's error is one line with cause and remedy;
with ``--json`` it is the document.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

import metainfer
from metainfer.cli import (
    bench,
    chat,
    completion,
    config,
    convert,
    doctor,
    examine,
    generate,
    help_text,
    kernels,
    output,
    report,
    serve,
    settings,
    simulate,
    tune,
    verify,
    vllm_names,
)
from metainfer.cli.declared import Verbs
from metainfer.cli.output import Output, PatientHandler, Result
from metainfer.core import env
from metainfer.core.errors import MetaInferError, UsageError, UserError

_LEVELS = ("error", "warning", "info", "debug")


RUN = Group("Run a model", sort_key=1)
UNDERSTAND = Group("Understand a machine, a plan, a setting", sort_key=2)
MEASURE = Group("Measure and convert", sort_key=3)


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
    app.command(serve.serve, name="serve", group=RUN)
    app.command(chat.chat, name="chat", group=RUN)
    app.command(generate.generate, name="generate", group=RUN)
    app.command(doctor.doctor, name="doctor", group=UNDERSTAND)
    app.command(report.report, name="report", group=UNDERSTAND)
    app.command(simulate.simulate, name="simulate", group=UNDERSTAND)
    app.command(examine.version, name="version", group=UNDERSTAND)
    app.command(completion.completion, name="completion", group=UNDERSTAND)
    app.command(verify.verify, name="verify", group=MEASURE)
    app.command(convert.convert, name="convert", group=MEASURE)
    groups = {UNDERSTAND: (examine, config), MEASURE: (tune, kernels, bench)}
    for group, modules in groups.items():
        for module in modules:
            verbs = module.app()
            verbs.group = group
            app.command(verbs)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    words = list(arguments)
    out = output.current = Output("--json" in words)
    with out.guard():
        try:
            env.check()
            _set_up_logging()
            return out.finish(_run(words))
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


def _run(words: Sequence[str]) -> Result:
    app = build()
    asked = help_text.term_in(words)
    if asked is not None and (*asked[0], asked[1]) not in (verbs := Verbs(app)):
        text = help_text.answer(*asked, verbs)
        return Result({"help": text.splitlines()}, text)
    made = settings.gather(words, Verbs(app))
    settings.current = made
    for note in made.notes:
        print(note, file=sys.stderr, flush=True)
    result = app(made.words, exit_on_error=False, print_error=False, help_on_error=False)
    return result if isinstance(result, Result) else Result()


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
    remedy = f"Did you mean{tail}" if mark else _nearest(text) or f"See {command} --help."
    head = head.replace(". must", ": it must")
    remedy = f"{settings.current.blame(text)} {remedy}".strip()
    return UsageError(head if head.endswith((".", "?")) else f"{head}.", remedy)


def _nearest(text: str) -> str:
    """Which flag, ours or vLLM's, an unknown one may have been meant for."""
    found = re.search(r"Unknown option: \"?(--?[\w-]+)", text)
    verb = settings.current.verb
    if found is None or verb is None:
        return ""
    near = difflib.get_close_matches(found[1], [*verb.by_name, *vllm_names.BY_NAME], n=1)
    return f"Did you mean {near[0]}?" if near else ""


def _set_up_logging() -> None:
    level = env.get("METAINFER_LOG") or "info"
    if level not in _LEVELS:
        raise UsageError(
            f"METAINFER_LOG is {level!r}.", f"Use one of {', '.join(_LEVELS)}.", code="bad_env"
        )
    logging.basicConfig(
        level=level.upper(),
        handlers=[PatientHandler(sys.stderr)],
        format="%(levelname)s %(name)s: %(message)s",
    )


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
