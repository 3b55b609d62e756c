"""The account of one KV domain: who holds which pages, what is cached, what still fits.

Arithmetic on descriptions only; the store holds the bytes. Per sequence and step the work is one
comparison, except where a page border is crossed (B-08).

Pages are shared only when full, and a sequence starts writing at a page border, so a shared page is
never written and copy-on-write is never needed. Rejected drafts are dropped by not committing them:
`commit` takes confirmed lengths only, hence registered content is never rewound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from metainfer.core.errors import InternalError
from metainfer.core.step import PageGrant, StateMove
from metainfer.core.verdict import ACCEPT, Verdict, all_of, reject
from metainfer.kv.book.blocks import NULL_PAGE, PagePool, SnapshotPool
from metainfer.kv.book.capacity import CacheSizes, fits
from metainfer.kv.book.prefix import Prefix
from metainfer.kv.book.spec import GroupKind, GroupSpec, Rewind, hit_grid
from metainfer.kv.book.watch import HitWatch

_FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Hit:
    """Where computation may start: `pages[i]` are table entries from `first[i]` on, per paged or
    window group in the order of `KVManager.paged`."""

    tokens: int
    first: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Account:
    """One running sequence. `tables[i]` has an entry per page from position 0 on; entries below
    `live[i]` were given back. `length`: confirmed tokens; `covered`: positions that have pages."""

    slot: int
    prefix: Prefix
    tables: list[list[int]]
    live: list[int]
    registered: list[int]
    length: int = 0
    covered: int = _FAR
    border: int = 0  # `commit` has something to do from this length on
    scratch: list[tuple[int, int]] = field(default_factory=list)  # (state group, place)
    scratch_at: int = -1
    restore: bool = False


class KVManager:
    """Pages and snapshots of one domain.

    `namespace` names everything that changes cache content: model, weights, adapter, KV format.
    `caching` False keeps the account but never matches.
    """

    def __init__(
        self, sizes: CacheSizes, *, domain: int = 0, namespace: str = "", caching: bool = True
    ) -> None:
        self.sizes = sizes
        self.domain = domain
        self.namespace = namespace
        self.groups = sizes.groups
        self.paged = tuple(g for g in sizes.groups if g.kind is not GroupKind.STATE)
        self.states = tuple(g for g in sizes.groups if g.kind is GroupKind.STATE)
        self.pools = [PagePool(sizes.pages[g.index]) for g in self.paged]
        self.snapshots = {
            g.index: SnapshotPool(sizes.places(g.index))
            for g in self.states
            if not g.clean_tokens or g.rewind is Rewind.SNAPSHOT
        }
        self.grid = hit_grid(sizes.groups)
        self.unit = math.gcd(self.grid, *(g.page_tokens for g in self.paged))
        self.watch = HitWatch(tuple(g.name for g in sizes.groups))
        self.cache_verdict = self._can_cache(caching)
        self.caching = self.cache_verdict.accepted
        self.accounts: dict[int, Account] = {}
        self._span = [g.page_tokens for g in self.paged]
        self._window = [g.window if g.kind is GroupKind.WINDOW else 0 for g in self.paged]
        self._saved = tuple(g.index for g in self.states if not g.clean_tokens)
        self._rollback = tuple(g.index for g in self.states if g.rewind is Rewind.SNAPSHOT)

    def _can_cache(self, wanted: bool) -> Verdict:
        """Why prefix hits are impossible here, if they are; reported, never silent (B-25)."""
        verdicts = [ACCEPT if wanted else reject("off", "prefix caching is turned off")]
        for group in self.states:
            if not group.clean_tokens and not self.sizes.places(group.index):
                message = f"state group {group.name} can be resumed nowhere: it has no snapshots"
                verdicts.append(reject("snapshots", message, group=group.name, have=0))
        return all_of(verdicts)

    # -- looking up --------------------------------------------------------------------------------

    @property
    def aligns_chunks(self) -> bool:
        """Whether chunks should end on the grid, because only there a state can be saved."""
        return self.caching and bool(self._saved)

    @property
    def draft_limit(self) -> int:
        """Most drafts a verify run may hold: a ring goes back no further than it remembers."""
        rings = [g.ring_tokens for g in self.states if g.rewind is Rewind.CURSOR]
        return min(rings, default=_FAR)

    def prefix(self, tokens: list[int], salt: str, adapter: str = "") -> Prefix:
        """The digest chain of a sequence; `tokens` may grow, and is read, not copied.

        `adapter`: the digest of its adapter's content, which is part of the namespace then.
        """
        # No model reference holds a NUL, so the two parts stay apart.
        namespace = f"{self.namespace}\0{adapter}" if adapter else self.namespace
        return Prefix(tokens, self.unit, namespace, salt)

    def match(self, prefix: Prefix, tokens: int) -> Hit:
        """The longest position below `tokens` at which every group can resume. Changes nothing."""
        position = self._resume_point(prefix, tokens) if self.caching else 0
        firsts, pages = [], []
        for i, span in enumerate(self._span):
            first = self._first_needed(i, position)
            index = self.pools[i].index
            ends = range((first + 1) * span, position + 1, span)
            firsts.append(first)
            pages.append(tuple(index[prefix.at(end)] for end in ends))
        return Hit(position, tuple(firsts), tuple(pages))

    def _first_needed(self, i: int, position: int) -> int:
        """The first table entry of paged group i that a token at `position` reads."""
        window = self._window[i]
        return max(0, position - window + 1) // self._span[i] if window else 0

    def _resume_point(self, prefix: Prefix, tokens: int) -> int:
        top = (tokens - 1) // self.grid * self.grid
        windows = []
        for i, span in enumerate(self._span):
            index = self.pools[i].index
            if self._window[i]:
                windows.append(i)
                continue
            end = span
            while end <= top and prefix.at(end) in index:
                end += span
            top = min(top, (end - span) // self.grid * self.grid)
        if not top:
            return 0
        runs = [self._runs(i, prefix, top) for i in windows]
        for position in range(top, 0, -self.grid):
            held = all(
                run[position // self._span[i]]
                >= position // self._span[i] - self._first_needed(i, position)
                for i, run in zip(windows, runs, strict=True)
            )
            if held and self._has_snapshots(prefix, position):
                return position
        return 0

    def _runs(self, i: int, prefix: Prefix, top: int) -> list[int]:
        """For each page count n: how many consecutive pages ending with page n - 1 are cached."""
        index, span, run, found = self.pools[i].index, self._span[i], 0, [0]
        for end in range(span, top + 1, span):
            run = run + 1 if prefix.at(end) in index else 0
            found.append(run)
        return found

    def _has_snapshots(self, prefix: Prefix, position: int) -> bool:
        if not self._saved:
            return True
        key = prefix.at(position)
        return all(self.snapshots[g].find(key) is not None for g in self._saved)

    def note_lookup(self, prefix: Prefix, tokens: int, hit: Hit) -> None:
        """Count a look-up for the zero-hit alarm, once per admission (B-25)."""
        if self.caching:
            self.watch.note(self, prefix, tokens, hit.tokens)

    def note_prompt(self, prefix: Prefix, prompt: int) -> None:
        """A prompt of `prompt` tokens is computed and should from now on be found."""
        end = (prompt - 1) // self.grid * self.grid
        if self.caching and end:
            self.watch.computed(prefix.at(end))

    def resumable_alone(self, group: GroupSpec, prefix: Prefix, top: int) -> bool:
        """Whether this group by itself could resume anywhere in (0, top]."""
        if group.kind is GroupKind.STATE:
            if group.clean_tokens:
                return True
            pool = self.snapshots[group.index]
            ends = range(self.grid, top + 1, self.grid)
            return any(pool.find(prefix.at(end)) is not None for end in ends)
        i = self.paged.index(group)
        runs, span = self._runs(i, prefix, top), self._span[i]
        return any(
            runs[end // span] >= end // span - self._first_needed(i, end)
            for end in range(self.grid, top + 1, self.grid)
        )

    # -- room --------------------------------------------------------------------------------------

    def fits(self, tokens: int) -> Verdict:
        """Whether a sequence of `tokens` cached tokens ever fits in the empty pool (B-28)."""
        return fits(self.sizes, tokens)

    def missing(self, tokens: int, hit: Hit) -> list[int]:
        """Pages per paged group to bring a new sequence to `tokens`: only what the hit lacks, plus
        cached pages that stop being available because the hit pins them."""
        counts = []
        for i, group in enumerate(self.paged):
            pool, found = self.pools[i], hit.pages[i]
            pinned = sum(1 for page in found if not pool.refs[page])
            new = group.pages_for(tokens) - hit.first[i] - len(found)
            if self._window[i]:
                new = min(new, group.live_pages(tokens) - len(found))
            counts.append(max(0, new) + pinned)
        return counts

    def shortfall(self, account: Account, tokens: int) -> list[int]:
        """Pages per paged group that a running sequence still lacks to reach `tokens`."""
        counts = []
        for i, group in enumerate(self.paged):
            table = account.tables[i]
            lack = group.pages_for(tokens) - len(table)
            if self._window[i]:
                lack = min(lack, group.live_pages(tokens) - (len(table) - account.live[i]))
            counts.append(max(0, lack))
        return counts

    def fit(self, account: Account, end: int) -> int:
        """The largest position up to `end` for which pages are available now."""
        for i, span in enumerate(self._span):
            end = min(end, (len(account.tables[i]) + self.pools[i].available) * span)
        return end

    # -- life of a sequence ------------------------------------------------------------------------

    def open(self, slot: int, prefix: Prefix, hit: Hit) -> tuple[Account, list[PageGrant]]:
        """Give `slot` to a sequence that starts after `hit`; its pages become the first grants."""
        if slot in self.accounts:
            raise InternalError(f"slot {slot} is taken")
        account = Account(slot, prefix, [], list(hit.first), [], length=hit.tokens)
        grants = []
        for i, group in enumerate(self.paged):
            first, pages = hit.first[i], hit.pages[i]
            for page in pages:
                self.pools[i].share(page)
            account.tables.append([NULL_PAGE] * first + list(pages))
            account.registered.append(first + len(pages))
            if pages:
                grants.append(PageGrant(slot, group.index, first, pages))
        self.accounts[slot] = account
        self._refresh(account)
        return account, grants

    def opening_moves(self, account: Account) -> list[StateMove]:
        """What brings the slot's states to the hit: snapshots loaded, the rest zeroed."""
        moves = []
        key = account.prefix.at(account.length) if account.length else b""
        for group in self.states:
            kind, place = "zero", -1
            if key and not group.clean_tokens:
                pool = self.snapshots[group.index]
                found = pool.find(key)
                if found is None:
                    raise InternalError(f"snapshot of a hit is gone in group {group.name}")
                pool.use(key)
                kind, place = "load", found
            moves.append(StateMove(kind, group.index, self.domain, account.slot, place))
        return moves

    def reserve(self, account: Account, end: int) -> list[PageGrant] | Verdict:
        """Pages up to position `end`, all groups or none; a rejection names what is short."""
        wanted = []
        for i, group in enumerate(self.paged):
            need = group.pages_for(end) - len(account.tables[i])
            have = self.pools[i].available
            if need > have:
                message = f"{need} pages of group {group.name} needed, {have} available"
                return reject("pages", message, group=group.name, need=need, have=have)
            wanted.append(need)
        grants = []
        for i, need in enumerate(wanted):
            if need > 0:
                table = account.tables[i]
                pages = self.pools[i].take(need)
                grants.append(
                    PageGrant(account.slot, self.paged[i].index, len(table), tuple(pages))
                )
                table.extend(pages)
        self._refresh(account)
        return grants

    def commit(self, account: Account, length: int) -> None:
        """Positions below `length` hold confirmed content: register full pages, give back what
        left each window. Token ids up to `length` must be known to the account's prefix."""
        account.length = length
        if length >= account.border:
            self._settle(account)

    def trim(self, account: Account, length: int) -> None:
        """Give back pages of positions from `length` on: taken for drafts, or for nothing else.

        `length` is at least the confirmed one, so these pages are not shared and not findable.
        """
        for i, span in enumerate(self._span):
            table = account.tables[i]
            keep = -(-length // span)
            for page in reversed(table[keep:]):
                self.pools[i].drop(page)
            del table[keep:]
        self._refresh(account)

    def free(self, account: Account) -> None:
        """The sequence leaves. Its registered pages stay findable until they are reused."""
        del self.accounts[account.slot]
        for i, table in enumerate(account.tables):
            drop = self.pools[i].drop
            for page in reversed(table[account.live[i] :]):  # the tail is evicted first
                drop(page)
        self._drop_scratch(account)

    def discredit(self, prefix: Prefix, tokens: int) -> None:
        """A fault was found in a sequence of `tokens` tokens: forget whatever is cached of it.

        Earlier chunks too, since only the last one has logits to show what they broke. Those who
        hold such a page keep it; nobody finds it again.
        """
        for pool, span in zip(self.pools, self._span, strict=True):
            for end in range(span, tokens + 1, span):
                pool.forget(prefix.at(end))
        for end in range(self.grid, tokens + 1, self.grid):
            self.watch.condemned(prefix.at(end))
            for group in self._saved:
                self.snapshots[group].forget(prefix.at(end))

    def unsave(self, prefix: Prefix, position: int) -> None:
        """A snapshot of `position` was planned and perhaps never taken: forget it."""
        if position and position % self.grid == 0:
            for group in self._saved:
                self.snapshots[group].forget(prefix.at(position))

    # -- slot states -------------------------------------------------------------------------------

    def state_moves(self, account: Account, start: int) -> list[StateMove]:
        """Moves before a run from `start`: undo rejected drafts, or save a state on the grid."""
        if account.restore:
            moves = [
                StateMove("load", group, self.domain, account.slot, place)
                for group, place in account.scratch
            ]
            self._drop_scratch(account)
            return moves
        if not self.caching or not self._saved or not start or start % self.grid:
            return []
        moves, key = [], account.prefix.at(start)
        for group in self._saved:
            place = self.snapshots[group].save(key)
            if place is not None:
                moves.append(StateMove("save", group, self.domain, account.slot, place))
        return moves

    @property
    def can_checkpoint(self) -> bool:
        """Whether `checkpoint` finds places now; true when no state needs one."""
        return all(self.snapshots[group].available for group in self._rollback)

    def checkpoint(self, account: Account, start: int) -> list[StateMove]:
        """Save states aside before a verify run at `start`.

        Raises:
            InternalError: there is no place; callers look at `can_checkpoint` first.
        """
        moves = []
        for group in self._rollback:
            place = self.snapshots[group].hold(account.slot)
            if place is None:
                raise InternalError("no snapshot place is left for a verify run")
            account.scratch.append((group, place))
            moves.append(StateMove("save", group, self.domain, account.slot, place))
        account.scratch_at = start
        return moves

    def rewind(self, account: Account, length: int, rejected: int) -> int:
        """After a verify run of which `rejected` drafts failed: where computing goes on.

        That is `length`, except for snapshot states, which go back to the run's start.
        """
        if rejected and account.scratch:
            account.restore = True
            return account.scratch_at
        self._drop_scratch(account)
        return length

    def _drop_scratch(self, account: Account) -> None:
        for group, place in account.scratch:
            self.snapshots[group].unhold(place)
        account.scratch.clear()
        account.scratch_at = -1
        account.restore = False

    # -- internals ---------------------------------------------------------------------------------

    def _settle(self, account: Account) -> None:
        length, prefix = account.length, account.prefix
        for i, span in enumerate(self._span):
            pool, table = self.pools[i], account.tables[i]
            full = length // span
            if self.caching:
                for entry in range(max(account.registered[i], account.live[i]), full):
                    pool.register(table[entry], prefix.at((entry + 1) * span))
            account.registered[i] = full
            first = self._first_needed(i, length)
            for entry in range(account.live[i], first):
                pool.drop(table[entry])
                table[entry] = NULL_PAGE
            account.live[i] = max(account.live[i], first)
        self._refresh(account)

    def _refresh(self, account: Account) -> None:
        border = (account.length // self.unit + 1) * self.unit
        covered = _FAR
        for i, span in enumerate(self._span):
            covered = min(covered, len(account.tables[i]) * span)
            if self._window[i]:
                border = min(border, (account.live[i] + 1) * span + self._window[i] - 1)
        account.covered, account.border = covered, border

    def usage(self) -> float:
        """Largest fraction of pages held, over groups."""
        return max((pool.used / pool.total for pool in self.pools if pool.total), default=0.0)

    @property
    def released(self) -> int:
        """Grows whenever pages became available; unchanged means no new room."""
        return sum(pool.released for pool in self.pools)

    @property
    def touched(self) -> int:
        return sum(pool.touched for pool in self.pools)

    def flush(self) -> None:
        """Forget all cached content nobody holds, and every snapshot."""
        for pool in self.pools:
            pool.forget_cached()
        for snapshots in self.snapshots.values():
            for key in list(snapshots.index):
                snapshots.forget(key)
