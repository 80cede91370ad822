"""What HSTU computed for a user, kept so that only new events are encoded: the K and V rows of every layer, and the final states.

    rows.py       what a row is known by: (item, its time, the time of the next event); digests of pages of rows
    pool.py       memory in pages of equally many rows, counted references, a byte budget
    store.py      the interface: match a history, read what is kept of it, commit the new rows, release, forget
    paged.py      PagedStates: a page table per user, least recently used user evicted first
    radix.py      RadixStates: a prefix tree; equal prefixes are stored once
    device.py     DeviceTier: tensors of recent users on the accelerator, over one of the two in (pinned) host memory

    states = PagedStates(PagePool(planes, page_rows=64, budget_bytes=1 << 30))
    rows = identities(items, times)                     # (n - 1, 3): row i is final once event i + 1 is known
    with states.matched(Owner("model/tenant", "user"), rows) as held:
        held.read({"kt": kt, "v": v})                   # the first held.rows rows of each
        ...                                             # encode rows held.rows .. n - 1
        states.commit(held, rows, held.rows, {"kt": new_kt, "v": new_v, "states": new_states})    # rows held.rows .. n - 2

Arrays have their rows along the plane's own axis: `Plane(shape=(layers, heads, dim), axis=3)` takes (layers, heads, dim, rows).
Everything but the device tier needs numpy only, and that imports torch when it is made.
"""
