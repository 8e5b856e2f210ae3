//! `docs/openapi.yaml` and the server agree, in both directions.
//!
//! | module | law |
//! | --- | --- |
//! | `document` | the document is valid, and its examples are what its schemas describe |
//! | `routes` | operations, bodies and parameters are those of the routes and of the parser |
//! | `parser` | the paths that the parser of Firecracker's operations knows are documented |
//! | `methods` | a started process refuses methods and paths that the document does not have |
//! | `http` | statuses of the HTTP server are documented, and each is seen |
//! | `schemas` | fields, types and values are those of the types in Rust |
//! | `statuses` | statuses are those of the recorded answers |
//! | `refusals` | a started process refuses what the document does not permit |
//! | `guests` | started guests accept the examples, and answer as documented |

mod document;
mod guests;
mod http;
mod methods;
mod model;
mod parser;
mod refusals;
mod routes;
mod schemas;
mod session;
mod statuses;
