"""Our attention under any Hugging Face decoder: one door to transformers, one trie, and what layers do over them.

`interface.py` is the door, `trie.py` lays sequences out. Over a trie: `paths.py` (packs and shared prefixes, with
gradients; FCI listens there), `prefill.py` (contexts, some of them carried). One token a row: `slots.py` and, over
pages of keys and values, `pages.py`, `layout.py`, `paged.py` and its kernels. `decoder.py` is what we ask of a model.
"""
