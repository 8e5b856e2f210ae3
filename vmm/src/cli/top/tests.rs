//! See `screen`: what is drawn of which page.
