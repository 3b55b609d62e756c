"""How many drafts a verify run shall have: by gain, per level of load, from what was measured.

At a level of load (sequences that decode, in powers of two) a draft depth d is worth

    gain(d) = (1 + c sum_i a_1 .. a_i) * t_0 / t_d,        i = 1 .. d

a_i: chance that the i-th draft is accepted when those before it were; c: share of runs for which
something was proposed; t_0, t_d: seconds of a step without and with drafts (`Level`). All of it is
measured on the engine's own steps; an unseen place is as good as the one before it, an unseen depth
costs the least that its neighbours allow, so that it is tried. `choose` turns gains into a depth:
off below 1, and no change for less than `MARGIN`.

A level begins without drafts until its t_0 is known. One that was switched off probes rarely, less
often after each probe in vain, so that probing costs about a percent. When no draft of `IN_VAIN`
runs was accepted, not one, that is a fault rather than bad luck: off, and an alarm (B-24).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MARGIN = 0.05
"""Gain of a change over staying below which nothing changes (seed): noise of a median of steps."""
START = 2
"""Depth of the first trial of a level (seed)."""
PLAIN_STEPS = 4
"""Steps without drafts that make a baseline."""
SAMPLES = 32
"""Latest steps of a kind that its median is taken over."""
TRIED = 2
"""Steps at a depth that make its time known."""
ENOUGH_RUNS = 16
"""Verify runs since the last change before a level is judged."""
MEMORY = 256.0
"""Runs after which what was seen of acceptance has faded to 1/e."""
FADED = 8.0
"""Runs that count for acceptance when drafts are switched off: a probe can overrule them."""
PROBE_RUNS, PROBE_STEPS = 8, 64
"""Verify runs that make a probe; steps after which it ends anyway."""
FIRST_PROBE, RAREST_PROBE = 256, 4096
"""Steps from switching off to the first probe, and between later ones at most."""
STALE = 512
"""Steps with drafts after which the baseline is taken again."""
IN_VAIN = 32
"""Verify runs without one accepted draft that are a fault."""


def choose(current: int, gains: Mapping[int, float]) -> int:
    """The next depth, given each depth's gain over none. Pure.

    0 where nothing gains; `current` where no other is better by `MARGIN`.
    """
    best = max(gains, key=lambda depth: (gains[depth], -depth), default=0)
    top = gains.get(best, 0.0)
    if current == 0:
        return best if top > 1 + MARGIN else 0
    now = gains.get(current, 0.0)
    if top < 1:
        return 0
    return best if now < 1 or top > now * (1 + MARGIN) else current


@dataclass(slots=True)
class Acceptance:
    """By place, fading: how often a draft was looked at, and taken. `wanted`, `proposed`: runs that
    asked for drafts, and those that got some."""

    seen: list[float]
    taken: list[float]
    wanted: float = 0.0
    proposed: float = 0.0
    in_vain: int = 0

    def note(self, drafts: int, accepted: int) -> None:
        """One run that asked for drafts and got `drafts` of them."""
        keep = 1 - 1 / MEMORY
        self.wanted = self.wanted * keep + 1
        self.proposed = self.proposed * keep + (drafts > 0)
        if not drafts:
            return
        self.in_vain = 0 if accepted else self.in_vain + 1
        for place in range(min(accepted + 1, drafts)):
            self.seen[place] = self.seen[place] * keep + 1
            self.taken[place] = self.taken[place] * keep + (place < accepted)

    def fade(self) -> None:
        """Let what was seen weigh no more than a probe."""
        for place, seen in enumerate(self.seen):
            if seen > FADED:
                self.taken[place] *= FADED / seen
                self.seen[place] = FADED
        if self.wanted > FADED:
            self.proposed *= FADED / self.wanted
            self.wanted = FADED

    def tokens(self, depth: int) -> float:
        """Expected tokens of a run that asks for `depth` drafts."""
        reach, chance, total = 1.0, 1.0, 0.0
        for place in range(depth):
            if self.seen[place] >= 1:
                chance = self.taken[place] / self.seen[place]
            reach *= chance
            total += reach
        coverage = self.proposed / self.wanted if self.wanted else 1.0
        return 1 + coverage * total

    @property
    def rate(self) -> float | None:
        """Chance of a first draft; None while nothing was seen."""
        return self.taken[0] / self.seen[0] if self.seen[0] else None


@dataclass(slots=True)
class Level:
    """One level of load: seconds of its latest steps, and where its decision stands.

    `drafted`: share of the steps that asked for drafts in which some run had any, fading.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    verify: dict[int, deque[float]] = field(default_factory=dict)
    drafted: float = 1.0
    depth: int = START
    runs: int = 0  # verify runs since the last change
    steps: int = 0  # since the last change, or since the probe began
    since_plain: int = 0
    probing: bool = False
    interval: int = FIRST_PROBE

    def seconds(self, depth: int) -> float | None:
        """Of a step that asks for `depth` drafts, by median; None without a baseline."""
        if len(self.plain) < PLAIN_STEPS:
            return None
        base = statistics.median(self.plain)
        return self.drafted * self.undiluted(depth) + (1 - self.drafted) * base

    def undiluted(self, depth: int) -> float:
        """Of a step in which some run has `depth` drafts; there is a baseline."""
        known = {0: statistics.median(self.plain)} | {
            tried: statistics.median(times)
            for tried, times in self.verify.items()
            if len(times) >= TRIED
        }
        return _on_line(known, depth)

    def gains(self, acceptance: Acceptance, most: int) -> dict[int, float]:
        """Each depth's tokens per second over those without drafts."""
        base = self.seconds(0)
        found = {}
        for depth in range(1, most + 1):
            seconds = self.seconds(depth)
            if base is not None and seconds:
                found[depth] = acceptance.tokens(depth) * base / seconds
        return found


