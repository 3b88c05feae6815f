"""Page accounting: allocation with reference counts, and the prefix cache with LRU eviction.

A page is in exactly one state: free (content meaningless), owned (one or more sequences read or
write it), or idle (no owner, but its content is still known by its hash and may be found again;
evicted, least recently used first, when free pages run out). Page 0 is the trash page and belongs
to nobody.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Owns the ids 1 to num_pages - 1.

    All methods are O(pages named). `allocate` is the only one that can fail, and it then changes
    nothing. Pages must be freed as often as they were allocated or shared.
    """

    def __init__(
        self, num_pages: int, page_size: int, *, on_growth: Callable[[int], None] | None = None
    ) -> None:
        """on_growth: is told the highest id handed out so far, whenever that grows."""
        assert num_pages >= 2, "the pool needs the trash page and at least one other"
        self.num_pages = num_pages
        self.page_size = page_size
        self._on_growth = on_growth
        self._highest = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Pages that sequences can own."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_owned(self) -> int:
        return self.capacity - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages that `match` can find."""
        return len(self._page_of)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None when there are not so many."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._references[page] = 1
            pages.append(page)
        if pages and (highest := max(pages)) > self._highest:
            self._highest = highest
            if self._on_growth is not None:
                self._on_growth(highest)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Gives back one reference of each page.

        Later pages go idle first, so that of one sequence the shared beginning is evicted last.
        """
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} is freed but nobody owns it"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest known prefix of `hashes`; takes no reference."""
        pages = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Takes one reference of each matched page."""
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] += 1

    def insert(self, page: int, key: bytes) -> None:
        """Makes an owned, full page findable. A page with the same content keeps its place."""
        assert self._references[page] > 0, f"page {page} is inserted but nobody owns it"
        if key in self._page_of or page in self._hash_of:
            return
        self._page_of[key] = page
        self._hash_of[page] = key

    def forget_all(self) -> None:
        """Empties the prefix cache (the device's pages were lost). Owned pages stay owned."""
        self._page_of.clear()
        self._hash_of.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts that every page is in one state and that references match `owners`' page lists."""
        expected = [0] * self.num_pages
        for pages in owners:
            for page in pages:
                expected[page] += 1
        assert expected == self._references, "reference counts differ from the sequences' pages"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, "a page is free and idle"
        owned = {page for page, count in enumerate(self._references) if count}
        assert not owned & (free | idle), "an owned page is free or idle"
        assert owned | free | idle == set(range(1, self.num_pages)), "a page is lost"
        assert idle <= set(self._hash_of), "an idle page has no hash"
        assert {self._page_of[key] for key in self._page_of} == set(self._hash_of)
        assert all(self._hash_of[page] == key for key, page in self._page_of.items())
        assert not free & set(self._hash_of), "a free page can be found"
