"""Where the tokens of a prefill go: pages for each context, whole shared ones held in common.

Shapes: T packed tokens, P carried and packed tokens, N contexts, M pages of the longest, B query blocks.
"""

from __future__ import annotations

import numpy as np

from attnrl.attention.paged import QUERY_BLOCK, PagedPrefill
from attnrl.attention.pages import PAGE, Ints, PagePool, Pages, pages_for, sent, slots_of
from attnrl.attention.trie import Trie
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


def query_blocks(first: int, start: int, stop: int, path: int) -> Ints:
    """Blocks of the packed queries from `first` on, at positions `start` to `stop` of a path: [B, 4].

    >>> query_blocks(10, 100, 170, 3).tolist()
    [[10, 64, 100, 3], [74, 6, 164, 3]]
    """
    starts = np.arange(start, stop, QUERY_BLOCK)
    counts = np.minimum(QUERY_BLOCK, stop - starts)
    return np.stack([first + starts - start, counts, starts, np.full(len(starts), path)], 1)


def prefill_attention(
    pool: PagePool, pages: list[Pages], slots_T: Ints, copied_2X: Ints, blocks: list[Ints]
) -> PagedPrefill:
    """The attention of a prefill, on the pool's device; the longest blocks first."""
    table_NM = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, held in zip(table_NM, pages, strict=True):
        row[: len(held)] = held
    blocks_B4 = np.concatenate(blocks or [np.zeros((0, 4), np.int64)]).astype(np.int32)
    blocks_B4 = blocks_B4[np.argsort(-blocks_B4[:, 2], kind="stable")]
    slots, table, block = (sent(a, pool.device) for a in (slots_T, table_NM, blocks_B4))
    copies = None
    if copied_2X.shape[1]:
        source, target = sent(copied_2X, pool.device)
        copies = (source, target)
    return PagedPrefill(pool, slots, copies, table, block)
