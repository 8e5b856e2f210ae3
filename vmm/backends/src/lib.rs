//! The backends that run a guest: the KVM machine, and host threads for hosts without KVM. Both can
//! run the payload guest of `driftline-images`. Only this crate and those above it depend on that
//! guest.
//!
//! | module | owns |
//! | --- | --- |
//! | `choice` | the choice of a backend by a guest's configuration: [`launch`], [`Factory`] |
//! | `payload` | the payload as an image for the KVM machine, and where its working set lies |
//! | `threads` | the backend that runs the payload's workload on host threads |

mod choice;
mod payload;
mod threads;

pub use choice::{Factory, LaunchError, launch, launch_as};
pub use payload::{Misfit, PayloadError, image};
