//! What `GET /` shows.

use crate::model::InstanceInfo;

/// The version of Firecracker whose API this is.
pub const IMITATED_VERSION: &str = "1.16.1";

/// Id and program name that `GET /` shows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InstanceName {
    /// The id that the process was given.
    pub id: String,
    /// The name of the program.
    pub app_name: &'static str,
}

impl InstanceName {
    /// Returns the answer to `GET /` in this state.
    pub(super) fn shown(&self, state: &str) -> InstanceInfo {
        InstanceInfo {
            id: self.id.clone(),
            state: state.to_owned(),
            vmm_version: IMITATED_VERSION.to_owned(),
            app_name: self.app_name.to_owned(),
        }
    }
}
