//! Which guest frames changed, found at a cost proportional to what is dirty.