def _on_line(known: Mapping[int, float], depth: int) -> float:
    """On from the last two, at most what lies between the neighbours; deeper is never cheaper."""
    if depth in known:
        return known[depth]
    below = max(each for each in known if each < depth)
    before = max((each for each in known if each < below), default=None)
    above = min((each for each in known if each > depth), default=None)
    slope = 0.0
    if before is not None:
        slope = max(0.0, (known[below] - known[before]) / (below - before))
    if above is not None:
        between = (known[above] - known[below]) / (above - below)
        slope = between if before is None else min(slope, between)
    return known[below] + max(slope, 0.0) * (depth - below)


class DepthController:
    """Chooses the depth of each step. One scheduler asks and tells it, so all ranks agree.

    Args:
        most: deepest draft.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._levels: dict[int, Level] = {}
        self._fault = False
        self.acceptance = Acceptance([0.0] * most, [0.0] * most)
        self.gain = 1.0
        self.depth = 0

    def aim(self, running: int) -> int:
        """The depth for a step in which `running` sequences decode."""
        level = self._level(running)
        self.depth = self._aim(level)
        return self.depth

    def _aim(self, level: Level) -> int:
        if len(level.plain) < PLAIN_STEPS or level.since_plain > STALE:
            return 0
        if level.probing:
            return 1
        if level.depth == 0 and level.steps >= level.interval:
            level.probing, level.steps, level.runs = True, 0, 0
            return 1
        return level.depth

    def note(
        self,
        running: int,
        aimed: int,
        runs: Iterable[tuple[int, int]],
        seconds: float | None,
    ) -> None:
        """A step came back.

        Args:
            aimed: what `aim` said for it.
            runs: (drafts, accepted) of each decoding run.
            seconds: of the step; None where it did something else too, such as a prompt.
        """
        level = self._level(running)
        level.steps += 1
        deepest, drafted = 0, 0
        for drafts, accepted in runs:
            if aimed:
                self.acceptance.note(drafts, accepted)
            deepest, drafted = max(deepest, drafts), drafted + (drafts > 0)
        level.runs += drafted
        level.since_plain = level.since_plain + 1 if deepest else 0
        if aimed:
            level.drafted += ((deepest > 0) - level.drafted) / SAMPLES
        if seconds is not None:
            times = level.plain
            if deepest:
                times = level.verify.setdefault(deepest, deque(maxlen=SAMPLES))
            times.append(seconds)
        if self.acceptance.in_vain >= IN_VAIN:
            self._fault = True
        elif drafted and not self.acceptance.in_vain:
            self._fault = False
        self._judge(level)

    def _judge(self, level: Level) -> None:
        """Decide anew, once enough was seen since the last change."""
        enough = PROBE_RUNS if level.probing else ENOUGH_RUNS
        if not level.probing and self.acceptance.in_vain >= level.runs:
            enough = IN_VAIN  # not one was accepted: bad luck or a fault
        ended = level.probing and level.steps >= PROBE_STEPS
        if (level.runs < enough and not ended) or (level.depth == 0 and not level.probing):
            return
        gains = level.gains(self.acceptance, self._most)
        if not gains:
            return
        chosen = 0 if self._fault else choose(level.depth, gains)
        self.gain = gains.get(chosen, 1.0)
        if level.probing:
            level.interval = FIRST_PROBE if chosen else min(2 * level.interval, RAREST_PROBE)
        if chosen == 0:
            self.acceptance.fade()
        if chosen != level.depth or level.probing:
            level.steps = 0
        level.runs, level.probing, level.depth = 0, False, chosen

    def extra(self, running: int, depth: int) -> float:
        """What a verify run of `depth` drafts costs a sequence beside the step that it replaces, in
        steps; 0 while that is not known."""
        level = self._level(running)
        base = level.seconds(0)
        return level.undiluted(depth) / base - 1 if base else 0.0

    @property
    def alarm(self) -> str:
        """One line while not one draft was accepted for long; empty otherwise."""
        if not self._fault:
            return ""
        return f"none of the drafts of the last {self.acceptance.in_vain} verify runs was accepted"

    def _level(self, running: int) -> Level:
        number = max(running - 1, 0).bit_length()
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = Level(depth=min(START, self._most))
        return level
