"""What a host says about itself, as raw text: files below a root and the output of a few commands.

Whatever reads links, isolation, memory and containers works on this object, so that a text file
stands for a machine: this one, one whose owner sent the file, or one that a test wrote.
A key is a path (``/proc/cmdline``; a folder's listing ends in ``/``) or a command line. A key that
was asked for in vain is in `refused` with the reason: what could not be read is known as such.

The file form is ``#@ KEY`` followed by the text, or ``#! KEY: reason``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from metainfer.core.errors import UsageError

LSPCI = "lspci -D -vvv"
SMI_QUERY = "nvidia-smi -q"
SMI_TOPOLOGY = "nvidia-smi topo -m"
SMI_PEERS = {
    "read": "nvidia-smi topo -p2p r",
    "write": "nvidia-smi topo -p2p w",
    "atomics": "nvidia-smi topo -p2p a",
}
SMI_CAPABILITY = "nvidia-smi --query-gpu=pci.bus_id,compute_cap --format=csv,noheader"
COMPILER = "cc --version"
COMMANDS = (LSPCI, SMI_QUERY, SMI_TOPOLOGY, *SMI_PEERS.values(), SMI_CAPABILITY, COMPILER)
COMMAND_TIMEOUT_S = 20.0

ENVIRONMENT = "environment"
SOFTWARE = "software"
#: Names of this start are kept in the text; others may hold anything and are not looked at.
ENVIRONMENT_PREFIXES = (
    "NCCL_", "CUDA_", "TORCH", "PYTORCH_", "TRITON_", "VLLM_", "SGLANG_", "OMP_", "MKL_",
    "METAINFER_", "NVIDIA_", "SGL_", "FLASHINFER_", "DG_",
)  # fmt: skip
#: A value that may be a secret is never kept.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)
HIDDEN = "(hidden)"

FILES = (
    "proc/cmdline",
    "proc/meminfo",
    "proc/mounts",
    "proc/self/cgroup",
    "proc/self/status",
    "proc/1/cgroup",
    "proc/sys/kernel/osrelease",
    "proc/sys/vm/overcommit_memory",
    "proc/sys/vm/overcommit_ratio",
    "run/.containerenv",
    ".dockerenv",
    "sys/devices/system/cpu/online",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/fs/cgroup/cpu.max",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
)
PATTERNS = (
    "sys/devices/system/node/node[0-9]*/distance",
    "sys/devices/system/node/node[0-9]*/cpulist",
    "sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id",
    "sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list",
    "sys/kernel/iommu_groups/[0-9]*/type",
    "sys/bus/pci/devices/*/numa_node",
    "sys/bus/pci/devices/*/current_link_speed",
    "sys/bus/pci/devices/*/current_link_width",
    "sys/bus/pci/devices/*/max_link_speed",
    "sys/bus/pci/devices/*/max_link_width",
)
FOLDERS = ("sys/class/iommu", "sys/kernel/iommu_groups")

#: What tells one card from its equal is not for other people's eyes.
_PRIVATE = re.compile(
    r"^(\s*(?:Serial Number|GPU UUID|GPU PDI|Chassis Serial Number|Peer Clique UUID"
    r"|Cluster UUID|Module ID)\s*:\s*)\S.*$",
    re.MULTILINE,
)

Runner = Callable[[str], tuple[str | None, str]]


@dataclass(frozen=True, slots=True)
class HostText:
    """`texts`: key -> text. `refused`: key -> why there is none."""

    texts: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def line(self, key: str) -> str | None:
        """The text's first line, or None when the key was not read."""
        text = self.texts.get(key)
        return None if text is None else text.strip().partition("\n")[0]

    def why_not(self, key: str) -> str:
        """Why a key has no text, in words."""
        return f"{key}: {self.refused.get(key, 'not asked for')}"

    def matching(self, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
        """Keys that match a regular expression as a whole, in order, with their texts."""
        compiled = re.compile(pattern)
        for key in sorted(self.texts):
            found = compiled.fullmatch(key)
            if found is not None:
                yield found, self.texts[key]

    def pairs(self, key: str) -> dict[str, str]:
        """A text of ``NAME=VALUE`` lines."""
        lines = (line.partition("=") for line in (self.texts.get(key) or "").splitlines())
        return {name: value for name, equals, value in lines if equals}


def read_host_text(
    root: Path = Path("/"),
    environ: Mapping[str, str] | None = None,
    software: Mapping[str, str | None] | None = None,
    run: Runner | None = None,
) -> HostText:
    """Read this host. Takes a second or two where NVIDIA's tools answer. Never raises."""
    texts: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name in FILES:
        _take(root / name, f"/{name}", texts, refused)
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            _take(path, f"/{path.relative_to(root)}", texts, refused)
    for name in FOLDERS:
        try:
            texts[f"/{name}/"] = "\n".join(sorted(path.name for path in (root / name).iterdir()))
        except OSError as error:
            refused[f"/{name}/"] = error.strerror or str(error)
    with ThreadPoolExecutor(len(COMMANDS)) as pool:  # each waits for a driver, not for us
        answers = list(pool.map(run or run_command, COMMANDS))
    for command, (output, why) in zip(COMMANDS, answers, strict=True):
        if output is None:
            refused[command] = why
        else:
            texts[command] = output
    variables = os.environ if environ is None else environ
    texts[ENVIRONMENT] = "\n".join(
        f"{name}={HIDDEN if _SECRET.search(name) else value}"
        for name, value in sorted(variables.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and "\n" not in value
    )
    texts[SOFTWARE] = "\n".join(
        f"{name}={version or ''}" for name, version in (software or {}).items()
    )
    return HostText(texts, refused)


def run_command(command: str) -> tuple[str | None, str]:
    """Standard output, or None with the reason. Bounded in time; nothing is typed into it."""
    words = command.split()
    if shutil.which(words[0]) is None:
        return None, "command not found"
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {COMMAND_TIMEOUT_S:.0f} s"
    except OSError as error:
        return None, str(error.strerror or error)
    if done.returncode != 0 or not done.stdout.strip():
        words_out = (done.stderr or done.stdout).strip().partition("\n")[0]
        return None, words_out or f"exit status {done.returncode}"
    return done.stdout, ""


def render(text: HostText) -> str:
    """The file, without serial numbers."""
    parts = [f"#! {key}: {' '.join(why.split())}\n" for key, why in sorted(text.refused.items())]
    for key, body in text.texts.items():
        hidden = _PRIVATE.sub(rf"\g<1>{HIDDEN}", body)
        parts.append(f"#@ {key}\n{hidden}" + ("" if not hidden or hidden.endswith("\n") else "\n"))
    return "".join(parts)


def parse(text: str, source: str) -> HostText:
    """What `render` wrote.

    Raises:
        UsageError: text before the first key, or a key given twice, with its line.
    """
    texts: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        mark, key = line[:3], line[3:].strip()
        if mark == "#! ":
            key, _, why = key.partition(": ")
            refused[key] = why or "not readable"
            current = None
        elif mark == "#@ ":
            if key in texts:
                raise _bad(f"{source}:{number}: {key} is given twice.")
            current = texts.setdefault(key, [])
        elif current is not None:
            current.append(line)
        elif line.strip():
            raise _bad(f"{source}:{number}: text that belongs to no '#@ KEY' line.")
    if not texts and not refused:
        raise _bad(f"{source} holds no '#@ KEY' line.")
    return HostText({key: "".join(lines) for key, lines in texts.items()}, refused)


def read_file(path: Path) -> HostText:
    """The host text of a file.

    Raises:
        UsageError: there is none, or it is malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from error
    return parse(text, str(path))


def _bad(cause: str) -> UsageError:
    remedy = "Give a file that metainfer doctor --save-host-text wrote."
    return UsageError(cause, remedy, code="bad_host_text")


def _take(path: Path, key: str, texts: dict[str, str], refused: dict[str, str]) -> None:
    try:
        texts[key] = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        refused[key] = error.strerror or str(error)
