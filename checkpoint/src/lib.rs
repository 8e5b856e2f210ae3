//! Guest state, stored: the `Guest` trait, its state sections, the epoch store and restore.
