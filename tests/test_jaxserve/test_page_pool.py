import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kv import hashing
from jaxserve.kv.page_pool import PagePool


def test_allocation_never_hands_out_the_trash_page_and_changes_nothing_when_it_fails():
    pool = PagePool(5, 4)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.check_integrity([pages])
    pool.free(pages)
    assert pool.num_available == 4


def test_freeing_a_page_that_nobody_owns_is_our_mistake():
    pool = PagePool(4, 4)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.free(pages)


def test_idle_pages_are_found_again_and_the_least_recent_is_evicted_first():
    pool = PagePool(4, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.insert(first[0], b"a")
    pool.insert(second[0], b"b")
    pool.free(first)
    pool.free(second)
    assert pool.match([b"a", b"x"]) == first
    pool.share(first)  # now owned again, so only b may go
    taken = pool.allocate(2)
    assert second[0] in taken
    assert pool.match([b"b"]) == []
    pool.check_integrity([first, taken])


def test_of_one_sequence_the_last_page_is_evicted_first():
    pool = PagePool(4, 2)
    pages = pool.allocate(3)
    for page, key in zip(pages, (b"1", b"2", b"3"), strict=True):
        pool.insert(page, key)
    pool.free(pages)
    pool.allocate(1)
    assert pool.match([b"1", b"2", b"3"]) == pages[:2]


def test_a_hash_covers_what_stands_before_and_the_salt():
    start = hashing.chain_start("")
    one = hashing.page_hash(start, [1, 2])
    assert hashing.page_hash(start, [1, 2]) == one
    assert hashing.page_hash(start, [1, 3]) != one
    assert hashing.page_hash(one, [1, 2]) != one
    assert hashing.page_hash(hashing.chain_start("other"), [1, 2]) != one


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 7)), max_size=60))
def test_pages_balance_under_any_order_of_calls(steps):
    pool = PagePool(12, 2)
    owners: list[list[int]] = []
    for action, count, number in steps:
        if action == 0:
            pages = pool.allocate(count)
            if pages is not None:
                owners.append(pages)
        elif action == 1 and owners:
            pool.free(owners.pop(number % len(owners)))
        elif action == 2 and owners:
            pool.insert(owners[number % len(owners)][0], bytes([number]))
        elif action == 3:
            pages = pool.match([bytes([number])])
            pool.share(pages)
            if pages:
                owners.append(pages)
        pool.check_integrity(owners)
    for pages in owners:
        pool.free(pages)
    assert pool.num_available == pool.capacity
