//! Guest state, streamed: live migration of a `checkpoint::Guest` over TCP.
