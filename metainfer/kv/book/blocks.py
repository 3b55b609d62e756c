"""Page ids and snapshot ids: who holds them, what they still contain, which is reused next.

A page whose last holder leaves keeps its key, hence stays a prefix-cache hit, until the page is
needed for something else; the least recently released goes first. Every operation is O(1).

Reuse is safe while steps are in flight because devices execute plans in order: a page taken in plan
n is written by plan n or later, after everything that still reads its old content.
"""

from __future__ import annotations

from collections import OrderedDict

from metainfer.core.errors import InternalError

NULL_PAGE = 0
"""Never handed out: padding rows read it, given-back table entries name it. Nothing is written."""


class PagePool:
    """Pages `1 .. pages - 1` of one group. A page is free, held (refs > 0) or cached (refs 0)."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.refs = [0] * pages
        self.keys: list[bytes | None] = [None] * pages
        self.index: dict[bytes, int] = {}
        self.evictions = 0
        self.touched = 0  # page operations since start: work is proportional to it (B-08)
        self.released = 0  # pages that became available since start
        self.free = list(range(pages - 1, NULL_PAGE, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # oldest release first

    @property
    def available(self) -> int:
        """Pages that can be taken now, evicting cached content if need be."""
        return len(self.free) + len(self.cached)

    @property
    def total(self) -> int:
        return max(0, self.pages - 1)

    @property
    def used(self) -> int:
        return self.total - self.available

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each and no key.

        Raises:
            InternalError: fewer are available; callers look first.
        """
        if count > self.available:
            raise InternalError(f"{count} pages wanted, {self.available} available")
        self.touched += count
        taken = []
        for _ in range(count):
            if self.free:
                page = self.free.pop()
            else:
                page, _ = self.cached.popitem(last=False)
                self._forget(page)
                self.evictions += 1
            self.refs[page] = 1
            taken.append(page)
        return taken

    def share(self, page: int) -> None:
        """One more holder of a page found in the index."""
        self.touched += 1
        if not self.refs[page]:
            del self.cached[page]
        self.refs[page] += 1

    def drop(self, page: int) -> None:
        """One holder less. The last one leaves the content as cache if it has a key."""
        self.touched += 1
        refs = self.refs[page] - 1
        if refs < 0:
            raise InternalError(f"page {page} is released but nobody holds it")
        self.refs[page] = refs
        if refs:
            return
        self.released += 1
        if self.keys[page] is None:
            self.free.append(page)
        else:
            self.cached[page] = None

    def register(self, page: int, key: bytes) -> bool:
        """Make a full page findable. False when equal content is already registered elsewhere."""
        self.touched += 1
        if key in self.index:
            return self.index[key] == page
        if self.keys[page] is not None:
            raise InternalError(f"page {page} is registered under two keys")
        self.index[key] = page
        self.keys[page] = key
        return True

    def forget(self, key: bytes) -> None:
        """Make the page under `key`, if there is one, unfindable; its holders keep it."""
        page = self.index.get(key)
        if page is None:
            return
        self._forget(page)
        if page in self.cached:
            del self.cached[page]
            self.free.append(page)

    def forget_cached(self) -> None:
        """Drop all content that nobody holds (weights changed, a cache flush was asked for)."""
        while self.cached:
            page, _ = self.cached.popitem(last=False)
            self._forget(page)
            self.free.append(page)

    def _forget(self, page: int) -> None:
        key = self.keys[page]
        if key is not None:
            del self.index[key]
            self.keys[page] = None


class SnapshotPool:
    """Places for copies of one state group: cached under a key, or held as scratch by one slot."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.index: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.free = list(range(places - 1, -1, -1))
        self.scratch: dict[int, int] = {}  # place -> slot
        self.evictions = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.index)

    def save(self, key: bytes) -> int | None:
        """A place to save under `key`; None when it is saved already or all places are scratch."""
        if key in self.index:
            self.index.move_to_end(key)
            return None
        place = self._take()
        if place is not None:
            self.index[key] = place
        return place

    def find(self, key: bytes) -> int | None:
        return self.index.get(key)

    def use(self, key: bytes) -> None:
        """A hit: the key becomes the most recently used."""
        self.index.move_to_end(key)

    def forget(self, key: bytes) -> None:
        place = self.index.pop(key, None)
        if place is not None:
            self.free.append(place)

    def hold(self, slot: int) -> int | None:
        """A scratch place for `slot`, or None."""
        place = self._take()
        if place is not None:
            self.scratch[place] = slot
        return place

    def unhold(self, place: int) -> None:
        del self.scratch[place]
        self.free.append(place)

    def _take(self) -> int | None:
        if self.free:
            return self.free.pop()
        if not self.index:
            return None
        _, place = self.index.popitem(last=False)
        self.evictions += 1
        return place
