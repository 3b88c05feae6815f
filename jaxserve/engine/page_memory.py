"""Has the operating system hand out a pool's memory before steps write to it (beside step 5).

On a CPU the KV pool takes memory only where it is written (`make_pages`), and each layer has its own
stretch of it: all of them come to their next huge page in the same step, which then waits for a
hundred of them to be cleared. Here a thread asks for them one by one, one huge page ahead of the
pages that sequences own. Best effort: where the system cannot, steps take their memory themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import jax

from jaxserve.sampling.state import SamplingState
from pallas_kernels.paged_attention import huge_pages
from pallas_kernels.paged_attention.reference import KVPages

#: Seconds between two requests: steps need the memory's bandwidth, too.
_PAUSE = 0.002

MakeState = Callable[[], tuple[KVPages, SamplingState]]


class PageMemory:
    """Follows one pool. `expect` may be called by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stretches: list[_Stretches] = []
        self._highest = 0
        self._thread: threading.Thread | None = None

    def following(self, make_state: MakeState, num_layers: int) -> MakeState:
        """make_state, whose pages are followed from then on: those that it made last."""

        def make() -> tuple[KVPages, SamplingState]:
            pages, sampling = make_state()
            self._follow(pages, num_layers)
            return pages, sampling

        return make

    def expect(self, page: int) -> None:
        """Pages up to this one will be written soon."""
        with self._changed:
            self._highest = max(self._highest, page)
            self._changed.notify()

    def _follow(self, pages: KVPages, num_layers: int) -> None:
        stretches = [
            found
            for leaf in jax.tree.leaves(pages)
            if (found := _find_stretches(leaf, num_layers)) is not None
        ]
        with self._changed:
            self._stretches = stretches
            self._changed.notify()
        if stretches and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="page-memory", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (due := [s for s in self._stretches if s.is_due(self._highest)]):
                    self._changed.wait()
                stretches, layer_calls = due[0], due[0].next_calls()
            for address, size in layer_calls:
                if not huge_pages.populate(address, size):
                    stretches.done = stretches.size
                    break
                time.sleep(_PAUSE)


class _Stretches:
    """One array's memory: a stretch per layer, of which the first `done` bytes were asked for."""

    def __init__(self, address: int, size: int, num_layers: int, page_bytes: int) -> None:
        self.address, self.size, self.num_layers = address, size, num_layers
        self.page_bytes = page_bytes
        self.done = 0

    def is_due(self, highest: int) -> bool:
        """Whether the pages up to `highest` come closer to the end than a huge page."""
        wanted = (highest + 1) * self.page_bytes + huge_pages.HUGE_BYTES
        return self.done < min(wanted, self.size)

    def next_calls(self) -> list[tuple[int, int]]:
        """Address and size of the next huge page of each layer."""
        begin = self.done
        self.done = min(begin + huge_pages.HUGE_BYTES, self.size)
        return [
            (self.address + layer * self.size + begin, self.done - begin)
            for layer in range(self.num_layers)
        ]


def _find_stretches(leaf: jax.Array, num_layers: int) -> _Stretches | None:
    """None where there is nothing to do: on accelerators, on several devices, for small pools."""
    shards = leaf.addressable_shards
    size = leaf.nbytes // num_layers
    if len(shards) != 1 or shards[0].device.platform != "cpu" or size < huge_pages.HUGE_BYTES:
        return None
    pages = leaf.shape[0] // num_layers
    address = shards[0].data.unsafe_buffer_pointer()
    return _Stretches(address, size, num_layers, size // pages)
