"""Where the tokens of a prefill go: pages for each context, whole shared ones held in common.

Shapes: T packed tokens, P carried and packed tokens, N contexts, M pages of the longest, B query blocks.
"""

from __future__ import annotations

import numpy as np

from attnrl.attention.paged import PagedPrefill
from attnrl.attention.pages import PAGE, Ints, PagePool, Pages, pages_for, sent, slots_of
from attnrl.attention.trie import Trie, query_blocks
from attnrl.types import Ids


def lay_out(
    pool: PagePool, carried: tuple[Ids, Pages] | None, contexts: list[Ids], trie: Trie
) -> tuple[list[Pages], PagedPrefill]:
    """Pages for each of the trie's contexts, taken from the pool, and the attention that fills them.

    A context holds the whole pages that it has in common with the one before it. Of a page that only begins alike, the
    beginning is copied: each row writes into its last page.
    """
    before = np.zeros(0, np.int32) if carried is None else carried[1]
    offset = 0 if carried is None else len(carried[0])
    slots_P = np.zeros(offset + len(trie.ids_T), np.int64)  # where each carried and packed token lies first
    slots_P[:offset] = slots_of(before, np.arange(offset))
    pages: list[Pages] = []
    copied: list[Ints] = []
    blocks: list[Ints] = []
    for i, (context, path, new) in enumerate(zip(contexts, trie.paths, trie.fresh, strict=True)):
        shared = len(context) - new
        whole = shared // PAGE
        mine = np.concatenate([pool.share(before[:whole]), pool.take(pages_for(len(context)) - whole)])
        positions = np.arange(whole * PAGE, len(context))
        places = slots_of(mine, positions)
        again = shared - whole * PAGE
        copied.append(np.stack([slots_P[path[positions[:again]]], places[:again]]))
        slots_P[path[positions[again:]]] = places[again:]
        if new:
            blocks.append(query_blocks(int(path[shared]) - offset, shared, len(context), i))
        pages.append(mine)
        before = mine
    return pages, prefill_attention(pool, pages, slots_P[offset:], np.concatenate(copied, 1), blocks)


def prefill_attention(
    pool: PagePool, pages: list[Pages], slots_T: Ints, copied_2X: Ints, blocks: list[Ints]
) -> PagedPrefill:
    """The attention of a prefill, on the pool's device; the longest blocks first. `blocks`: of each run."""
    table_NM = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, held in zip(table_NM, pages, strict=True):
        row[: len(held)] = held
    none = np.zeros((0, 4), np.int64)
    lasts = enumerate(block[-1] for block in blocks)
    ends = [np.array([[i, 1, position + count - 1, path]]) for i, (_, count, position, path) in lasts]
    blocks_B4, ends_N4 = (np.concatenate([none, *parts]).astype(np.int32) for parts in (blocks, ends))
    sorted_B4, sorted_N4 = (b[np.argsort(-b[:, 2], kind="stable")] for b in (blocks_B4, ends_N4))
    slots, table, *laid_out = (sent(a, pool.device) for a in (slots_T, table_NM, sorted_B4, sorted_N4))
    copies = None
    if copied_2X.shape[1]:
        source, target = sent(copied_2X, pool.device)
        copies = (source, target)
    return PagedPrefill(pool, slots, copies, table, *laid_out)
